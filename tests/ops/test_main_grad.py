"""What holds for the deferred weight gradients of every op that takes `defer`."""

from __future__ import annotations

import weakref

import pytest
import torch

from pyfast import ops


def linear(x, main_grads, defer):
    return ops.linear(x, torch.ones(4, 8, requires_grad=True), main_grad=main_grads[0], defer=defer)


def grouped_gemm(x, main_grads, defer):
    w = torch.ones(2, 4, 8, requires_grad=True)
    return ops.grouped_gemm(x, w, torch.tensor([0, 2, 6]), main_grad=main_grads[0], defer=defer)


def moe_mlp(x, main_grads, defer):
    w_gate_up, w_down = torch.ones(2, 8, 8, requires_grad=True), torch.ones(2, 8, 4, requires_grad=True)
    experts, weights = torch.tensor([[0, 1]] * 6), torch.ones(6, 2)
    return ops.moe_mlp(x, experts, weights, w_gate_up, w_down, main_grads=main_grads, defer=defer)


OPS = {
    "linear": (linear, [(4, 8)]),
    "grouped_gemm": (grouped_gemm, [(2, 4, 8)]),
    "moe_mlp": (moe_mlp, [(2, 8, 8), (2, 8, 4)]),
}


@pytest.fixture(params=OPS)
def deferred(request):
    """(x, upstream gradient, main_grads, closure) after a backward that deferred its weight gradient."""
    run, shapes = OPS[request.param]
    x, main_grads, closures = torch.randn(6, 8), tuple(torch.zeros(shape) for shape in shapes), []
    y = run(x, main_grads, closures.append)
    dy = torch.randn(y.shape)
    y.backward(dy)
    (closure,) = closures
    return x, dy, main_grads, closure


def test_a_closure_runs_once(deferred):
    """Twice would count the micro-batch twice."""
    _, _, main_grads, closure = deferred
    closure()
    once = [main_grad.clone() for main_grad in main_grads]
    assert all(main_grad.any() for main_grad in once)
    with pytest.raises(RuntimeError, match="was run twice; each closure is to be called once"):
        closure()
    assert all(torch.equal(a, b) for a, b in zip(main_grads, once, strict=True))


@pytest.mark.parametrize("which", [0, 1], ids=["x", "the upstream gradient"])
def test_inputs_that_were_overwritten_since_backward_are_refused(deferred, which):
    """A buffer received into again, say: the gradient would be that of the next micro-batch, and no one would know."""
    name = ("x", "the upstream gradient")[which]
    deferred[which].zero_()
    with pytest.raises(RuntimeError, match=f"{name} was written in place between backward and .* give the op a copy"):
        deferred[3]()
    assert not any(main_grad.any() for main_grad in deferred[2])


@pytest.mark.parametrize("name", OPS)
def test_a_closure_that_ran_keeps_nothing_alive(name):
    """Closures are often still in their list when the next micro-batch needs the memory."""
    run, shapes = OPS[name]
    x, main_grads, closures = torch.randn(6, 8), tuple(torch.zeros(shape) for shape in shapes), []
    run(x, main_grads, closures.append).sum().backward()
    reference = weakref.ref(x)
    del x
    assert reference() is not None
    closures[0]()
    assert reference() is None and len(closures) == 1
