"""Launches the Triton attention kernels; the functions and arguments of `pyfast.kernels.cpu_attention`.

B batch, S sequence, T packed tokens, N heads (Nq, Nk), D head size (Dv of values). A batch is the case of one run a
document, so there is one form of each kernel: packed rows, runs, tiles planned on the host (kernels/runs.py).
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from pyfast.kernels import plain_attention
from pyfast.kernels.runs import TilePlan, batch_runs, cu_seqlens_runs, plan_key_tiles, plan_query_tiles
from pyfast.kernels.triton.attention_backward import (
    attention_backward_keys_kernel,
    attention_backward_queries_kernel,
    attention_delta_kernel,
)
from pyfast.kernels.triton.attention_config import Tiles, choose_tiles
from pyfast.kernels.triton.attention_forward import attention_forward_kernel
from pyfast.kernels.triton.launch import architecture, describable, describe, on_its_device

_FAR = 1 << 29  # positions further apart than this are cut to it: the kernels compare 32-bit distances
_L2_BYTES = 24 << 20  # of keys and values that a wave of programs should share
_DELTA_ROWS = 64
_COLUMNS = 16  # Triton knows an argument (a stride) to be a multiple of 16, or knows nothing of it


class Options(NamedTuple):
    """How scores are made and masked."""

    causal: bool
    scale: float
    window_left: int
    window_right: int
    softcap: float


class Plan(NamedTuple):
    """A TilePlan as the kernels read it, on the device: tiles [tiles, 6], ranges [ranges, 4], int32."""

    tiles: Tensor
    ranges: Tensor


@on_its_device
def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None,
    causal: bool, scale: float, window_left: int, window_right: int, softcap: float, *, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `cpu_attention.attention_forward`."""
    options = Options(causal, scale, window_left, window_right, softcap)
    if q.dtype == torch.float64:
        return plain_attention.attention_forward(q, k, v, sinks, cu_seqlens_q, cu_seqlens_k, *options)
    q_TND, k_TND, v_TND = _packed(q), _packed(k), _packed(v)
    out = q.new_empty((*q.shape[:-1], v_TND.shape[-1]))
    lse_NT = torch.empty(q_TND.shape[1], q_TND.shape[0], dtype=torch.float32, device=q.device)
    launch = _Launch("forward", q_TND, k_TND, v_TND, options, tiles, k_TND, v_TND)
    plan = _plan_of_call("queries", q, k, cu_seqlens_q, cu_seqlens_k, options, launch.tiles)
    _forward(launch, plan, _flat(out), lse_NT, sinks, carry=False)
    return _columns(out, v.shape[-1]), _unpack_lse(lse_NT, q)


