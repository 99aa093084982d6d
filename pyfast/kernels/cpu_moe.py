"""Grouped GEMM and the fused expert MLP on the C++ CPU kernels (csrc/cpu/grouped_gemm.cpp, moe_mlp_*.cpp).

T tokens, R sorted rows, K top-k, E experts, H model width, F expert width. Arguments are checked by `pyfast.ops`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pyfast.kernels.dtypes import DTYPE_CODES, sum_dtype
from pyfast.kernels.extension import _C

Maps = tuple[Tensor, Tensor, Tensor, Tensor]  # a RowMap: offsets [E+1], gather [R], slot [R], inverse [T*K]
_NO_MATRICES = (0, 0, 0, 0, 0)


def grouped_gemm_forward(x: Tensor, w: Tensor, offsets: Tensor, bias: Tensor | None, transpose: bool) -> Tensor:
    """y [R, N] = x [R, K] times w[e].T, w [E, N, K], (times w[e] with `transpose`), + bias[e]; 0 without an expert."""
    w = w.transpose(1, 2) if transpose else w
    experts, out, width = w.shape
    y = x.new_empty((x.shape[0], out))
    offsets = _offsets(offsets)
    bias = None if bias is None else bias.contiguous()
    _C.grouped_gemm(
        _rows(x), _matrices(w), (offsets.data_ptr(), experts), 0 if bias is None else bias.data_ptr(), y.data_ptr(),
        x.shape[0], out, width, torch.get_num_threads(),
    )  # fmt: skip
    return y


def grouped_gemm_weight_gradient(left: Tensor, right: Tensor, offsets: Tensor, dw: Tensor, accumulate: bool) -> None:
    """dw[e] = left[rows of e].T @ right[rows of e], added to dw when `accumulate` (dw is then of the sum dtype)."""
    if _has_rows(dw):
        target = dw
    else:
        target = dw.contiguous() if accumulate else torch.empty_like(dw, memory_format=torch.contiguous_format)
    offsets = _offsets(offsets)
    _C.grouped_weight_gradient(
        _rows(left), _rows(right), (offsets.data_ptr(), dw.shape[0]), _matrices(target), left.shape[1], right.shape[1],
        accumulate, torch.get_num_threads(),
    )  # fmt: skip
    if target is not dw:
        dw.copy_(target)


def grouped_bias_gradient(dy: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """[experts, N] sums of dy [R, N] over each expert's rows, in the sum dtype."""
    dbias = dy.new_empty((experts, dy.shape[1]), dtype=sum_dtype(dy.dtype))
    offsets = _offsets(offsets)
    _C.grouped_bias_gradient(
        _rows(dy), (offsets.data_ptr(), experts), dbias.data_ptr(), dy.shape[1], torch.get_num_threads()
    )
    return dbias


def moe_mlp_forward(
    x: Tensor, maps: Maps, weights: Tensor, w_gate_up: Tensor, w_down: Tensor, keep: bool
) -> tuple[Tensor, Tensor]:
    """(y [T, H], the pre-activation of all rows in an order of the kernel's own, [R, 2F], or empty without `keep`)."""
    x, weights, maps = _contiguous_columns(x), weights.contiguous(), _maps(maps)
    rows = maps[1].shape[0]
    y = x.new_empty(x.shape)
    pre = x.new_empty((rows, w_gate_up.shape[1]) if keep else 0)
    workspace = x.new_empty((rows, x.shape[1]), dtype=sum_dtype(x.dtype))
    shape = _shape(x, maps, weights, w_gate_up, w_down)
    _C.moe_mlp_forward(shape, _rows(x), y.data_ptr(), pre.data_ptr() if keep else 0, workspace.data_ptr())
    return y, pre


