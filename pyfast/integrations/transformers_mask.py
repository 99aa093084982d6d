"""The mask of a transformers model in the form the kernels take: flags, a window and documents, never an [S, S] array.

transformers describes a mask by a function of indices (causal, sliding window, packed sequences) together with a
padding mask [B, S] and the places of queries and keys in the sequence. `create_mask` stands in its mask registry, is
called once a forward and a kind of layer, and reads that description; what it cannot express it refuses.

B batch, S sequence (Sq, Sk), T packed tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

UNBOUNDED = (-1, -1)


@dataclass(frozen=True, eq=False)
class Documents:
    """Which rows of the flattened batch attend to each other.

    cu_seqlens_q, cu_seqlens_k: int32 [documents + 1], among the chosen rows. rows_q, rows_k: int64, the rows of
    [B * Sq] and [B * Sk] that are chosen, in order; None: all.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    rows_q: Tensor | None = None
    rows_k: Tensor | None = None

    def same(self, other: Documents) -> bool:
        """Whether both choose the same documents, all rows among them."""
        whole = all(rows is None for rows in (self.rows_q, self.rows_k, other.rows_q, other.rows_k))
        return whole and all(
            torch.equal(a.cpu(), b.cpu())
            for a, b in ((self.cu_seqlens_q, other.cu_seqlens_q), (self.cu_seqlens_k, other.cu_seqlens_k))
        )


@dataclass(frozen=True, eq=False)
class Mask:
    """What a query sees: the first `keys` keys of its document, bottom-right aligned with the queries.

    `shape` is that of the dense mask it stands for, [B, 1, Sq, Sk]; models pass it on without looking inside.
    """

    shape: tuple[int, int, int, int]
    causal: bool
    window: tuple[int, int]
    keys: int  # of Sk; a static cache is longer than what it holds
    documents: Documents | None

    @property
    def ndim(self) -> int:
        return 4


@dataclass
class Pattern:
    """What a mask function of transformers says, apart from padding."""

    causal: bool = False
    left: int = -1
    right: int = -1
    documents: Tensor | None = None  # [B, S] number of each token's sequence


def create_mask(
    batch_size: int,
    kv_length: int,
    mask_function: Callable,
    attention_mask: Tensor | Mask | None = None,
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    cache_position: Tensor | None = None,
    **how: object,
) -> Mask:
    """What transformers calls for a mask: queries [q_offset, q_offset + q_length), keys from kv_offset on.

    Args:
        mask_function: one of transformers' own; `attention_mask`: padding, bool [B, S] from position 0, true = token.
        cache_position: positions of the queries (transformers 4, instead of q_length and q_offset).
        how: ways to build a dense mask, of no meaning here (dtype, use_vmap, allow_is_causal_skip, ...).

    Raises ValueError for masks the kernels cannot express.
    """
    if cache_position is not None:
        q_length, q_offset = cache_position.shape[0], cache_position[0]
    shape = (batch_size, 1, q_length, kv_length)
    if isinstance(attention_mask, Mask):  # made before by generate(), which hands it to the model
        if attention_mask.shape != shape:
            raise ValueError(f"the mask was made for [B, 1, Sq, Sk] = {attention_mask.shape}, now {shape} is needed")
        return attention_mask
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}; pyfast attention takes [B, S]")
    pattern = _read(mask_function)
    last = int(q_offset) + q_length - kv_offset  # one past the last query, in places of keys
    keys = min(kv_length, last) if pattern.causal else kv_length
    ordered = pattern.causal or pattern.left >= 0 or pattern.right >= 0
    if ordered and (keys != last or keys < q_length):
        raise ValueError(
            f"queries at positions {int(q_offset)} to {int(q_offset) + q_length - 1} and keys at {kv_offset} to "
            f"{kv_offset + kv_length - 1}: pyfast attention needs the last query to be the last key"
        )
    if pattern.documents is not None:
        documents = _packed_sequences(pattern.documents, attention_mask, q_length, kv_length)
    else:
        documents = _without_padding(attention_mask, pattern, ordered, shape, keys, kv_offset)
    return Mask(shape, pattern.causal, (pattern.left, pattern.right), keys, documents)


