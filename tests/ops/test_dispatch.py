"""The routes of a call (pyfast/ops/dispatch.py): whichever is taken, no gradient is lost and no mode is passed by."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from pyfast import ops


class Names(TorchDispatchMode):
    """Collects the names of the ops it sees."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_op():
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8)
    with Names() as names:
        ops.rms_norm(x, weight).sum().backward()
    assert "pyfast.rms_norm.default" in names.seen and "pyfast.rms_norm_backward.default" in names.seen


@pytest.mark.parametrize("which", [0, 1])
def test_one_argument_that_needs_a_gradient_is_enough(which):
    arguments = [torch.randn(3, 8), torch.randn(8)]
    arguments[which].requires_grad_()
    assert ops.rms_norm(*arguments).requires_grad
    with torch.no_grad():
        assert not ops.rms_norm(*arguments).requires_grad
    with torch.inference_mode():
        ops.rms_norm(*arguments)


def test_functional_gradient_is_refused_not_wrong():
    weight = torch.randn(8)
    with pytest.raises(RuntimeError, match="functorch"):
        torch.func.grad(lambda x: ops.rms_norm(x, weight).sum())(torch.randn(3, 8))


def test_forward_mode_is_refused_not_ignored():
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.randn(3, 8), torch.randn(3, 8))
        with pytest.raises((RuntimeError, NotImplementedError)):
            ops.rms_norm(x, torch.randn(8))


@pytest.mark.filterwarnings("ignore")  # torch warns that it loops over the batch
def test_vmap():
    x, weight = torch.randn(4, 3, 8), torch.randn(8)
    torch.testing.assert_close(torch.func.vmap(lambda x: ops.rms_norm(x, weight))(x), ops.rms_norm(x, weight))


def test_second_derivatives_are_refused_not_lost():
    x = torch.randn(3, 8, requires_grad=True)
    loss = ops.swiglu(x).sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    penalised = loss + gradient.square().sum()
    with pytest.raises(RuntimeError, match="swiglu_backward.*no autograd formula"):
        penalised.backward()


def test_second_derivative_of_a_linear_op():
    """Rotary is its own gradient, so it has all derivatives: d/dy of <dx, u> is the rotation of u."""
    x, y_grad, u = (torch.randn(5, 2, 8, requires_grad=True) for _ in range(3))
    angle = torch.randn(5, 4)
    (gradient,) = torch.autograd.grad(ops.rotary(x, angle.cos(), angle.sin()), x, y_grad, create_graph=True)
    (second,) = torch.autograd.grad(gradient, y_grad, u)
    torch.testing.assert_close(second, ops.rotary(u, angle.cos(), angle.sin()))


def test_a_tensor_subclass_takes_the_dispatcher():
    class Tagged(torch.Tensor):
        pass

    x = torch.randn(3, 8)
    result = ops.rms_norm(x.as_subclass(Tagged), torch.ones(8))
    assert isinstance(result, Tagged)
    assert torch.equal(torch.Tensor(result), ops.rms_norm(x, torch.ones(8)))