@on_its_device
def attention_backward(
    dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None,
    cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, causal: bool, scale: float, window_left: int,
    window_right: int, softcap: float, *, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See `cpu_attention.attention_backward`."""
    options = Options(causal, scale, window_left, window_right, softcap)
    if q.dtype == torch.float64:
        return plain_attention.attention_backward(
            dout, dlse, q, k, v, out, lse, sinks, cu_seqlens_q, cu_seqlens_k, *options
        )  # fmt: skip
    q_TND, k_TND, v_TND, out_TND, dout_TND = (_packed(x) for x in (q, k, v, out, dout))
    lse_NT = _pack_lse(lse)
    delta_NT = attention_delta(out_TND, dout_TND, None if dlse is None else _pack_lse(dlse))
    wide = ((q, q_TND), (k, k_TND), (v, v_TND))
    dq, dk, dv = (x.new_empty((*x.shape[:-1], x_TND.shape[-1])) for x, x_TND in wide)
    parts = (dout_TND, q_TND, k_TND, v_TND, lse_NT, delta_NT)

    def plan(kind: str, tiles: Tiles) -> Plan:
        return _plan_of_call(kind, q, k, cu_seqlens_q, cu_seqlens_k, options, tiles)

    _backward(*parts, plan, options, tiles, _flat(dq), _flat(dk), _flat(dv), add=False)
    dq, dk, dv = (_columns(dx, x.shape[-1]) for dx, x in ((dq, q), (dk, k), (dv, v)))
    return dq, dk, dv, _sink_gradient(sinks, lse_NT, delta_NT) if sinks is not None else q.new_empty(0).float()


@on_its_device
def attention_state_forward(
    q: Tensor, k: Tensor, v: Tensor, runs_q: Tensor, runs_k: Tensor, causal: bool, scale: float, window_left: int,
    window_right: int, softcap: float, sinks: Tensor | None = None, state: tuple[Tensor, Tensor] | None = None,
    *, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See `cpu_attention.attention_state_forward`."""
    options = Options(causal, scale, window_left, window_right, softcap)
    if q.dtype == torch.float64:
        return plain_attention.attention_state_forward(q, k, v, runs_q, runs_k, *options, sinks, state)
    width = v.shape[2]
    q, k, v = _rows(q), _rows(k), _rows(v)
    launch = _Launch("forward", q, k, v, options, tiles, k, v)
    if state is None:
        acc = torch.empty(*q.shape[:2], width, dtype=torch.float32, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    else:
        acc, lse = state
    plan = _plan_of_runs("queries", runs_q, runs_k, q, k, options, launch.tiles)
    with _in_place(acc, v.shape[2]) as wide_acc, _in_place(lse, lse.shape[1]) as rows_lse:
        _forward(launch, plan, wide_acc, rows_lse, sinks, carry=state is not None)
    return acc, lse


@on_its_device
def attention_delta(out: Tensor, dout: Tensor, dlse: Tensor | None = None) -> Tensor:
    """See `cpu_attention.attention_delta`."""
    if out.dtype == torch.float64:
        return plain_attention.attention_delta(out, dout, dlse)
    out, dout, dlse = _rows(out), _rows(dout), None if dlse is None else _last_contiguous(dlse)
    rows, heads, width = out.shape
    delta = torch.empty(heads, rows, dtype=torch.float32, device=out.device)
    if delta.numel():
        grid = (triton.cdiv(rows, _DELTA_ROWS), heads)
        attention_delta_kernel[grid](
            out, dout, dlse if dlse is not None else delta, delta, rows, *out.stride()[:2], *dout.stride()[:2],
            dlse.stride(0) if dlse is not None else 0, delta.stride(0), width, _DELTA_ROWS, _pad(width),
            dlse is not None, num_warps=4, enable_fp_fusion=True,
        )  # fmt: skip
    return delta


@on_its_device
def attention_state_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, runs_q: Tensor, runs_k: Tensor,
    causal: bool, scale: float, window_left: int, window_right: int, softcap: float, dq: Tensor | None,
    dk: Tensor | None, dv: Tensor | None, *, tiles: Tiles | None = None,
) -> None:  # fmt: skip
    """See `cpu_attention.attention_state_backward`."""
    options = Options(causal, scale, window_left, window_right, softcap)
    if q.dtype == torch.float64:
        plain_attention.attention_state_backward(
            dout, q, k, v, lse, delta, runs_q, runs_k, *options, dq, dk, dv
        )  # fmt: skip
        return

    def plan(kind: str, tiles: Tiles) -> Plan:
        return _plan_of_runs(kind, runs_q, runs_k, q, k, options, tiles)

    parts = (_rows(dout), _rows(q), _rows(k), _rows(v), _last_contiguous(lse), _last_contiguous(delta))
    with contextlib.ExitStack() as stack:
        wide = [
            None if dx is None else stack.enter_context(_in_place(dx, x.shape[2]))
            for dx, x in zip((dq, dk, dv), parts[1:4], strict=True)
        ]
        _backward(*parts, plan, options, tiles, *wide, add=True)


# ---------------------------------------------------------------------------------------------------------------------
# Launches
# ---------------------------------------------------------------------------------------------------------------------


class _Launch:
    """What a launch of one kernel has in common with every other: tiles, descriptors or pointers, masks, options."""

    def __init__(
        self, kernel: str, q: Tensor, k: Tensor, v: Tensor, options: Options, tiles: Tiles | None, *walked: Tensor
    ):
        arch, bits = architecture(), 8 * q.element_size()
        self.kernel, self.q, self.k, self.v, self.options = kernel, q, k, v, options
        self.block_d, self.block_dv = _pad(q.shape[2]), _pad(v.shape[2])
        self.descriptors = arch >= 90 and describable(*walked)
        self.tiles = tiles or choose_tiles(arch, kernel, bits, self.descriptors, max(self.block_d, self.block_dv))
        # float32 products on the tensor cores, in three parts: as exact as float32, not tf32's 10 bits
        self.precision = "tf32x3" if bits == 32 else "ieee"

    def walked(self, x: Tensor, width: int):
        """The side that a program walks over, as the kernel takes it."""
        block = self.tiles.block_q if self.kernel == "keys" else self.tiles.block_k
        return describe(x, [block, 1, width]) if self.descriptors else x

    def mask(self) -> tuple[float, float, int, int]:
        """scale, softcap, and how far a query sees to the left and right."""
        left, right = (
            (1 << 31) - 1 if side < 0 or side >= _FAR else side
            for side in (self.options.window_left, self.options.window_right)
        )
        return self.options.scale, self.options.softcap, left, 0 if self.options.causal else right

    def blocks(self) -> dict:
        return {
            "D": self.q.shape[2], "DV": self.v.shape[2], "BLOCK_D": self.block_d, "BLOCK_DV": self.block_dv,
            "BLOCK_Q": self.tiles.block_q, "BLOCK_K": self.tiles.block_k, "BLOCK_MASKED": self.tiles.block_masked,
            "SOFTCAP": self.options.softcap > 0, "PRECISION": self.precision, "DESCRIPTOR": self.descriptors,
            "num_warps": self.tiles.num_warps, "num_stages": self.tiles.num_stages, "enable_fp_fusion": True,
        }  # fmt: skip


def _forward(launch: _Launch, plan: Plan, out: Tensor, lse: Tensor, sinks: Tensor | None, *, carry: bool) -> None:
    q, k, v = launch.q, launch.k, launch.v
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    if (programs := len(plan.tiles) * heads) == 0:
        return
    attention_forward_kernel[(programs,)](
        q, k, v, launch.walked(k, launch.block_d), launch.walked(v, launch.block_dv), out, lse,
        lse if sinks is None else sinks.float().contiguous(), plan.tiles, plan.ranges, len(plan.tiles), heads,
        heads_at_once(q, k, v), group,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2], lse.stride(0), *launch.mask(),
        SINKS=sinks is not None, CARRY=carry, **launch.blocks(),
    )  # fmt: skip