def _read(function: Callable) -> Pattern:
    """Take a mask function of transformers apart: its functions are nested, each with its numbers in its closure."""
    from transformers import masking_utils

    pattern = Pattern()
    if function is masking_utils.causal_mask_function:
        pattern.causal = True
        return pattern
    if function is getattr(masking_utils, "bidirectional_mask_function", None):
        return pattern
    kind = getattr(function, "__qualname__", "") if _of_transformers(function, masking_utils) else ""
    closure = _closure(function)
    if kind == "and_masks.<locals>.and_mask":
        for part in closure["mask_functions"]:
            _intersect(pattern, _read(part))
    elif kind == "sliding_window_overlay.<locals>.inner_mask":
        pattern.left = closure["sliding_window"] - 1
    elif kind == "sliding_window_bidirectional_overlay.<locals>.inner_mask":
        pattern.left = pattern.right = closure["sliding_window"]
    elif kind == "packed_sequence_mask_function.<locals>.inner_mask":
        pattern.documents = closure["packed_sequence_mask"]
    elif kind == "remap_positions_for_packed_sequence.<locals>.inner_mask":
        # Positions instead of places: within a sequence they differ by the same steps.
        return _read(closure["mask_function"])
    else:
        name = kind.partition(".")[0] or getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"the model's mask uses {name}, which pyfast attention cannot express (it knows causal and bidirectional "
            "masks, sliding windows, padding and packed sequences); use attn_implementation='eager' or 'sdpa'"
        )
    return pattern


def _of_transformers(function: Callable, masking_utils: object) -> bool:
    return getattr(function, "__module__", None) == masking_utils.__name__


def _closure(function: Callable) -> dict[str, object]:
    cells = getattr(function, "__closure__", None)
    if not cells:
        return {}
    return dict(zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True))


def _intersect(pattern: Pattern, other: Pattern) -> None:
    """Make `pattern` see what both see."""
    pattern.causal |= other.causal
    pattern.left = max(pattern.left, other.left) if -1 in (pattern.left, other.left) else min(pattern.left, other.left)
    pattern.right = (
        max(pattern.right, other.right) if -1 in (pattern.right, other.right) else min(pattern.right, other.right)
    )
    if other.documents is not None:
        if pattern.documents is not None:
            raise ValueError("the model's mask packs sequences twice; pyfast attention expects one packing")
        pattern.documents = other.documents


def _packed_sequences(numbers: Tensor, attention_mask: Tensor | None, q_length: int, kv_length: int) -> Documents:
    """Documents from the number of each token's sequence, [B, S]: a new one wherever the number or the row changes."""
    if attention_mask is not None or numbers.shape[1] != q_length or q_length != kv_length:
        raise ValueError("sequences packed by position_ids cannot be combined with a padding mask or a cache")
    first = torch.ones_like(numbers, dtype=torch.bool)
    first[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    starts = first.flatten().nonzero().flatten().int()
    cu_seqlens = torch.cat([starts, starts.new_tensor([numbers.numel()])])
    return Documents(cu_seqlens, cu_seqlens)


def _without_padding(
    attention_mask: Tensor | None, pattern: Pattern, ordered: bool, shape: tuple, keys: int, kv_offset: int
) -> Documents | None:
    """One document a row of the batch, of the tokens that are not padding; None where there is no padding."""
    if attention_mask is None:
        return None
    _, _, q_length, kv_length = shape
    token = attention_mask[:, kv_offset : kv_offset + keys].bool()
    token = F.pad(token, (0, keys - token.shape[1]))  # what lies beyond the mask is padding
    if token.all():
        return None
    if pattern.left >= 0 or pattern.right >= 0:
        pieces = token[:, 0].int() + (token[:, 1:] & ~token[:, :-1]).sum(1)
        if (pieces > 1).any():
            raise ValueError(
                "attention_mask has padding between the tokens of a row: a sliding window counts it, pyfast attention "
                "would not; pad on the left (tokenizer.padding_side = 'left') or on the right only"
            )
    rows_k = F.pad(token, (0, kv_length - keys)).flatten().nonzero().flatten()
    cu_k = _starts(token.sum(1))
    # Bidirectional: queries may be of another sequence, and see all keys from any place.
    asked = token[:, keys - q_length :] if ordered else token.new_ones(shape[0], q_length)
    rows_q = None if asked.all() else asked.flatten().nonzero().flatten()
    return Documents(_starts(asked.sum(1)), cu_k, rows_q, rows_k)


def _starts(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0)).int()