def moe_mlp_backward(
    dy: Tensor, x: Tensor, pre: Tensor | None, maps: Maps, weights: Tensor, w_gate_up: Tensor, w_down: Tensor,
    dw_gate_up: Tensor | None, dw_down: Tensor | None, accumulate: bool, need_dx: bool, need_dweights: bool,
    keep_rows: bool,
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    """(dx, dweights, kept): gradients by x and by the router's weights; what is not needed comes back empty.

    The gradients of w_gate_up and w_down are written (added, if `accumulate`) to dw_gate_up and dw_down where those are
    not None; with `keep_rows` that is left to `moe_mlp_weight_gradients`, from `kept`. pre None: computed again.
    """
    dy, x, weights, maps = _contiguous_columns(dy), _contiguous_columns(x), weights.contiguous(), _maps(maps)
    wide, ffn = sum_dtype(x.dtype), w_down.shape[2]
    shape = _shape(x, maps, weights, w_gate_up, w_down)
    dx = x.new_empty(x.shape if need_dx else (0,))
    dweights = torch.empty_like(weights) if need_dweights else weights.new_empty(0)
    dx_rows = x.new_empty((maps[1].shape[0] if need_dx else 0, x.shape[1]), dtype=wide)
    rows = maps[1].shape[0] if keep_rows else _C.moe_mlp_backward_rows(shape)
    kept_dtype = torch.bfloat16 if _C.moe_mlp_rows_are_bf16(shape) else wide
    dh = x.new_empty((rows if keep_rows or dw_gate_up is not None else 0, 2 * ffn), dtype=kept_dtype)
    activation = x.new_empty((rows if keep_rows or dw_down is not None else 0, ffn), dtype=kept_dtype)
    targets = [dw if dw is None or _has_rows(dw) else dw.contiguous() for dw in (dw_gate_up, dw_down)]
    _C.moe_mlp_backward(
        shape, _rows(x), _rows(dy), 0 if pre is None else pre.data_ptr(), dx.data_ptr() if need_dx else 0,
        dweights.data_ptr() if need_dweights else 0, dh.data_ptr() if dh.shape[0] else 0,
        activation.data_ptr() if activation.shape[0] else 0, dx_rows.data_ptr(),
        *(_NO_MATRICES if target is None else _matrices(target) for target in targets), accumulate, keep_rows,
    )  # fmt: skip
    for dw, target in zip((dw_gate_up, dw_down), targets, strict=True):
        if target is not dw and not keep_rows:
            dw.copy_(target)
    return dx, dweights, (dh, activation)


def moe_mlp_weight_gradients(
    dy: Tensor, x: Tensor, kept: tuple[Tensor, Tensor], maps: Maps, dw_gate_up: Tensor | None, dw_down: Tensor | None,
    accumulate: bool,
) -> None:  # fmt: skip
    """Write or add the gradients that `moe_mlp_backward` left out with `keep_rows`, from what it returned."""
    dh, activation = kept
    offsets, gather, _, _ = _maps(maps)
    dy, x = _contiguous_columns(dy), _contiguous_columns(x)  # copies live as long as the kernel reads them
    for left, right, dw in (
        (_rows(dh), _rows(x, gather), dw_gate_up),
        (_rows(dy, gather), _rows(activation), dw_down),
    ):
        if dw is None:
            continue
        target = dw if _has_rows(dw) else dw.contiguous()
        _C.grouped_weight_gradient(
            left, right, (offsets.data_ptr(), dw.shape[0]), _matrices(target), *dw.shape[1:], accumulate,
            torch.get_num_threads(),
        )  # fmt: skip
        if target is not dw:
            dw.copy_(target)


def _has_rows(dw: Tensor) -> bool:
    """Whether the last dimension is contiguous, as the kernels write it."""
    return dw.stride(2) == 1 or dw.shape[2] <= 1


def _contiguous_columns(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _offsets(offsets: Tensor) -> Tensor:
    """int64, contiguous. Keep it referenced while the kernel runs."""
    return offsets.to(torch.int64).contiguous()


def _maps(maps: Maps) -> Maps:
    offsets, *others = maps
    return _offsets(offsets), *(t.contiguous() for t in others)


def _rows(x: Tensor, gather: Tensor | None = None) -> tuple[int, int, int, int, int]:
    """struct ExpertRows."""
    return DTYPE_CODES[x.dtype], x.data_ptr(), *x.stride(), 0 if gather is None else gather.data_ptr()


def _matrices(w: Tensor) -> tuple[int, int, int, int, int]:
    """struct ExpertMatrices."""
    return DTYPE_CODES[w.dtype], w.data_ptr(), *w.stride()


def _shape(x: Tensor, maps: Maps, weights: Tensor, w_gate_up: Tensor, w_down: Tensor) -> tuple:
    """struct MoeMlpShape, field by field."""
    offsets, gather, slot, inverse = maps
    return (
        DTYPE_CODES[x.dtype], x.shape[0], weights.shape[1], x.shape[1], w_down.shape[2],
        (offsets.data_ptr(), w_down.shape[0]), gather.data_ptr(), slot.data_ptr(), inverse.data_ptr(),
        weights.data_ptr(), _matrices(w_gate_up), _matrices(w_down), torch.get_num_threads(),
    )  # fmt: skip
