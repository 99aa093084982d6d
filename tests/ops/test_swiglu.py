"""ops.swiglu against F.silu(gate) * up in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pyfast import ops
from pyfast.kernels import plain

TOLERANCE = {torch.float32: 3e-7, torch.float64: 5e-16, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def expected_swiglu(gate: torch.Tensor, up: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """(y, dgate, dup) by torch in float64."""
    gate, up = gate.detach().double().requires_grad_(), up.detach().double().requires_grad_()
    y = F.silu(gate) * up
    y.backward(dy.double())
    return y.detach(), gate.grad, up.grad


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 64), (130, 257)], ids=str)
@pytest.mark.parametrize("fused", [True, False])
def test_equals_torch_in_float64(shape, dtype, fused):
    torch.manual_seed(0)
    gate, up, dy = (torch.randn(shape, dtype=dtype) * scale for scale in (3, 1, 1))
    y64, dgate64, dup64 = expected_swiglu(gate, up, dy)
    if fused:
        x = torch.cat([gate, up], -1).requires_grad_()
        y = ops.swiglu(x)
        y.backward(dy)
        dgate, dup = x.grad.chunk(2, -1)
    else:
        gate.requires_grad_(), up.requires_grad_()
        y = ops.swiglu(gate, up)
        y.backward(dy)
        dgate, dup = gate.grad, up.grad
    assert y.shape == shape and y.dtype == dgate.dtype == dup.dtype == dtype and y.is_contiguous()
    for actual, expected in ((y, y64), (dgate, dgate64), (dup, dup64)):
        assert relative_error(actual, expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_value_is_right_far_from_zero_too(dtype):
    """Element by element, not in the norm: the exponential is as good at -80 as at 0, and never overflows to NaN."""
    bound = 80 if dtype == torch.float32 else 700
    gate = torch.linspace(-bound, bound, 200_003, dtype=dtype)
    one = torch.ones_like(gate)
    y64 = F.silu(gate.double())
    y = ops.swiglu(gate, one).double()
    assert ((y - y64).abs() <= y64.abs() * (4e-7 if dtype == torch.float32 else 1e-15)).all()
    extreme = torch.tensor([-1e4, -200.0, -90.0, 90.0, 200.0, 1e4], dtype=dtype).requires_grad_()
    y = ops.swiglu(extreme, torch.ones_like(extreme))
    y.sum().backward()
    torch.testing.assert_close(y, F.silu(extreme.detach()), rtol=1e-6, atol=1e-36)
    torch.testing.assert_close(extreme.grad, torch.tensor([0, 0, 0, 1, 1, 1], dtype=dtype), rtol=0, atol=1e-35)


def test_special_values():
    gate = torch.tensor([float("inf"), float("nan"), -0.0])
    y = ops.swiglu(gate, torch.ones(3))
    assert y[0] == float("inf") and y[1].isnan() and y[2] == 0


@pytest.mark.parametrize("fused", [True, False])
def test_gradcheck_runs_the_real_kernel(fused):
    x = torch.randn(5, 38, dtype=torch.float64, requires_grad=True)
    up = None if fused else torch.randn(5, 38, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(ops.swiglu, (x, up))


def test_strided_inputs_and_expanded_gradient():
    wide = torch.randn(6, 4, 100)
    for x in (wide[:, 1:3, 8:40], wide[..., :40].transpose(0, 1), wide[..., ::2], wide[:1].expand(3, -1, -1)):
        leaf = x.detach().requires_grad_()
        y = ops.swiglu(leaf)
        y.sum().backward()
        gate, up = x.chunk(2, -1)
        y64, dgate, dup = expected_swiglu(gate, up, torch.ones_like(gate))
        torch.testing.assert_close(y, y64.float())
        torch.testing.assert_close(leaf.grad, torch.cat([dgate, dup], -1).float())
        torch.testing.assert_close(ops.swiglu(gate, up), y64.float())


def test_only_the_input_is_kept_for_backward():
    x = torch.randn(4, 16, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        ops.swiglu(x)
    assert [t.data_ptr() for t in kept] == [x.data_ptr()]


def test_same_bits_for_any_number_of_threads():
    x, dy = torch.randn(999, 158), torch.randn(999, 79)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        leaf = x.clone().requires_grad_()
        y = ops.swiglu(leaf)
        y.backward(dy)
        results.append((y.detach(), leaf.grad))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_empty():
    for shape in ((0, 8), (3, 0)):
        x = torch.randn(shape, requires_grad=True)
        ops.swiglu(x).sum().backward()
        assert x.grad.shape == shape


def test_opcheck_and_fullgraph_compile():
    x, gate, up = (torch.randn(6, width, requires_grad=True) for width in (16, 5, 5))
    torch.library.opcheck(torch.ops.pyfast.swiglu.default, (x, None))
    torch.library.opcheck(torch.ops.pyfast.swiglu.default, (gate, up))
    compiled = torch.compile(lambda x: ops.swiglu(x).square().sum(), fullgraph=True, backend="aot_eager")
    (grad,) = torch.autograd.grad(compiled(x), x)
    (expected,) = torch.autograd.grad(ops.swiglu(x).square().sum(), x)
    torch.testing.assert_close(grad, expected)


def test_plain_backend_agrees():
    x, dy = torch.randn(6, 16), torch.randn(6, 8)
    gate, up = x.chunk(2, -1)
    for arguments in ((x, None), (gate, up)):
        torch.testing.assert_close(plain.swiglu_forward(*arguments), torch.ops.pyfast.swiglu(*arguments))
        torch.testing.assert_close(
            plain.swiglu_backward(dy, *arguments), torch.ops.pyfast.swiglu_backward(dy, *arguments)
        )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.randn(3, 5),), ValueError, "last dimension must be even"),
        ((torch.tensor(1.0),), ValueError, "x has shape"),
        ((torch.tensor(1.0), torch.tensor(1.0)), ValueError, "x has no dimension"),
        ((torch.ones(3, 4, dtype=torch.int32),), TypeError, "x has dtype"),
        ((torch.randn(3, 4), torch.randn(3, 5)), ValueError, "up has shape"),
        ((torch.randn(3, 4), torch.randn(3, 4).double()), TypeError, "up has dtype"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        ops.swiglu(*arguments)
