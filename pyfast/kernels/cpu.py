"""The C++ CPU kernels over torch tensors: allocate results, pass addresses and strides.

Functions here trust their arguments: `pyfast.ops` has checked shapes and dtypes. Each takes and returns plain tensors
and knows nothing of autograd. `pyfast.kernels.plain` offers the same functions in plain torch for other devices.
"""

from __future__ import annotations

import importlib.machinery
import os

import torch
from torch import Tensor

from pyfast.kernels import stochastic
from pyfast.kernels.cpu_attention import (  # noqa: F401
    attention_backward,
    attention_delta,
    attention_forward,
    attention_state_backward,
    attention_state_forward,
)
from pyfast.kernels.cpu_moe import (  # noqa: F401
    grouped_bias_gradient,
    grouped_gemm_forward,
    grouped_gemm_weight_gradient,
    moe_mlp_backward,
    moe_mlp_forward,
    moe_mlp_weight_gradients,
)
from pyfast.kernels.cpu_panels import panel_gemm  # noqa: F401
from pyfast.kernels.cpu_route import route_backward, route_forward  # noqa: F401
from pyfast.kernels.cpu_row_map import (  # noqa: F401
    gather_rows,
    row_map,
    tile_list,
    unpermute_backward,
    unpermute_forward,
)
from pyfast.kernels.dtypes import DTYPE_CODES, sum_dtype
from pyfast.kernels.errors import position_error
from pyfast.kernels.extension import _C


def _library(isa: str) -> str | None:
    """Where the kernels of one instruction set lie, or None if they were not built."""
    here = os.path.dirname(_C.__file__)
    isa = "avx512" if isa == "avx512bf16" else isa  # one library, told at load whether it may use AVX512-BF16
    paths = [os.path.join(here, f"_cpu_{isa}{suffix}") for suffix in importlib.machinery.EXTENSION_SUFFIXES]
    return next((path for path in paths if os.path.exists(path)), None)


def available_isas() -> list[str]:
    """The instruction sets that were built and that this processor has, best first."""
    return [isa for isa in _C.supported_isas() if _library(isa)]


def use_isa(isa: str) -> None:
    """Debugging aid: compute with the kernels of another instruction set from now on, in this whole process.

    Args:
        isa: one of `available_isas()`, e.g. "baseline".
    """
    if isa not in available_isas():
        raise ValueError(f"isa is {isa!r}; built and supported by this processor are {', '.join(available_isas())}")
    _C.load(_library(isa), _torch_library(), isa == "avx512bf16")


def _torch_library() -> str:
    """The library of torch whose OpenMP runtime the kernels share."""
    torch_lib = os.path.join(os.path.dirname(torch.__file__), "lib")
    paths = [os.path.join(torch_lib, name) for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")]
    return next((path for path in paths if os.path.exists(path)), "libtorch_cpu.so")


def _load_best() -> None:
    """Load the kernel library for the best instruction set this processor has."""
    isas = available_isas()
    if not isas:
        here = os.path.dirname(_C.__file__)
        raise ImportError(f"no CPU kernel library (_cpu_*) lies in {here}: build pyfast again with `pip install .`")
    use_isa(isas[0])


_load_best()


def empty_like(x: Tensor) -> Tensor:
    """An uninitialised contiguous tensor of x's shape and dtype (three times as fast as torch.empty(x.shape, ...))."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def as_rows(x: Tensor) -> tuple[Tensor, int, int]:
    """View x [..., width] as rows with one stride: (tensor, rows, row stride in elements). Copies only if it must."""
    width = x.shape[-1]
    if x.is_contiguous():
        return x, x.numel() // width if width else 0, width
    if x.stride(-1) == 1 or width == 1:
        if x.dim() == 2:
            return x, x.shape[0], x.stride(0)
        try:
            flat = x.view(-1, width)
            return flat, flat.shape[0], flat.stride(0)
        except RuntimeError:
            pass
    x = x.contiguous()
    return x, x.numel() // width if width else 0, width


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y like x, and 1 / rms of each row [rows] (float32, float64 for float64)."""
    y = empty_like(x)
    rows_tensor, rows, stride = as_rows(x)
    rstd = torch.empty(rows, dtype=sum_dtype(x.dtype))
    weight = weight.contiguous()
    _C.rms_norm_forward(
        DTYPE_CODES[x.dtype], rows_tensor.data_ptr(), weight.data_ptr(), y.data_ptr(), rstd.data_ptr(),
        rows, x.shape[-1], stride, eps, torch.get_num_threads(),
    )  # fmt: skip
    return y, rstd


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, need_dx: bool, need_dweight: bool
) -> tuple[Tensor, Tensor]:
    """dx like x, dweight like weight; what is not needed comes back empty."""
    dy_rows, rows, dy_stride = as_rows(dy)
    x_rows, _, x_stride = as_rows(x)
    weight = weight.contiguous()
    dx = empty_like(x) if need_dx else torch.empty(0, dtype=x.dtype)
    dweight = torch.empty(weight.shape if need_dweight else (0,), dtype=sum_dtype(x.dtype))
    _C.rms_norm_backward(
        DTYPE_CODES[x.dtype], dy_rows.data_ptr(), x_rows.data_ptr(), weight.data_ptr(), rstd.data_ptr(),
        dx.data_ptr() if need_dx else 0, dweight.data_ptr() if need_dweight else 0,
        rows, x.shape[-1], dy_stride, x_stride, torch.get_num_threads(),
    )  # fmt: skip
    return dx, dweight.to(weight.dtype)


