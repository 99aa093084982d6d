"""How an op is registered and called.

Every op is a `torch.library` custom op with a fake implementation and an autograd formula, so torch.compile,
opcheck, export and dispatch modes (selective checkpointing among them) see it. Those routes cost tens of
microseconds a call; a plain eager call therefore goes straight to the same Python function through a
`torch.autograd.Function` with the same setup_context and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

_SCALARS = frozenset((type(None), bool, int, float, str))
_NO_SECOND_DERIVATIVE = (
    "second derivatives of {} are not supported yet: leave create_graph=False, detach the gradient, or compute this "
    "part with torch's own functions"
)


def eager(arguments: Sequence[Any]) -> bool:
    """Whether a call is plain eager: not traced, no dispatch mode, no torch.func transform, only ordinary tensors.

    Not ordinary are subclasses, meta tensors, lazy negations (`is_neg`) and tensors that outlived their torch.func
    transform: torch's dispatcher resolves those.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    if torch._C._functorch.maybe_current_level() is not None:
        return False
    for a in arguments:
        kind = type(a)
        if kind is Tensor or kind is Parameter:
            if a.is_meta or a.is_neg() or is_functorch_wrapped_tensor(a):
                return False
        elif kind not in _SCALARS and isinstance(a, Tensor):
            return False
    return True


def records(arguments: Sequence[Any]) -> bool:
    """Whether autograd must see a call with these arguments: one needs a gradient, or a forward-mode level is open."""
    if forward_ad._current_level >= 0:  # the Function then says that the op has no forward-mode derivative
        return True
    if not torch.is_grad_enabled():
        return False
    for a in arguments:
        if isinstance(a, Tensor) and a.requires_grad:
            return True
    return False


def refuse_functional_derivatives(name: str, arguments: Sequence[Any]) -> None:
    """Raise for derivatives that the library route loses: torch.func's grad fails deep inside torch, and forward mode
    (jvp, jacfwd, linearize) would take the op for a constant."""
    functional, forward_mode = torch._C._functorch.maybe_current_level() is not None, forward_ad._current_level >= 0
    if not functional and not forward_mode:
        return
    for a in arguments:
        if not isinstance(a, Tensor):
            continue
        while torch._C._functorch.is_functorch_wrapped_tensor(a):
            if torch._C._functorch.is_gradtrackingtensor(a):
                _refuse(f"pyfast.{name} under a derivative of torch.func (grad, jvp, jacrev, ...)")
            a = torch._C._functorch.get_unwrapped(a)
        if forward_mode and forward_ad.unpack_dual(a).tangent is not None:
            _refuse(f"forward-mode differentiation of pyfast.{name}")


def _refuse(what: str) -> None:
    raise NotImplementedError(f"{what} is not supported yet: use torch.autograd.grad or backward()")


def refuse_second_derivative(name: str) -> None:
    """For backward functions that autograd cannot differentiate: under create_graph it would seem constant."""
    if torch.is_grad_enabled():
        raise NotImplementedError(_NO_SECOND_DERIVATIVE.format(name))


def _refusing_backward(name: str) -> Callable:
    """The gradient of an op without one; backward ops are such, and what asks for theirs is a second derivative."""
    forward, is_backward = name.removesuffix("_backward"), name.endswith("_backward")
    message = _NO_SECOND_DERIVATIVE.format(forward) if is_backward else f"pyfast.{name} has no gradient: detach it"

    def backward(ctx, *grads):
        raise NotImplementedError(message)

    return backward


class Op:
    """A function of tensors and its registration as `torch.ops.pyfast.<name>`; calling it chooses the route.

    Args:
        name: the op's name in the `pyfast` namespace.
        schema: its torch.library schema, e.g. "(Tensor x, float eps) -> Tensor". Results never alias arguments.
        function: the implementation, called with positional arguments.
        fake: the same on fake tensors: shapes, dtypes and strides of the results only.
        mutates: names of the arguments written in place.
    """

    def __init__(
        self, name: str, schema: str, function: Callable, fake: Callable, mutates: tuple[str, ...] = ()
    ) -> None:
        self.name, self.function = name, function
        self.library_op = torch.library.custom_op(f"pyfast::{name}", function, mutates_args=mutates, schema=schema)
        self.library_op.register_fake(fake)
        if not mutates:  # torch allows no formula for ops that write in place
            self.library_op.register_autograd(_refusing_backward(name))

    def __call__(self, *args: Any) -> Any:
        # When autograd records (a backward under create_graph), the library op gives its results a gradient, or one
        # that raises (`_refusing_backward`); calling the function would lose it silently.
        if eager(args) and not records(args):
            return self.function(*args)
        return self.through_library(*args)

    def through_library(self, *args: Any) -> Any:
        """Call it through torch's dispatcher."""
        if not torch.compiler.is_compiling():
            refuse_functional_derivatives(self.name, args)
        return self.library_op(*args)


def differentiable(op: Op, setup_context: Callable, backward: Callable) -> Callable:
    """Give `op` a gradient on both routes; returns the function to call (positional arguments).

    Args:
        op: the forward op.
        setup_context: `f(ctx, inputs, output)` as in torch.library.register_autograd: saves for backward.
        backward: `f(ctx, *grads)` returning one gradient (or None) per input; calls another `Op` for its kernel.
    """
    op.library_op.register_autograd(backward, setup_context=setup_context)

    def forward_eager(ctx, *args):
        output = op.function(*args)
        setup_context(ctx, args, output)
        return output

    # The combined form of forward: with a separate setup_context, `apply` inspects the signature on every call.
    methods = {"forward": staticmethod(forward_eager), "backward": staticmethod(backward)}
    function = type(op.function.__name__, (torch.autograd.Function,), methods)
    # What Function.apply calls after it has unwrapped the tensors of ended torch.func transforms: `eager` saw to them.
    apply = super(torch.autograd.Function, function).apply

    def call(*args: Any) -> Any:
        if not eager(args):
            return op.through_library(*args)
        return apply(*args) if records(args) else op.function(*args)

    return call
