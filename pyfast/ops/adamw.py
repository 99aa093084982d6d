"""AdamW (Loshchilov and Hutter 2019) in place, in one pass over flat memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.kernels.dtypes import sum_dtype
from pyfast.ops.checks import check_float
from pyfast.ops.dispatch import Op


@torch.no_grad()
def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    step: int,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    master: Tensor | None = None,
    grad_scale: float = 1.0,
    seed: int = 0,
    first_index: int = 0,
    places: Tensor | None = None,
) -> None:
    """One AdamW step in place, weight decay decoupled from the gradient.

    g = grad_scale grad; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2;
    w = (1 - learning_rate weight_decay) w - learning_rate m / (1 - beta1^step) / (sqrt(v / (1 - beta2^step)) + eps).

    Bias corrections are computed in float64, the rest in float32 (float64 for a float64 param). A value's result
    depends on its own inputs only: cutting a flat buffer anywhere, or another number of threads, changes no bit.

    Args:
        param: float32, float64, bfloat16 or float16, contiguous, any shape; updated.
        grad: param's dtype or float32, contiguous, param's shape, as all tensors here.
        exp_avg, exp_avg_sq: the moments m and v, float32 (float64 for a float64 param), or both bfloat16 (not for a
            float64 param), rounded stochastically: up or down with the chances that keep the mean; updated.
        step: number of this step, from 1.
        learning_rate, betas, eps, weight_decay: as in torch.optim.AdamW.
        master: float32 weights of a bfloat16 or float16 param; updated, and param becomes its rounding.
        grad_scale: multiplies the gradient first (a clip coefficient, 1 / loss scale).
        seed, first_index: for bfloat16 moments. The random bits of a value are a function of (seed, step, its index),
            and the first value has index first_index: give a stretch of a buffer its start, each buffer its own seed.
        places: for bfloat16 moments: int64 [n, 2] on CPU, rows (start, index): in the buffer of which this is the
            stretch from first_index on, the values from position start to the next row's have the indices from index
            on. The first start is 0 and they rise.

    Raises:
        TypeError, ValueError: naming the argument that does not fit; nothing has been written then.
    """
    check_float("param", param)
    wide = sum_dtype(param.dtype)
    _check_like_param("grad", grad, param, {param.dtype, torch.float32})
    _check_like_param("exp_avg", exp_avg, param, {wide, torch.bfloat16} if wide == torch.float32 else {wide})
    _check_like_param("exp_avg_sq", exp_avg_sq, param, {exp_avg.dtype})
    updated = () if torch.compiler.is_compiling() else (param, exp_avg, exp_avg_sq, master)
    if any(x is not None and x.is_neg() for x in updated):
        raise ValueError("a tensor to update is a lazy negation, whose memory holds other values; call .resolve_neg()")
    if not param.is_contiguous():
        raise ValueError(f"param has strides {param.stride()}; it must be contiguous, since it is updated in place")
    if master is not None:
        if param.dtype == wide:
            raise ValueError(
                f"master is given, but param is {param.dtype}: only bfloat16 and float16 have one; pass None"
            )
        _check_like_param("master", master, param, {wide})
    _check_numbers(step, learning_rate, betas, eps, weight_decay, grad_scale)
    for name, value in (("seed", seed), ("first_index", first_index)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
            raise ValueError(f"{name} is {value!r}; a whole number from 0 to 2^63 - 1 is needed")
    if places is not None:
        _check_places(places)
    _op(
        param, grad, exp_avg, exp_avg_sq, master, step, float(learning_rate), float(betas[0]), float(betas[1]),
        float(eps), float(weight_decay), float(grad_scale), seed, first_index, places,
    )  # fmt: skip


def _check_like_param(name: str, tensor: Tensor, param: Tensor, dtypes: set[torch.dtype]) -> None:
    check_float(name, tensor)
    if tensor.dtype not in dtypes:
        allowed = " or ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        raise TypeError(f"{name} has dtype {tensor.dtype}; for a param of {param.dtype} it must be {allowed}")
    if tensor.shape != param.shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; it must be {tuple(param.shape)}, param's")
    if tensor.device != param.device:
        raise ValueError(f"{name} is on {tensor.device}, param on {param.device}; move them to one device")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} has strides {tensor.stride()}; it must be contiguous")


def _check_numbers(step, learning_rate, betas, eps, weight_decay, grad_scale) -> None:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step is {step!r}; the number of this step is needed, an int from 1")
    if step < 1:
        raise ValueError(f"step is {step}; steps count from 1")
    for name, value in (("learning_rate", learning_rate), ("eps", eps), ("weight_decay", weight_decay)):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be finite and not negative")
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas is {betas}; two numbers from 0 up to, but not including, 1 are needed")
    if not math.isfinite(grad_scale):
        raise ValueError(f"grad_scale is {grad_scale}; it must be finite: skip the step when the norm is not")


def _check_places(places: Tensor) -> None:
    if places.dtype != torch.int64 or places.device.type != "cpu":
        raise TypeError(f"places is {places.dtype} on {places.device}; it must be int64 on cpu")
    if places.dim() != 2 or places.shape[1] != 2 or not places.is_contiguous():
        raise ValueError(f"places has shape {tuple(places.shape)}; it must be [n, 2] and contiguous")
    if torch.compiler.is_compiling():
        return
    if (
        len(places) == 0
        or places[0, 0] != 0
        or bool((places < 0).any())
        or bool((places[1:, 0] <= places[:-1, 0]).any())
    ):
        raise ValueError("places must start at 0, rise from row to row, and hold no negative index")


def _adamw(param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, master: Tensor | None, *numbers) -> None:
    kernels.for_device(param.device).adamw_(param, grad, exp_avg, exp_avg_sq, master, *numbers)
    # The kernel writes behind autograd's back: a graph that saved one of these must notice in its backward.
    torch.autograd.graph.increment_version([t for t in (param, exp_avg, exp_avg_sq, master) if t is not None])


def _adamw_fake(*args) -> None:
    return None


_op = Op(
    "adamw_",
    "(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, Tensor(d!)? master, int step, "
    "float learning_rate, float beta1, float beta2, float eps, float weight_decay, float grad_scale, int seed=0, "
    "int first_index=0, Tensor? places=None) -> ()",
    _adamw,
    _adamw_fake,
    mutates=("param", "exp_avg", "exp_avg_sq", "master"),
)
