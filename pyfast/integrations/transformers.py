"""attn_implementation="pyfast" for transformers models, through transformers' own registries, and with it
experts_implementation="pyfast" (transformers_experts.py).

B batch, S sequence, T packed tokens, N heads (Nq, Nk), D head size (Dv of the values). transformers keeps attention
tensors as [B, N, S, D].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from pyfast import ops
from pyfast.integrations import transformers_experts
from pyfast.integrations.transformers_mask import Documents, Mask, create_mask

# What models hand to every attention function and no attention function computes with.
_NOT_FOR_ATTENTION = frozenset(
    "cache_position cross_attention_states deterministic labels layer_idx logits_to_keep max_length_k max_length_q "
    "mm_token_type_ids num_items_in_batch output_hidden_states output_router_logits position_embeddings return_dict "
    "target_dtype token_type_ids use_cache".split()
)


class Registered(NamedTuple):
    """Which of the two `register` made known."""

    attention: bool
    experts: bool


def register(name: str = "pyfast") -> Registered:
    """Make `attn_implementation="pyfast"` known to transformers (4.56 or later), and `experts_implementation="pyfast"`
    (5.7 or later); calling it again changes nothing.

    The attention covers causal and bidirectional attention, sliding windows, softcaps, learnable sinks, grouped heads,
    padding on either side, sequences packed in one row (told by position_ids or cu_seq_lens_q, as transformers' flash
    attention tells them), and generation with dynamic, static and sliding caches. Rows of padding get attention output
    0. For the experts see `transformers_experts.experts_forward`.

    Args:
        name: the name to register, should "pyfast" be taken.

    Returns:
        (attention=True, experts): experts is False for a transformers that takes no experts from outside.

    Raises:
        ImportError: transformers is not installed, or too old.

    What a model asks for and the kernels lack - dropout in training, attention weights as an output, masks given as
    [B, 1, S, S] arrays, chunked attention, position biases - raises ValueError when the model runs.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            "pyfast.integrations.transformers needs transformers 4.56 or later: pip install -U transformers"
        ) from error
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, create_mask)
    return Registered(attention=True, experts=transformers_experts.register(name))


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """What transformers calls: query [B, Nq, Sq, D], key and value [B, Nk, Sk, D or Dv] -> (out [B, Sq, Nq, Dv], None).

    `attention_mask` is what `create_mask` made; `s_aux` are sinks [Nq]. Raises ValueError for what the kernels lack.
    """
    _refuse(attention_mask, dropout, others)
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    mask = _mask_of(module, q, k, attention_mask, sliding_window, is_causal)
    documents = mask.documents
    if cu_seq_lens_q is not None:
        documents = _given_documents(documents, q, k, cu_seq_lens_q, cu_seq_lens_k)
    elif documents is None and position_ids is not None:
        documents = _documents_of_positions(q, k, position_ids)
    options = dict(
        causal=mask.causal, window=mask.window, scale=scaling, softcap=softcap or 0.0, sinks=s_aux,
    )  # fmt: skip
    if documents is None:
        return ops.attention(q, k[:, : mask.keys], v[:, : mask.keys], **options), None
    return _packed(q, k, v, documents, options), None


def _refuse(attention_mask: object, dropout: float, others: dict[str, object]) -> None:
    if dropout:
        raise ValueError(
            f"dropout={dropout}: pyfast attention has no dropout; set attention_dropout=0.0 in the model's config"
        )
    if others.pop("output_attentions", None):
        raise ValueError(
            "output_attentions=True: pyfast attention never holds the weights; use attn_implementation='eager' for them"
        )
    unknown = sorted(key for key, value in others.items() if value is not None and key not in _NOT_FOR_ATTENTION)
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} given to attention: pyfast attention does not know it and will not ignore it; use "
            "attn_implementation='eager' or 'sdpa' for this model"
        )
    if not (attention_mask is None or isinstance(attention_mask, Mask)):
        what = f"shape {tuple(attention_mask.shape)}" if isinstance(attention_mask, Tensor) else type(attention_mask)
        raise ValueError(
            f"attention_mask of {what} was not made by pyfast: masks of arbitrary form ([B, 1, S, S], BlockMask) are "
            "not supported; give the model a padding mask [B, S], or use attn_implementation='eager' or 'sdpa'"
        )


