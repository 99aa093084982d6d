"""Grouped GEMM and the fused expert MLP in plain torch, for devices without a kernel of their own.

T tokens, R sorted rows, K top-k, E experts, H model width, F expert width. Same functions, arguments and results as
`cpu_moe`; products are one `matmul` an expert, whose row counts are read on the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.dtypes import sum_dtype
from pyfast.kernels.full_precision import full_precision

Maps = tuple[Tensor, Tensor, Tensor, Tensor]  # a RowMap: offsets [E+1], gather [R], slot [R], inverse [T*K]


@full_precision
def grouped_gemm_forward(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    """See `cpu_moe.grouped_gemm_forward`."""
    y = _grouped(x, w if transpose else w.transpose(1, 2), offsets)
    if bias is not None:
        for e, rows in _expert_rows(offsets):
            y[rows] += bias[e].to(y.dtype)
    return y.to(x.dtype)


@full_precision
def grouped_gemm_weight_gradient(left: Tensor, right: Tensor, offsets: Tensor, dw: Tensor, accumulate: bool) -> None:
    """See `cpu_moe.grouped_gemm_weight_gradient`."""
    wide = sum_dtype(dw.dtype)
    if not accumulate:
        dw.zero_()
    for e, rows in _expert_rows(offsets):
        dw[e] += (left[rows].to(wide).t() @ right[rows].to(wide)).to(dw.dtype)


@full_precision
def grouped_bias_gradient(dy: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """See `cpu_moe.grouped_bias_gradient`."""
    dbias = dy.new_zeros((experts, dy.shape[1]), dtype=sum_dtype(dy.dtype))
    for e, rows in _expert_rows(offsets):
        dbias[e] = dy[rows].sum(0, dtype=dbias.dtype)
    return dbias


@full_precision
def moe_mlp_forward(
    x: Tensor, maps: Maps, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """See `cpu_moe.moe_mlp_forward`; the pre-activation is row-major here."""
    offsets, gather, _, inverse = maps
    pre = _pre_activation(x, offsets, gather, w_gate_up)
    rows = _grouped(_activation(pre)[0], w_down.transpose(1, 2), offsets)
    y = _sum_over_slots(rows, inverse, weights)
    return y.to(x.dtype), pre if keep else x.new_empty(0)


@full_precision
def moe_mlp_backward(
    dy: Tensor, x: Tensor, pre: Tensor | None, maps: Maps, weights: Tensor, w_gate_up: Tensor, w_down: Tensor,
    dw_gate_up: Tensor | None, dw_down: Tensor | None, accumulate: bool, need_dx: bool, need_dweights: bool,
    keep_rows: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """See `cpu_moe.moe_mlp_backward`."""
    offsets, gather, slot, inverse = maps
    wide = sum_dtype(x.dtype)
    if pre is None:
        pre = _pre_activation(x, offsets, gather, w_gate_up)
    activation, dgate_slope, dup_slope = _activation(pre)
    product = _grouped(_gathered(dy, gather), w_down, offsets)  # D = dO W2, before the router's weight
    weight = torch.where(slot >= 0, weights.to(wide).flatten()[slot.clamp_min(0).long()], 0.0).unsqueeze(1)
    dweights = weights.new_empty(0)
    if need_dweights:
        dot = (product * activation).sum(1)
        dweights = _sum_over_slots(dot.unsqueeze(1), inverse.unsqueeze(1), weights.new_ones((weights.numel(), 1)))
        dweights = dweights.view(weights.shape).to(weights.dtype)
    scaled = product * weight
    dh = torch.cat([scaled * dgate_slope, scaled * dup_slope], dim=1)
    kept = (dh, activation * weight)
    dx = x.new_empty(0)
    if need_dx:
        dx = _sum_over_slots(_grouped(dh, w_gate_up, offsets), inverse, torch.ones_like(weights)).to(x.dtype)
    if not keep_rows:
        moe_mlp_weight_gradients(dy, x, kept, maps, dw_gate_up, dw_down, accumulate)
    return dx, dweights, kept


@full_precision
def moe_mlp_weight_gradients(
    dy: Tensor, x: Tensor, kept: tuple[Tensor, Tensor], maps: Maps, dw_gate_up: Tensor | None, dw_down: Tensor | None,
    accumulate: bool,
) -> None:  # fmt: skip
    """See `cpu_moe.moe_mlp_weight_gradients`."""
    offsets, gather, _, _ = maps
    dh, activation = kept
    if dw_gate_up is not None:
        grouped_gemm_weight_gradient(dh, _gathered(x, gather), offsets, dw_gate_up, accumulate)
    if dw_down is not None:
        grouped_gemm_weight_gradient(_gathered(dy, gather), activation, offsets, dw_down, accumulate)


def _expert_rows(offsets: Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) of the experts that have any."""
    bounds = offsets.tolist()
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(bounds, bounds[1:], strict=False)) if b > a]


def _grouped(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x [R, A] times w [E, A, B] of each row's expert -> [R, B] in the sum dtype; 0 in rows without an expert."""
    wide = sum_dtype(x.dtype)
    y = x.new_zeros((x.shape[0], w.shape[2]), dtype=wide)
    for e, rows in _expert_rows(offsets):
        y[rows] = x[rows].to(wide) @ w[e].to(wide)
    return y


def _gathered(x: Tensor, gather: Tensor) -> Tensor:
    """The rows of x that `gather` names, in the sum dtype; 0 where it is -1."""
    rows = x[gather.clamp_min(0).long()] if x.shape[0] else x.new_zeros((gather.shape[0], x.shape[1]))
    return rows.to(sum_dtype(x.dtype)).masked_fill((gather < 0).unsqueeze(1), 0.0)


def _pre_activation(x: Tensor, offsets: Tensor, gather: Tensor, w_gate_up: Tensor) -> Tensor:
    return _grouped(_gathered(x, gather), w_gate_up.transpose(1, 2), offsets).to(x.dtype)


def _activation(pre: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(silu(gate) up, its slope by the gate, by up) of pre = (gate, up), in the sum dtype."""
    gate, up = pre.to(sum_dtype(pre.dtype)).chunk(2, dim=1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    return silu * up, up * sigmoid * (1 + gate * (1 - sigmoid)), silu


def _sum_over_slots(rows: Tensor, inverse: Tensor, weights: Tensor) -> Tensor:
    """y [T, H] = sum over k, in order, of weights[t, k] * rows[inverse[t * K + k]]; nothing where inverse is -1."""
    tokens, top_k = weights.shape
    y = rows.new_zeros((tokens, rows.shape[1]))
    if rows.shape[0] == 0:
        return y
    source = inverse.view(tokens, top_k).long()
    for k in range(top_k):
        row = rows[source[:, k].clamp_min(0)] * weights[:, k : k + 1].to(rows.dtype)
        y += row.masked_fill((source[:, k] < 0).unsqueeze(1), 0.0)
    return y
