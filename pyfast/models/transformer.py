"""The decoder-only transformer. Shapes: B batch, S sequence, T packed tokens, H width, V vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from pyfast import ops
from pyfast.models.config import TransformerConfig
from pyfast.models.initialize import fill_initial, initialize
from pyfast.models.rope import RotaryTables
from pyfast.nn import Attention, ColumnParallelLinear, FeedForward, RMSNorm, VocabParallelEmbedding
from pyfast.nn.attention import KeyValueCache
from pyfast.nn.layout import get_layout, split_bounds
from pyfast.nn.linear import column_parallel_linear
from pyfast.nn.parameter import active_group
from pyfast.nn.recompute import Light, layer_kinds, run_layer
from pyfast.nn.recompute import offload as offload_saved
from pyfast.ops.collective import gather_from_group


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x)): [B, S, H] or packed [T, H] -> like x."""

    def __init__(self, config: TransformerConfig, index: int, *, recompute: str = "none", **options) -> None:
        super().__init__()
        self.recompute = recompute
        tensor = {"dtype": options["dtype"], "device": options["device"]}
        self.attention_norm = RMSNorm(config.width, eps=config.norm_eps, **tensor)
        self.attention = Attention(
            config.width,
            config.heads,
            config.kv_heads,
            config.head_size,
            qk_norm=config.qk_norm,
            norm_eps=config.norm_eps,
            window=config.window,
            bias=config.attention_bias,
            output_bias=config.attention_output_bias,
            name=f"layer {index} attention",
            **options,
        )
        self.ffn_norm = RMSNorm(config.width, eps=config.norm_eps, **tensor)
        self.ffn = FeedForward(
            config.width, config.ffn_width, bias=config.ffn_bias, name=f"layer {index} ffn", **options
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        *,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        def attention(x: Tensor, light: Light) -> Tensor:
            h = light(_normed, self.attention_norm, x)
            call = {"positions": positions, "cu_seqlens": cu_seqlens, "cache": cache, "light": light}
            return x + self.attention(h, cos, sin, **call)

        def ffn(x: Tensor, light: Light) -> Tensor:
            return x + self.ffn(light(_normed, self.ffn_norm, x), light=light)

        kept = "none" if cache is not None or not torch.is_grad_enabled() else self.recompute
        return run_layer(kept, attention, ffn, x)


def _normed(norm: RMSNorm, x: Tensor) -> Tensor:
    """norm(x) in the parameters' dtype, which differs from x's under a float32 residual stream."""
    return norm(x).to(norm.weight.dtype)


class Transformer(nn.Module):
    """A decoder-only transformer (Llama, Qwen, Mistral style), cut over the mesh's "tp" ranks.

    Arguments:
        config: TransformerConfig.
        mesh: a pyfast.parallel.ParallelMesh; None: one rank.
        dtype, device: of the parameters.
        seed: initial weights, see `initialize`; None leaves them as the modules made them, to be loaded over.
        recompute: what layers compute again in backward instead of keeping it, one of none, full, selective, attention
            and ffn, or a list of one a layer; see pyfast.nn.recompute.
        recompute_every: only every so many layers, the first among them.
        offload: keep what is saved for backward in host memory; on GPUs only.
    Raises ValueError when heads, kv_heads, ffn_width or vocab cannot be spread over the tensor-parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        mesh: object | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        seed: int | None = 0,
        recompute: str | Sequence[str] = "none",
        recompute_every: int = 1,
        offload: bool = False,
    ) -> None:
        super().__init__()
        self.config, self.mesh = config, mesh
        kinds = layer_kinds(recompute, config.layers, recompute_every)
        self.offload = (lambda: offload_saved(torch.device(device))) if offload else nullcontext
        with self.offload():  # raises here, not in the first forward
            pass
        self.group = None if mesh is None else active_group(mesh.group("tp"))
        tensor = {"dtype": dtype, "device": device}
        options = {"group": self.group, **tensor}
        self.embedding = VocabParallelEmbedding(config.vocab, config.width, **options)
        self.layers = nn.ModuleList(
            TransformerLayer(config, index, recompute=kind, **options) for index, kind in enumerate(kinds)
        )
        self.norm = RMSNorm(config.width, eps=config.norm_eps, **tensor)
        self.head = None
        if not config.tied_embeddings:
            self.head = ColumnParallelLinear(config.width, config.vocab, name="head", **options)
        # tables, not parameters: they are there even if the parameters are not yet
        self.rotary = RotaryTables(
            config, None if device is not None and torch.device(device).type == "meta" else device
        )
        if seed is not None:
            self.initialize(seed)

    def initialize(self, seed: int) -> Transformer:
        """Fill every parameter from (seed, its name): the same values in any layout and dtype. Returns self."""
        initialize(self, seed)
        return self

    def initial_values(self, seed: int) -> Callable[[str, Tensor], None]:
        """(parameter name, tensor of its local shape) -> None: writes what `initialize` would, for one parameter. For a
        model on the meta device, whose parameters come to life one after the other."""
        layouts = {name: get_layout(parameter) for name, parameter in self.named_parameters()}
        return lambda name, values: fill_initial(name, values, layouts[name], self.config, self.mesh, seed)

    @property
    def head_weight(self) -> nn.Parameter:
        """This rank's rows of the output projection [V_local, H]; the embedding's when they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """ids int64 [B, S] -> logits [B, S, V]; packed ids [T] -> [T, V]. The whole vocabulary on every rank.

        cu_seqlens: int32 [documents + 1], only with packed ids; None: one document. positions: int like ids or [S];
        None: counted from each document's start. caches: one per layer, for decoding. Raises ValueError for shapes
        that do not fit, ids outside the vocabulary and positions outside [0, max_positions).
        """
        h = self.hidden(ids, cu_seqlens=cu_seqlens, positions=positions, caches=caches)
        if self.group is None:
            return ops.linear(h, self.head_weight)
        logits = column_parallel_linear(h, self.head_weight, None, self.group, "head")
        bounds = (split_bounds(self.config.vocab, self.group.size, rank) for rank in range(self.group.size))
        return gather_from_group(logits, self.group, -1, "logits", sizes=[end - start for start, end in bounds])

    def loss(
        self,
        ids: Tensor,
        labels: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Sum of the cross entropy in nats over labels that are not -100; float32 (float64 for float64) scalar.

        labels int64, shaped like ids: the token that follows each position (already shifted). Logits are never stored.
        The other arguments as in `forward`.
        """
        if labels.shape != ids.shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, they must have the shape of ids {tuple(ids.shape)}"
            )
        h = self.hidden(ids, cu_seqlens=cu_seqlens, positions=positions)
        weight, vocab = self.head_weight, self.config.vocab
        return ops.linear_cross_entropy(h, weight, labels, group=self.group, vocab=vocab, name="loss")

    def hidden(
        self,
        ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        positions: Tensor | None = None,
        caches: list[KeyValueCache] | None = None,
    ) -> Tensor:
        """The normed last hidden state, [B, S, H] or [T, H], in the parameters' dtype: what the head is applied to."""
        check_inputs(ids, cu_seqlens, positions, self.config.max_positions)
        if ids.dim() == 1 and cu_seqlens is None:
            ids = ids.unsqueeze(0)
            positions = positions.unsqueeze(0) if positions is not None else None
            return self.hidden(ids, positions=positions, caches=caches).squeeze(0)
        if cu_seqlens is not None and positions is None:
            positions = packed_positions(cu_seqlens, ids.shape[0])
        x = self.embedding(ids)
        dtype = x.dtype
        if self.config.residual_dtype == "float32" and dtype.itemsize < 4:
            x = x.float()
        cos, sin = self.rotary.cos, self.rotary.sin
        with self.offload():
            for index, layer in enumerate(self.layers):
                cache = None if caches is None else caches[index]
                x = layer(x, cos, sin, positions=positions, cu_seqlens=cu_seqlens, cache=cache)
        return self.norm(x).to(dtype)


def packed_positions(cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Position of each of `tokens` packed tokens within its document; 0 for tokens of no document."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens, token, right=True) - 1
    positions = token - cu_seqlens[document.clamp(min=0)]
    return positions.masked_fill((document < 0) | (document >= cu_seqlens.shape[0] - 1), 0)


def check_inputs(ids: Tensor, cu_seqlens: Tensor | None, positions: Tensor | None, max_positions: int) -> None:
    """Raise TypeError for wrong dtypes, ValueError for wrong shapes and positions outside the rotary tables."""
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids are {getattr(ids, 'dtype', type(ids).__name__)}; an int64 or int32 tensor is needed")
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
            what = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
            raise TypeError(f"cu_seqlens is {what}; an int32 tensor is needed")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 1:
            raise ValueError(f"cu_seqlens has shape {tuple(cu_seqlens.shape)}; [documents + 1] is needed")
    shape = tuple(ids.shape)
    if ids.dim() not in (1, 2):
        raise ValueError(f"ids have shape {shape}, they must be [B, S], or packed [T]")
    if cu_seqlens is not None and ids.dim() != 1:
        raise ValueError(f"ids have shape {shape}; with cu_seqlens they must be packed: [T]")
    if positions is not None:
        if tuple(positions.shape) not in (shape, shape[-1:]):
            raise ValueError(
                f"positions have shape {tuple(positions.shape)}, they must be like ids {shape} or {shape[-1:]}"
            )
        if positions.device.type == "cpu" and positions.numel() and not torch.compiler.is_compiling():
            low, high = (int(x) for x in torch.aminmax(positions))
            if low < 0 or high >= max_positions:
                raise ValueError(
                    f"positions range from {low} to {high}, model.max_positions allows 0 to {max_positions - 1}"
                )
    elif shape[-1] > max_positions:
        longest = shape[-1] if cu_seqlens is None else max(cu_seqlens.diff().tolist(), default=0)
        if longest > max_positions:
            raise ValueError(f"a sequence of {longest} tokens is longer than model.max_positions={max_positions}")
