"""Grouped GEMM and the fused expert MLP on NVIDIA GPUs, the functions of `cpu_moe`: Triton, plain torch for float64.

T tokens, K top-k, R = T K sorted rows, E experts, H model width, F expert width. Nothing is read back from the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels import plain_moe
from pyfast.kernels.triton import grouped_gemm as gemm
from pyfast.kernels.triton import moe_mlp as mlp
from pyfast.kernels.triton.permute import unpermute_forward

Maps = tuple[Tensor, Tensor, Tensor, Tensor]  # a RowMap: offsets [E+1], gather [R], slot [R], inverse [T*K]


def grouped_gemm_forward(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    """See `cpu_moe.grouped_gemm_forward`."""
    if x.dtype == torch.float64:
        return plain_moe.grouped_gemm_forward(x, w, offsets, bias, transpose)
    return gemm.grouped_gemm(x, w, offsets, transpose=transpose, bias=bias)


def grouped_gemm_weight_gradient(left: Tensor, right: Tensor, offsets: Tensor, dw: Tensor, accumulate: bool) -> None:
    """See `cpu_moe.grouped_gemm_weight_gradient`."""
    if left.dtype == torch.float64:
        return plain_moe.grouped_gemm_weight_gradient(left, right, offsets, dw, accumulate)
    gemm.grouped_wgrad(left, right, offsets, dw, accumulate)


def grouped_bias_gradient(dy: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """See `cpu_moe.grouped_bias_gradient`."""
    if dy.dtype == torch.float64:
        return plain_moe.grouped_bias_gradient(dy, offsets, experts)
    return gemm.grouped_bias_grad(dy, offsets, experts)


def moe_mlp_forward(
    x: Tensor, maps: Maps, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """See `cpu_moe.moe_mlp_forward`; the pre-activation is [R, 2F], a row's gate and then its up."""
    if x.dtype == torch.float64:
        return plain_moe.moe_mlp_forward(x, maps, weights, w_gate_up, w_down, keep)
    offsets, gather, _, inverse = maps
    pre, activation = mlp.moe_up(x, w_gate_up, gather, offsets, store_h=keep)
    y = _sum_over_slots(gemm.grouped_gemm(activation, w_down, offsets), inverse, weights, True)
    return y, x.new_empty(0) if pre is None else pre


def moe_mlp_backward(
    dy: Tensor, x: Tensor, pre: Tensor | None, maps: Maps, weights: Tensor, w_gate_up: Tensor, w_down: Tensor,
    dw_gate_up: Tensor | None, dw_down: Tensor | None, accumulate: bool, need_dx: bool, need_dweights: bool,
    keep_rows: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """See `cpu_moe.moe_mlp_backward`."""
    if x.dtype == torch.float64:
        return plain_moe.moe_mlp_backward(
            dy, x, pre, maps, weights, w_gate_up, w_down, dw_gate_up, dw_down, accumulate, need_dx, need_dweights,
            keep_rows,
        )  # fmt: skip
    offsets, gather, slot, inverse = maps
    if pre is None:
        pre, _ = mlp.moe_up(x, w_gate_up, gather, offsets, store_a=False)
    dh, scaled, partial = mlp.moe_down_dgrad(dy, w_down, pre, weights.contiguous(), gather, slot, offsets)
    dweights = mlp.slot_sum(partial, inverse, weights.shape) if need_dweights else weights.new_empty(0)
    dx = x.new_empty(0)
    if need_dx:
        dx = _sum_over_slots(gemm.grouped_gemm(dh, w_gate_up, offsets, transpose=True), inverse, weights, False)
    kept = (dh, scaled)
    if not keep_rows:
        moe_mlp_weight_gradients(dy, x, kept, maps, dw_gate_up, dw_down, accumulate)
    return dx, dweights, kept


def moe_mlp_weight_gradients(
    dy: Tensor, x: Tensor, kept: tuple[Tensor, Tensor], maps: Maps, dw_gate_up: Tensor | None, dw_down: Tensor | None,
    accumulate: bool,
) -> None:  # fmt: skip
    """See `cpu_moe.moe_mlp_weight_gradients`."""
    if x.dtype == torch.float64:
        return plain_moe.moe_mlp_weight_gradients(dy, x, kept, maps, dw_gate_up, dw_down, accumulate)
    offsets, gather, _, _ = maps
    dh, scaled = kept
    if dw_gate_up is not None:
        gemm.grouped_wgrad(dh, x, offsets, dw_gate_up, accumulate, gather=gather)
    if dw_down is not None:
        gemm.grouped_wgrad(dy, scaled, offsets, dw_down, accumulate, gather=gather, gather_dy=True)


def _sum_over_slots(rows: Tensor, inverse: Tensor, weights: Tensor, weighted: bool) -> Tensor:
    tokens, k = weights.shape
    if k == 0:
        return rows.new_zeros(tokens, rows.shape[1])
    return unpermute_forward(rows, inverse, weights if weighted else None, k)
