"""A mixture-of-experts feed-forward layer. T tokens, H width, E experts, K experts per token, F expert width."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyfast import ops
from pyfast.kernels.dtypes import sum_dtype
from pyfast.nn.feed_forward import FeedForward
from pyfast.nn.layout import Layout
from pyfast.nn.parameter import LayoutModule, linear_bound, new_parameter
from pyfast.ops.balance import BALANCE_SCOPES
from pyfast.ops.checks import check_number
from pyfast.ops.main_grad import Defer

# The arguments of ops.route that belong to a layer; the others belong to a call.
ROUTING = (
    "score", "softmax_over", "normalize", "num_groups", "topk_groups", "group_score", "capacity", "capacity_factor",
    "drop", "choice", "slots", "jitter", "random_steps", "seed",
)  # fmt: skip
_TRAINING_ONLY = ("jitter", "random_steps")


class MoEOutput(NamedTuple):
    """What a call of `MoE` gives. Nothing of it is kept by the layer, and no global adds it up."""

    y: Tensor  # [..., H] like x
    losses: dict[str, Tensor]  # "<name>.balance", "<name>.z": scalars times their weights, sums over valid tokens
    counts: Tensor  # int64 [E]: slots that went to each expert
    load: Tensor  # int64 [E]: slots that chose each expert, before any was dropped
    dropped: Tensor  # int64 []: slots that chose an expert and were dropped


class MoE(LayoutModule):
    """y = sum over the chosen experts e of weight_e * down_e(silu(gate_e(x)) * up_e(x)), + shared experts.

    Args:
        width, expert_width, num_experts, experts_per_token: H, F, E and K.
        routed_scale: factor of the routed experts' weights.
        shared_experts: experts of `expert_width` that every token uses, as one feed-forward layer.
        shared_expert_width: the whole width of that layer, if not shared_experts * expert_width.
        shared_expert_gate: multiply its output by sigmoid(x . g) (Qwen2-MoE).
        balancing_bias: keep a bias that steers tokens to idle experts when `update_balancing_bias` is called
            (DeepSeek-V3). It decides the choice only. It is a float32 buffer and stays float32 whatever the layer is
            converted to.
        balance: over which tokens the balancing loss is taken: "sequence", "micro_batch", "global_batch".
        aux_loss_weight, z_loss_weight: weights of the balancing loss and of the router's z-loss; 0: not computed.
        balance_group: the group of ranks over which those tokens are spread, see `ops.route`.
        recompute: see `ops.moe_mlp`.
        name: names the losses.
        routing: score, softmax_over, normalize, num_groups, topk_groups, group_score, capacity, capacity_factor, drop,
            choice, slots, jitter, random_steps, seed: as in `ops.route`. Jitter and random routing are for training
            and are left out in eval mode; layers with the same seed draw the same noise, so give each its own.

    Parameters: router [E, H], w_gate_up [E, 2F, H], w_down [E, H, F], and those of the shared experts. The router
    computes in float32 (float64 for float64), under autocast too.

    Raises ValueError or TypeError, naming the argument, for options that do not go together.
    """

    def __init__(
        self,
        width: int,
        expert_width: int,
        num_experts: int,
        experts_per_token: int,
        *,
        routed_scale: float = 1.0,
        shared_experts: int = 0,
        shared_expert_width: int | None = None,
        shared_expert_gate: bool = False,
        balancing_bias: bool = False,
        balance: str = "micro_batch",
        aux_loss_weight: float = 0.0,
        z_loss_weight: float = 0.0,
        balance_group: object | None = None,
        recompute: bool = False,
        name: str = "moe",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        **routing: object,
    ) -> None:
        super().__init__()
        _check_sizes(1, width=width, expert_width=expert_width, num_experts=num_experts)
        self.width, self.num_experts, self.experts_per_token = width, num_experts, experts_per_token
        self.routing = {"scale": routed_scale, **_checked_routing(routing)}
        self.balance, self.balance_group, self.recompute, self.name = balance, balance_group, recompute, name
        self.aux_loss_weight, self.z_loss_weight = aux_loss_weight, z_loss_weight
        options = {"dtype": dtype, "device": device}
        shapes = {
            "router": (num_experts, width),
            "w_gate_up": (num_experts, 2 * expert_width, width),
            "w_down": (num_experts, width, expert_width),
        }
        for parameter, shape in shapes.items():
            bound = linear_bound(shape[-1])
            setattr(self, parameter, new_parameter(Layout(shape), None, "tp", bound=bound, **options))
        self.shared = self.shared_gate = None
        _check_sizes(0, shared_experts=shared_experts, shared_expert_width=shared_expert_width or 0)
        shared_width = shared_experts * expert_width if shared_expert_width is None else shared_expert_width
        if shared_width:
            self.shared = FeedForward(width, shared_width, name=f"{name}.shared", **options)
        if shared_expert_gate:
            if not shared_width:
                raise ValueError("shared_expert_gate=True without shared_experts; give shared_experts or leave it out")
            bound = linear_bound(width)
            self.shared_gate = new_parameter(Layout((1, width)), None, "tp", bound=bound, **options)
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if balancing_bias else None
        self.register_buffer("balancing_bias", bias)
        self._check_options()

    def forward(
        self,
        x: Tensor,
        valid: Tensor | int | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        token_ids: Tensor | None = None,
        step: int | None = None,
        global_load: Tensor | None = None,
        global_valid_tokens: Tensor | None = None,
        main_grads: tuple[Tensor, Tensor] | None = None,
        defer: Defer | None = None,
    ) -> MoEOutput:
        """x [..., H] -> an `MoEOutput`; x [B, S, H] are B documents, x [T, H] those of cu_seqlens.

        A token all of whose slots were dropped gets 0 from the routed experts and goes on through the residual. The
        counts are of this call alone: sum them over a step's micro-batches.

        Args:
            valid: bool [...], or how many tokens are valid, the first ones. The others, whatever they hold, get y = 0,
                have no gradient and enter no loss and no count.
            cu_seqlens: int32 [documents + 1], for x [T, H].
            token_ids: int64 [...]; step: the training step; global_load, global_valid_tokens: as in `ops.route`.
            main_grads, defer: for the gradients of (w_gate_up, w_down), as in `ops.moe_mlp`.

        Raises:
            TypeError, ValueError: naming the argument that does not fit, before anything is computed.
        """
        if x.dim() < 2 or x.shape[-1] != self.width:
            raise ValueError(
                f"x has shape {tuple(x.shape)}; it must be [..., {self.width}], with a dimension of tokens"
            )
        rows = x.reshape(-1, self.width)
        valid = _mask("valid", valid, x)
        if valid is not None:  # else a NaN among the padding would reach the gradient of the router
            rows = rows.masked_fill(~valid.unsqueeze(1), 0)
        routing = self._route(
            rows,
            valid=valid,
            token_ids=_of_tokens("token_ids", token_ids, x),
            cu_seqlens=self._documents(cu_seqlens, x),
            step=step,
            **self._balancing(global_load, global_valid_tokens),
        )
        y = ops.moe_mlp(
            rows, routing.experts, routing.weights, self.w_gate_up, self.w_down, main_grads=main_grads, defer=defer,
            recompute=self.recompute,
        )  # fmt: skip
        if self.shared is not None:
            y = y + self._shared(rows)
        losses = {}
        if self.aux_loss_weight:
            losses[f"{self.name}.balance"] = self.aux_loss_weight * routing.balance_loss
        if self.z_loss_weight:
            losses[f"{self.name}.z"] = self.z_loss_weight * routing.z_loss
        return MoEOutput(y.view(x.shape), losses, routing.counts, routing.load, routing.dropped)

    def update_balancing_bias(self, load: Tensor, rate: float = 1e-3) -> None:
        """Move the balancing bias by `rate` towards even loads: once per optimizer step, after its last backward.

        load: int [E], `MoEOutput.load` summed over the step's micro-batches and over all ranks that hold tokens.
        """
        if self.balancing_bias is None:
            raise ValueError("this layer has no balancing bias: make it with balancing_bias=True")
        ops.update_bias(self.balancing_bias, load, rate)

    def extra_repr(self) -> str:
        routing = ", ".join(f"{key}={value}" for key, value in self.routing.items())
        sizes = f"width={self.width}, expert_width={self.w_down.shape[2]}, num_experts={self.num_experts}"
        return f"{sizes}, experts_per_token={self.experts_per_token}, {routing}"

    def _route(self, rows: Tensor, **call: object) -> ops.Routing:
        """The routing of rows [T, H]; logits are computed in float32 (float64), as small differences choose experts."""
        wide = sum_dtype(rows.dtype)
        with torch.autocast(rows.device.type, enabled=False):
            logits = ops.linear(rows.to(wide), self.router.to(wide))
        return ops.route(
            logits, self.experts_per_token, bias=self.balancing_bias, z_loss=self.z_loss_weight != 0, name=self.name,
            **{key: value for key, value in self.routing.items() if self.training or key not in _TRAINING_ONLY}, **call,
        )  # fmt: skip

    def _balancing(self, load: Tensor | None, valid_tokens: Tensor | None) -> dict[str, object]:
        """The arguments of `ops.route` for the balancing loss."""
        given = {"global_load": load, "global_valid_tokens": valid_tokens}
        if self.aux_loss_weight:
            given |= {"balance": self.balance, "group": self.balance_group}
        return given

    def _documents(self, cu_seqlens: Tensor | None, x: Tensor) -> Tensor | None:
        """Starts of the documents in the rows of x."""
        if cu_seqlens is not None:
            if x.dim() != 2:
                raise ValueError(f"x has shape {tuple(x.shape)}; with cu_seqlens it must be packed: [T, {self.width}]")
            return cu_seqlens
        if self.balance != "sequence" or x.dim() == 2:
            return None
        length = x.shape[-2]
        return torch.arange(x.shape[:-2].numel() + 1, dtype=torch.int32, device=x.device) * length

    def _shared(self, rows: Tensor) -> Tensor:
        y = self.shared(rows)
        return y if self.shared_gate is None else torch.sigmoid(ops.linear(rows, self.shared_gate)) * y

    def _check_options(self) -> None:
        """Let `ops.route` judge the options, on no tokens."""
        check_number("aux_loss_weight", self.aux_loss_weight, least=0)
        check_number("z_loss_weight", self.z_loss_weight, least=0)
        if self.balance not in BALANCE_SCOPES:
            raise ValueError(f"balance is {self.balance!r}; allowed are {', '.join(map(repr, BALANCE_SCOPES))}")
        nothing = torch.zeros(0, self.num_experts, device="cpu")
        bias = None if self.balancing_bias is None else torch.zeros(self.num_experts, dtype=torch.float32, device="cpu")
        balance = {"balance": "micro_batch"} if self.aux_loss_weight else {}
        ops.route(nothing, self.experts_per_token, step=0, bias=bias, **balance, **self.routing)

    def _apply(self, fn, recurse: bool = True):
        bias = self.balancing_bias
        result = super()._apply(fn, recurse)
        if bias is not None and self.balancing_bias.dtype != torch.float32:  # converted: moved, but not rounded
            self.balancing_bias = bias.to(self.balancing_bias.device)
        return result

    def _load_from_state_dict(self, state_dict, prefix, *args, **kwargs) -> None:
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
        if self.balancing_bias is not None and self.balancing_bias.dtype != torch.float32:  # assigned from a checkpoint
            self.balancing_bias = self.balancing_bias.float()


def _check_sizes(least: int, **sizes: int) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < least:
            raise ValueError(f"{name} is {size!r}; a whole number of at least {least} is needed")


def _checked_routing(routing: dict[str, object]) -> dict[str, object]:
    for name in routing:
        if name not in ROUTING:
            raise TypeError(f"{name} is no argument of MoE; of ops.route's it takes {', '.join(ROUTING)}")
    return routing


def _of_tokens(name: str, values: Tensor | None, x: Tensor) -> Tensor | None:
    """`values` [...] as [T]."""
    if values is None:
        return None
    if not isinstance(values, Tensor) or values.shape != x.shape[:-1]:
        what = f"has shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"is {values!r}"
        raise ValueError(f"{name} {what}; a tensor of shape {tuple(x.shape[:-1])}, x's tokens, is needed")
    return values.reshape(-1)


def _mask(name: str, valid: Tensor | int | None, x: Tensor) -> Tensor | None:
    """`valid` as a bool [T]."""
    count = isinstance(valid, int) and not isinstance(valid, bool)
    if count or (isinstance(valid, Tensor) and valid.dim() == 0 and not valid.is_floating_point()):
        return torch.arange(x.shape[:-1].numel(), device=x.device) < valid
    mask = _of_tokens(name, valid, x)
    if mask is not None and (mask.dtype != torch.bool or mask.device != x.device):
        raise ValueError(f"{name} is {mask.dtype} on {mask.device}; a bool tensor on {x.device}, x's device, is needed")
    return mask