def heads_at_once(q: Tensor, k: Tensor, v: Tensor) -> int:
    """Query heads whose keys and values fit the L2 cache together: whole groups, at least one; [T, N, D] each."""
    key_bytes = k.shape[0] * (k.shape[2] + v.shape[2]) * k.element_size()
    return q.shape[1] // k.shape[1] * max(1, min(k.shape[1], _L2_BYTES // max(key_bytes, 1)))


def _backward(dout, q, k, v, lse, delta, plan, options, tiles, dq, dk, dv, *, add: bool) -> None:
    """Writes (or adds to, if `add`) those of dq, dk and dv that are not None."""
    inputs = (dout, q, k, v, lse, delta)
    if dk is not None or dv is not None:
        launch = _Launch("keys", q, k, v, options, tiles, q, dout)
        key_plan = plan("keys", launch.tiles)
        both = dk is not None and dv is not None
        # Two sums that wide do not fit the registers: then the scores are computed once for each.
        apart = both and max(launch.block_d, launch.block_dv) > 128
        for dk_now, dv_now in ((dk, None), (None, dv)) if apart else ((dk, dv),):
            _backward_keys(launch, key_plan, *inputs, dk_now, dv_now, add=add)
    if dq is not None:
        launch = _Launch("queries", q, k, v, options, tiles, k, v)
        _backward_queries(launch, plan("queries", launch.tiles), *inputs, dq, add=add)