def gemm(
    a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False, scale: float = 1.0, round_factors: bool = False
) -> Tensor:
    """out [m, n] = scale * a [m, k] @ b [k, n], added to out when `accumulate`; returns out.

    Any strides (transposes cost nothing); all float64, or any mix of float32, bfloat16 and float16 summed in float32
    and rounded to out's dtype once. The same bits for any number of threads. `round_factors`: a float32 factor of a
    bfloat16 one may be rounded to bfloat16, which doubles the rate on processors with AVX512-BF16.
    """
    if out.stride(1) != 1 and out.shape[1] > 1:
        if out.stride(0) != 1 and out.shape[0] > 1:
            raise ValueError(f"out has strides {out.stride()}; one of its dimensions must be contiguous")
        gemm(b.t(), a.t(), out.t(), accumulate, scale, round_factors)
        return out
    _C.gemm(
        DTYPE_CODES[a.dtype], a.data_ptr(), *a.stride(), DTYPE_CODES[b.dtype], b.data_ptr(), *b.stride(),
        DTYPE_CODES[out.dtype], out.data_ptr(), out.stride(0),
        a.shape[0], b.shape[1], a.shape[1], scale, accumulate, round_factors, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _as_tokens(x: Tensor) -> Tensor:
    """View x [..., S, N, D] as [B, S, N, D] with a contiguous last dimension. Copies only if it must."""
    if x.dim() > 4:
        x = x.flatten(0, -4)
    elif x.dim() == 3:
        x = x.unsqueeze(0)
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, inverse: bool) -> Tensor:
    """x [..., S, N, D] turned by the angles of its positions (backwards if `inverse`), contiguous.

    Raises ValueError, with nothing written, when a position is not a row of the tables.
    """
    y = empty_like(x)
    if y.numel() == 0:
        return y
    table_dtype = sum_dtype(x.dtype)
    cos, sin = cos.to(table_dtype).contiguous(), sin.to(table_dtype).contiguous()
    if positions is not None:
        positions = positions.to(torch.int64).contiguous()
    x_BSND = _as_tokens(x)
    batch, length, heads, width = x_BSND.shape
    batch_stride, token_stride, head_stride, _ = x_BSND.stride()
    bad = _C.rotary(
        DTYPE_CODES[x.dtype], x_BSND.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        0 if positions is None else positions.data_ptr(), y.data_ptr(),
        batch, length, heads, width, cos.shape[1], cos.shape[0], batch_stride, token_stride, head_stride,
        length if positions is not None and positions.dim() == 2 else 0, inverse, torch.get_num_threads(),
    )  # fmt: skip
    if bad >= 0:
        raise ValueError(position_error(positions.flatten()[bad].item(), cos.shape[0]))
    return y


def sum_of_squares(x: Tensor) -> Tensor:
    """Of a contiguous float32 or float64 tensor: float64 []. The same bits for any number of threads."""
    if x.dtype not in (torch.float32, torch.float64) or not x.is_contiguous():
        raise ValueError(f"x is {x.dtype} with strides {x.stride()}; a contiguous float32 or float64 tensor is needed")
    total = _C.sum_of_squares(DTYPE_CODES[x.dtype], x.data_ptr(), x.numel(), torch.get_num_threads())
    return torch.tensor(total, dtype=torch.float64)


