"""Weight gradients that are added into a buffer of the caller's, in backward or later.

`main_grad` is Megatron-LM's name for the float32 buffer in which the gradients of all micro-batches are summed. A
deferred weight gradient is work that nothing downstream of backward waits for: pipeline schedules run it where a stage
would idle (zero bubble, Qi et al. 2023).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyfast.kernels.dtypes import sum_dtype

Defer = Callable[[Callable[[], None]], object]


def check_main_grad(name: str, main_grad: Tensor | None, weight_name: str, weight: Tensor, defer: Defer | None) -> None:
    """TypeError / ValueError unless `main_grad` can take the gradient of `weight`, and `defer` has one to add to."""
    if main_grad is None:
        if defer is not None:
            raise ValueError(f"defer is given without {name}; deferred weight gradients need a {name} to be added to")
        return
    if defer is not None and not callable(defer):
        raise TypeError(f"defer is a {type(defer).__name__}; a callable that takes a closure is needed: list.append")
    wide = sum_dtype(weight.dtype)
    if not isinstance(main_grad, Tensor) or main_grad.dtype != wide:
        kind = main_grad.dtype if isinstance(main_grad, Tensor) else type(main_grad).__name__
        raise TypeError(f"{name} is {kind}; gradients of a {weight.dtype} {weight_name} are summed in a {wide} tensor")
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"{name} has shape {tuple(main_grad.shape)} on {main_grad.device}; it must be {tuple(weight.shape)} on "
            f"{weight.device} like {weight_name}"
        )
    if main_grad.requires_grad:
        raise ValueError(f"{name} requires a gradient; it is a buffer: detach it")
    if torch.compiler.is_compiling():
        raise NotImplementedError(f"{name} under torch.compile is not supported yet: call the op outside the graph")


def add_or_defer(
    defer: Defer | None, add: Callable[[], None], main_grads: Sequence[Tensor], reads: dict[str, Tensor]
) -> None:
    """Run `add`, which adds into main_grads what it computes from `reads`, now; or hand a closure to `defer`.

    The closure is good for one call, and lets go of what it keeps then. It raises RuntimeError when called again, which
    would count the gradient twice, and when a tensor of `reads` (by the name the caller knows it by) was written in
    place since backward: autograd, which watches saved tensors until then, looks no longer.
    """
    if defer is None:
        _run(add, main_grads)
        return
    pending = [(add, [(name, tensor, _version(tensor)) for name, tensor in reads.items()])]

    def closure() -> None:
        if not pending:
            raise RuntimeError("a deferred weight gradient was run twice; each closure is to be called once")
        add, versions = pending[0]
        for name, tensor, version in versions:
            if _version(tensor) != version:
                raise RuntimeError(
                    f"{name} was written in place between backward and the deferred weight gradient that reads it: run "
                    "the closure first, or give the op a copy"
                )
        pending.clear()
        _run(add, main_grads)

    defer(closure)


def _version(tensor: Tensor) -> int:
    """How often it was written in place; tensors made in inference mode do not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _run(add: Callable[[], None], main_grads: Sequence[Tensor]) -> None:
    with torch.no_grad():
        add()
    torch.autograd.graph.increment_version(main_grads)