def _backward_keys(launch: _Launch, plan: Plan, dout, q, k, v, lse, delta, dk, dv, *, add: bool) -> None:
    heads_k, group = k.shape[1], q.shape[1] // k.shape[1]
    if (programs := len(plan.tiles) * heads_k) == 0:
        return
    p_dk, p_dv = (lse.unsqueeze(0) if x is None else x for x in (dk, dv))  # something to point at
    attention_backward_keys_kernel[(programs,)](
        q, k, v, dout, launch.walked(q, launch.block_d), launch.walked(dout, launch.block_dv), lse, delta, p_dk, p_dv,
        *plan, heads_k, group, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2], lse.stride(0),
        delta.stride(0), *p_dk.stride()[:2], *p_dv.stride()[:2], *launch.mask(), ADD=add, NEED_DK=dk is not None,
        NEED_DV=dv is not None, **launch.blocks(),
    )  # fmt: skip


def _backward_queries(launch: _Launch, plan: Plan, dout, q, k, v, lse, delta, dq, *, add: bool) -> None:
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    if (programs := len(plan.tiles) * heads) == 0:
        return
    attention_backward_queries_kernel[(programs,)](
        q, k, v, dout, launch.walked(k, launch.block_d), launch.walked(v, launch.block_dv), lse, delta, dq, *plan,
        heads, group, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *dout.stride()[:2], lse.stride(0),
        delta.stride(0), *dq.stride()[:2], *launch.mask(), ADD=add, **launch.blocks(),
    )  # fmt: skip