def swiglu_forward(x: Tensor, up: Tensor | None) -> Tensor:
    """silu(gate) * up, contiguous: x is the gate, or [..., 2F] with the gate first when `up` is None."""
    x_rows, rows, x_stride = as_rows(x)
    if up is None:
        width = x.shape[-1] // 2
        up_address, up_stride = x_rows.data_ptr() + width * x.element_size(), x_stride
    else:
        width = x.shape[-1]
        up_rows, _, up_stride = as_rows(up)
        up_address = up_rows.data_ptr()
    y = torch.empty((*x.shape[:-1], width), dtype=x.dtype)
    _C.swiglu_forward(
        DTYPE_CODES[x.dtype], x_rows.data_ptr(), up_address, y.data_ptr(), rows, width, x_stride, up_stride,
        torch.get_num_threads(),
    )  # fmt: skip
    return y


def swiglu_backward(dy: Tensor, x: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor]:
    """(dx like x, dup like up); without `up`, dx is [..., 2F] as x and dup is empty."""
    dx = empty_like(x)
    dup = torch.empty(0, dtype=x.dtype) if up is None else empty_like(up)
    dy_rows, rows, dy_stride = as_rows(dy)
    x_rows, _, x_stride = as_rows(x)
    width = dy.shape[-1]
    if up is None:
        half_row = width * x.element_size()
        up_address, up_stride = x_rows.data_ptr() + half_row, x_stride
        dup_address, d_stride = dx.data_ptr() + half_row, 2 * width
    else:
        up_rows, _, up_stride = as_rows(up)
        up_address, dup_address, d_stride = up_rows.data_ptr(), dup.data_ptr(), width
    _C.swiglu_backward(
        DTYPE_CODES[x.dtype], dy_rows.data_ptr(), x_rows.data_ptr(), up_address, dx.data_ptr(), dup_address,
        rows, width, dy_stride, x_stride, up_stride, d_stride, torch.get_num_threads(),
    )  # fmt: skip
    return dx, dup


def adamw_(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, step: int,
    learning_rate: float, beta1: float, beta2: float, eps: float, weight_decay: float, grad_scale: float,
    seed: int = 0, first_index: int = 0, places: Tensor | None = None,
) -> None:  # fmt: skip
    """One AdamW step in place on contiguous tensors of one shape; see `pyfast.ops.adamw_`."""
    if param.dtype == torch.float64:
        grad = grad.double()
    arguments = (
        DTYPE_CODES[param.dtype], grad.dtype == sum_dtype(param.dtype), param.data_ptr(), grad.data_ptr(),
        exp_avg.data_ptr(), exp_avg_sq.data_ptr(), 0 if master is None else master.data_ptr(), param.numel(), beta1,
        beta2, learning_rate * weight_decay, learning_rate / (1.0 - beta1**step), (1.0 - beta2**step) ** -0.5, eps,
        grad_scale,
    )  # fmt: skip
    if exp_avg.dtype == torch.bfloat16:
        runs = (0, 0) if places is None else (places.data_ptr(), len(places))
        _C.adamw_bf16_moments(*arguments, stochastic.key(seed, step), first_index, *runs, torch.get_num_threads())
    else:
        _C.adamw(*arguments, torch.get_num_threads())


def cross_entropy_rows(
    logits: Tensor, target: Tensor, start: int, softcap: float, exponentials: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(lse, x at the target, max x), each [rows], of logits [rows, V_local], columns [start, start + V_local) of V.

    x = softcap * tanh(logits / softcap), or logits if softcap is 0; lse over these columns only; 0 where the target is
    in none of them. Overwrites logits with exp(x - max x) if `exponentials`, else with x.
    """
    lse, picked, largest = (torch.empty(logits.shape[0], dtype=logits.dtype) for _ in range(3))
    _C.cross_entropy_rows(
        DTYPE_CODES[logits.dtype], logits.data_ptr(), target.data_ptr(), lse.data_ptr(), picked.data_ptr(),
        largest.data_ptr(), *logits.shape, logits.stride(0), start, softcap, exponentials, torch.get_num_threads(),
    )  # fmt: skip
    return lse, picked, largest


def cross_entropy_gradient_(
    logits: Tensor, target: Tensor, start: int, lse: Tensor, largest: Tensor | None, grad: Tensor | None,
    softcap: float, z_loss: float,
) -> None:  # fmt: skip
    """Turn what `cross_entropy_rows` left in logits into the gradient by the logits, given the whole vocabulary's lse.

    largest: max x if logits hold exponentials, None if they hold x. grad [rows]: upstream gradients, None: all 1.
    """
    _C.cross_entropy_gradient(
        DTYPE_CODES[logits.dtype], logits.data_ptr(), target.data_ptr(), lse.data_ptr(),
        0 if largest is None else largest.data_ptr(), 0 if grad is None else grad.data_ptr(),
        *logits.shape, logits.stride(0), start, softcap, z_loss, torch.get_num_threads(),
    )  # fmt: skip