def _mask_of(
    module: nn.Module, q: Tensor, k: Tensor, mask: Mask | None, sliding_window: int | None, is_causal: bool | None
) -> Mask:
    """The mask the model made, checked against the tensors and the window; without one, what the module says."""
    shape = (q.shape[0], 1, q.shape[1], k.shape[1])
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if causal and shape[2] not in (1, shape[3]):
            raise ValueError(
                f"causal attention of {shape[2]} queries on {shape[3]} keys came without a mask: which keys the first "
                "query sees is not known; use attn_implementation='eager' or 'sdpa' for this model"
            )
        left = -1 if sliding_window is None else sliding_window - 1
        return Mask(shape, bool(causal), (left, 0 if causal else left), shape[3], None)
    if mask.shape != shape:
        raise ValueError(f"the mask was made for [B, 1, Sq, Sk] = {mask.shape}; the tensors have {shape}")
    # Bidirectional windows are counted differently from model to model; there the mask alone is right.
    if sliding_window is not None and mask.causal and mask.window[0] != sliding_window - 1:
        if sliding_window < shape[3] or mask.window[0] >= 0:
            raise ValueError(
                f"sliding_window={sliding_window}, but the model's mask has a window of {mask.window[0] + 1} (0: none)"
            )
    return mask


def _given_documents(
    documents: Documents | None, q: Tensor, k: Tensor, cu_seq_lens_q: Tensor, cu_seq_lens_k: Tensor | None
) -> Documents:
    """The documents that the caller gave with the batch (DataCollatorWithFlattening does)."""
    given = Documents(cu_seq_lens_q.int(), (cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k).int())
    if documents is not None and not documents.same(given):
        raise ValueError(
            f"cu_seq_lens_q={cu_seq_lens_q.tolist()} does not agree with attention_mask or position_ids, which say "
            f"{documents.cu_seqlens_q.tolist()}: give one of them"
        )
    for name, starts, rows in (
        ("cu_seq_lens_q", given.cu_seqlens_q, q.shape[0] * q.shape[1]),
        ("cu_seq_lens_k", given.cu_seqlens_k, k.shape[0] * k.shape[1]),
    ):
        if starts[0] != 0 or starts[-1] != rows:
            raise ValueError(f"{name} is {starts.tolist()}; it must run from 0 to {rows}, all the tokens of the batch")
    return given


def _documents_of_positions(q: Tensor, k: Tensor, position_ids: Tensor) -> Documents | None:
    """Sequences packed in one row: each starts where the position is the lowest again, as for flash attention."""
    length = q.shape[1]
    if q.shape[0] != 1 or length == 1 or k.shape[1] != length or position_ids.shape != (1, length):
        return None
    positions = position_ids[0]
    lowest = positions.min()
    if torch.equal(positions, torch.arange(length, dtype=positions.dtype, device=positions.device) + lowest):
        return None
    starts = (positions == lowest).nonzero().flatten().int()
    if starts[0] != 0:
        raise ValueError(f"position_ids start with {positions[0].item()}, not with the lowest, {lowest.item()}")
    cu_seqlens = torch.cat([starts, starts.new_tensor([length])])
    return Documents(cu_seqlens, cu_seqlens)


def _packed(q: Tensor, k: Tensor, v: Tensor, documents: Documents, options: dict) -> Tensor:
    """Attention on [B, S, N, D] within documents; rows that are in none get 0."""
    batch, length = q.shape[:2]
    q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
    rows_q, rows_k = documents.rows_q, documents.rows_k
    if rows_q is not None:
        rows_q = rows_q.to(q.device)
        q = q.index_select(0, rows_q)
    if rows_k is not None:
        rows_k = rows_k.to(q.device)
        k, v = k.index_select(0, rows_k), v.index_select(0, rows_k)
    starts = {"cu_seqlens_q": documents.cu_seqlens_q.to(q.device), "cu_seqlens_k": documents.cu_seqlens_k.to(q.device)}
    out = ops.attention(q, k, v, **starts, **options)
    if rows_q is not None:
        out = out.new_zeros(batch * length, *out.shape[1:]).index_copy(0, rows_q, out)
    return out.unflatten(0, (batch, length))