def _sink_gradient(sinks: Tensor, lse_NT: Tensor, delta_NT: Tensor) -> Tensor:
    """- sum of exp(sink - lse) delta over the queries that saw a key."""
    share_NT = torch.exp(sinks.float().unsqueeze(1) - lse_NT)
    dsinks_N = -torch.where(lse_NT > -math.inf, share_NT * delta_NT, 0.0).sum(1)
    return dsinks_N.to(sinks.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Plans on the device
# ---------------------------------------------------------------------------------------------------------------------


def _plan_of_call(
    kind: str, q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, options: Options,
    tiles: Tiles,
) -> Plan:  # fmt: skip
    if cu_seqlens_q is None:
        window = (options.window_left, options.window_right)
        return _batch_plan(
            kind, q.shape[0], q.shape[1], k.shape[1], options.causal, window, tiles.block_q, tiles.block_k, q.device
        )  # fmt: skip
    runs_q, runs_k = cu_seqlens_runs(cu_seqlens_q, cu_seqlens_k)
    return _plan_of_runs(kind, runs_q, runs_k, q, k, options, tiles)


@functools.lru_cache(maxsize=256)  # a pure function; a training run has a handful of shapes, and CUDA graphs no copies
def _batch_plan(
    kind: str, batch: int, rows_q: int, rows_k: int, causal: bool, window: tuple[int, int], block_q: int, block_k: int,
    device: torch.device,
) -> Plan:  # fmt: skip
    runs = batch_runs(batch, rows_q, rows_k)
    if kind == "queries":
        plan = plan_query_tiles(*runs, batch * rows_q, causal, window, block_q, block_k)
    else:
        plan = plan_key_tiles(*runs, batch * rows_k, causal, window, block_q, block_k)
    return _on_device(plan, device)


def _plan_of_runs(
    kind: str, runs_q: Tensor, runs_k: Tensor, q: Tensor, k: Tensor, options: Options, tiles: Tiles
) -> Plan:
    window, blocks = (options.window_left, options.window_right), (tiles.block_q, tiles.block_k)
    if kind == "queries":
        plan = plan_query_tiles(runs_q, runs_k, q.shape[0], options.causal, window, *blocks)
    else:
        plan = plan_key_tiles(runs_q, runs_k, k.shape[0], options.causal, window, *blocks)
    return _on_device(plan, q.device)


def _on_device(plan: TilePlan, device: torch.device) -> Plan:
    """The plan as the kernels read it: of each tile's ranges the whole ones first, positions relative to the tile's."""
    row, count, position, stride = plan.tiles.unbind(1)
    owner = torch.arange(len(row)).repeat_interleave(plan.starts.diff())
    masked = plan.ranges[:, 4]
    order = torch.argsort(2 * owner + masked, stable=True)
    whole = torch.bincount(owner[masked == 0], minlength=len(row))
    tiles = torch.stack([row, count, stride, plan.starts[:-1], plan.starts[:-1] + whole, plan.starts[1:]], 1)
    k_row, k_count, k_position, k_stride, _ = plan.ranges[order].unbind(1)
    relative = (k_position - position[owner]).clamp(-_FAR, _FAR)
    ranges = torch.stack([k_row, k_count, relative, k_stride], 1)
    return Plan(tiles.int().to(device), ranges.int().to(device))


# ---------------------------------------------------------------------------------------------------------------------
# Shapes
# ---------------------------------------------------------------------------------------------------------------------


def _pad(width: int) -> int:
    """A power of two that tensor cores take."""
    return max(16, triton.next_power_of_2(width))


def _rows(x: Tensor) -> Tensor:
    """x [T, N, D] as TMA can read it, and with rows near enough that a block is addressed with 32 bits; else a copy.

    Rows whose strides or length are no multiples of 16 would be read in single elements, whose addresses fill the
    registers. So a copy has columns of zeros, up to a multiple of 16; what the kernels write is then as wide.
    """
    width = -(-x.shape[2] // _COLUMNS) * _COLUMNS
    near = describable(x) and all(stride < 1 << 22 and stride % _COLUMNS == 0 for stride in x.stride()[:2])
    if width == x.shape[2] and (near or x.numel() == 0):
        return x
    return _with_columns(x, width)


def _with_columns(x: Tensor, width: int) -> Tensor:
    """A contiguous copy of x [..., D] with columns of zeros up to `width`."""
    copy = x.new_empty(*x.shape[:-1], width)
    copy[..., : x.shape[-1]].copy_(x)
    copy[..., x.shape[-1] :].zero_()
    return copy


def _columns(x: Tensor, width: int) -> Tensor:
    """The first `width` columns, contiguous."""
    return x if x.shape[-1] == width else x[..., :width].contiguous()


@contextlib.contextmanager
def _in_place(target: Tensor, width: int) -> Iterator[Tensor]:
    """`target` [..., D] for a kernel that changes `width` contiguous columns: itself, or a copy that is copied back."""
    if target.shape[-1] == width and target.stride(-1) == 1:
        yield target
        return
    wide = _with_columns(target, width)
    yield wide
    target.copy_(wide[..., : target.shape[-1]])


def _packed(x: Tensor) -> Tensor:
    """[B, S, N, D] as [T, N, D] for reading; a view where strides allow."""
    return _rows(_flat(x))


def _flat(x: Tensor) -> Tensor:
    """Contiguous [B, S, N, D] as [T, N, D], to be written."""
    return x.flatten(0, 1) if x.dim() == 4 else x


def _pack_lse(lse: Tensor) -> Tensor:
    """[B, N, S] as [N, T]."""
    return _last_contiguous(lse.transpose(0, 1).flatten(1) if lse.dim() == 3 else lse)


def _last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _unpack_lse(lse_NT: Tensor, q: Tensor) -> Tensor:
    """[N, T] as [B, N, S] for q [B, S, N, D]."""
    return lse_NT if q.dim() == 3 else lse_NT.unflatten(1, q.shape[:2]).transpose(0, 1).contiguous()
