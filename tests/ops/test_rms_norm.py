"""ops.rms_norm against torch.nn.functional.rms_norm in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pyfast import ops

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 5e-3, torch.float16: 7e-4}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 7), (2, 5, 64), (130, 257), (700, 96)], ids=str)
def test_equals_torch_in_float64(shape, dtype):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=dtype, requires_grad=True)
    dy = torch.randn(shape, dtype=dtype)
    y = ops.rms_norm(x, weight, eps=1e-5)
    y.backward(dy)
    x64, weight64 = x.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    y64 = F.rms_norm(x64, (shape[-1],), weight64, eps=1e-5)
    y64.backward(dy.double())
    assert y.dtype == x.grad.dtype == weight.grad.dtype == dtype
    assert relative_error(y, y64) < TOLERANCE[dtype]
    assert relative_error(x.grad, x64.grad) < TOLERANCE[dtype] * 2
    assert relative_error(weight.grad, weight64.grad) < TOLERANCE[dtype] * 2


def test_gradcheck_runs_the_real_kernel():
    x = torch.randn(5, 19, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(19, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x, w: ops.rms_norm(x, w, eps=1e-3), (x, weight))


def test_strided_input_and_expanded_gradient():
    x = torch.randn(6, 4, 48)[:, 1:3, 8:40].requires_grad_()
    weight = torch.randn(32)
    ops.rms_norm(x, weight).sum().backward()
    copy = x.detach().contiguous().requires_grad_()
    F.rms_norm(copy, (32,), weight, eps=1e-6).sum().backward()
    torch.testing.assert_close(x.grad, copy.grad)


def test_same_bits_for_any_number_of_threads():
    x, weight, dy = torch.randn(999, 160), torch.randn(160), torch.randn(999, 160)
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        x_, weight_ = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = ops.rms_norm(x_, weight_)
        y.backward(dy)
        results.append((y.detach(), x_.grad, weight_.grad))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_only_the_gradient_asked_for():
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    ops.rms_norm(x, weight).sum().backward()
    assert weight.grad is not None and x.grad is None


def test_empty():
    x = torch.randn(0, 8, requires_grad=True)
    weight = torch.randn(8, requires_grad=True)
    ops.rms_norm(x, weight).sum().backward()
    assert x.grad.shape == (0, 8) and torch.equal(weight.grad, torch.zeros(8))


def test_no_width_at_all():
    for device in ("cpu", "meta"):
        y = ops.rms_norm(torch.empty(3, 0, device=device), torch.empty(0, device=device))
        assert y.shape == (3, 0)


@pytest.mark.parametrize(("eps", "error"), [(-1e-6, ValueError), (float("nan"), ValueError), ("small", TypeError)])
def test_bad_eps_is_named(eps, error):
    with pytest.raises(error, match="eps is"):
        ops.rms_norm(torch.ones(3, 4), torch.ones(4), eps=eps)


def test_opcheck_and_fullgraph_compile():
    x, weight = torch.randn(6, 16, requires_grad=True), torch.randn(16, requires_grad=True)
    torch.library.opcheck(torch.ops.pyfast.rms_norm.default, (x, weight, 1e-6))
    compiled = torch.compile(lambda x, w: ops.rms_norm(x, w).square().sum(), fullgraph=True, backend="aot_eager")
    compiled(x, weight).backward()
    grads = x.grad.clone(), weight.grad.clone()
    x.grad = weight.grad = None
    ops.rms_norm(x, weight).square().sum().backward()
    torch.testing.assert_close(grads, (x.grad, weight.grad))


@pytest.mark.parametrize(
    ("x", "weight", "error", "words"),
    [
        (torch.randn(3, 4), torch.randn(5), ValueError, "weight has shape"),
        (torch.randn(3, 4), torch.randn(4).double(), TypeError, "weight has dtype"),
        (torch.ones(3, 4, dtype=torch.int32), torch.ones(4), TypeError, "x has dtype"),
    ],
)
def test_bad_arguments_are_named(x, weight, error, words):
    with pytest.raises(error, match=words):
        ops.rms_norm(x, weight)
