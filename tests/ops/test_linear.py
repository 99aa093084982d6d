"""ops.linear against torch.nn.functional.linear in float64, on the packed route and on torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pyfast import ops
from pyfast.kernels import cpu, matmul_choice

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 4e-3, torch.float16: 5e-4}


@pytest.fixture(params=[True, False], ids=["packed", "torch"])
def route(request, monkeypatch):
    """Force one of the two ways a product can be computed."""
    monkeypatch.setattr(matmul_choice, "packed_gemm_is_faster", lambda *_: request.param)


@pytest.fixture
def packed(monkeypatch):
    monkeypatch.setattr(matmul_choice, "packed_gemm_is_faster", lambda *_: True)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape, out", [((1,), 1), ((2, 3, 5), 7), ((70, 33), 129)], ids=str)
def test_equals_torch_in_float64(shape, out, with_bias, dtype, route):
    torch.manual_seed(0)
    leaves = [torch.randn(size, dtype=dtype, requires_grad=True) for size in (shape, (out, shape[-1]), (out,))]
    leaves = leaves if with_bias else leaves[:2]
    y = ops.linear(*leaves)
    dy = torch.randn(y.shape, dtype=dtype)
    y.backward(dy)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    expected = F.linear(*wide)
    expected.backward(dy.double())
    assert y.dtype == dtype and relative_error(y, expected) < TOLERANCE[dtype]
    for leaf, reference in zip(leaves, wide, strict=True):
        assert leaf.grad.dtype == dtype and relative_error(leaf.grad, reference.grad) < TOLERANCE[dtype]


def test_gradcheck_runs_the_real_kernel(packed):
    arguments = [torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((3, 5), (4, 5), (4,))]
    torch.autograd.gradcheck(ops.linear, arguments)


def test_strided_input_and_expanded_gradient(packed):
    x = torch.randn(6, 4, 48)[:, 1:3, 8:40].requires_grad_()
    w = torch.randn(32, 10).t().requires_grad_()
    ops.linear(x, w).sum().backward()
    copy, weight = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    F.linear(copy, weight).sum().backward()
    assert relative_error(x.grad, copy.grad) < 2e-6 and relative_error(w.grad, weight.grad) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_number_of_threads(dtype, packed):
    x, w, bias = (torch.randn(size, dtype=dtype) for size in ((999, 160), (200, 160), (200,)))
    dy = torch.randn(999, 200, dtype=dtype)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        leaves = [t.clone().requires_grad_() for t in (x, w, bias)]
        y = ops.linear(*leaves)
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("later", [False, True], ids=["now", "deferred"])
def test_main_grad_is_added_to(later, dtype, route):
    torch.manual_seed(0)
    x, w, bias = (torch.randn(size, dtype=dtype, requires_grad=True) for size in ((2, 35, 33), (70, 33), (70,)))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    main_grad, closures = torch.full(w.shape, 7.0, dtype=wide), []
    version = main_grad._version
    y = ops.linear(x, w, bias, main_grad=main_grad, defer=closures.append if later else None)
    dy = torch.randn(y.shape, dtype=dtype)
    y.backward(dy)
    if later:
        assert torch.equal(main_grad, torch.full_like(main_grad, 7.0)) and len(closures) == 1
        closures[0]()
    leaves = [leaf.detach().double().requires_grad_() for leaf in (x, w, bias)]
    F.linear(*leaves).backward(dy.double())
    assert w.grad is None and main_grad._version > version and not main_grad.requires_grad
    assert relative_error(y, F.linear(*leaves)) < TOLERANCE[dtype]
    assert relative_error(x.grad, leaves[0].grad) < TOLERANCE[dtype]
    assert relative_error(bias.grad, leaves[2].grad) < TOLERANCE[dtype]
    # Never rounded to the inputs' dtype on the way.
    assert relative_error(main_grad.double() - 7, leaves[1].grad) < (1e-13 if dtype == torch.float64 else 2e-6)


def test_a_frozen_weight_leaves_main_grad_alone():
    x, w, main_grad, closures = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8), torch.full((9, 8), 7.0), []
    ops.linear(x, w, main_grad=main_grad, defer=closures.append).sum().backward()
    assert not closures and torch.equal(main_grad, torch.full((9, 8), 7.0))
    torch.testing.assert_close(x.grad, w.sum(0).expand(5, 8))


def test_main_grad_may_be_a_strided_view(route):
    x, w = torch.randn(70, 33), torch.randn(20, 33, requires_grad=True)
    buffers = torch.ones(33, 20), torch.ones(20, 99)
    for main_grad in (buffers[0].t(), buffers[1][:, ::3]):
        ops.linear(x, w, main_grad=main_grad).sum().backward()
        assert relative_error(main_grad - 1, x.double().sum(0).expand(20, 33)) < 2e-6
    assert torch.equal(buffers[1][:, 1::3], torch.ones(20, 33))


def test_second_derivatives_with_main_grad_are_refused():
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    y = ops.linear(x, w, main_grad=torch.zeros(9, 8))
    with pytest.raises(NotImplementedError, match="second derivatives of linear"):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"main_grad": torch.zeros(8, 9)}, ValueError, "main_grad has shape"),
        ({"main_grad": torch.zeros(9, 8).double()}, TypeError, "main_grad is torch.float64"),
        ({"defer": print}, ValueError, "defer is given without main_grad"),
    ],
)
def test_bad_buffers_are_named(options, error, words):
    with pytest.raises(error, match=words):
        ops.linear(torch.randn(5, 8), torch.randn(9, 8, requires_grad=True), **options)


@pytest.mark.parametrize("wanted", [(True, False), (False, True)], ids=["x", "w"])
def test_a_gradient_nobody_wants_costs_no_gemm(wanted, packed, monkeypatch):
    x, w = torch.randn(20, 8).requires_grad_(wanted[0]), torch.randn(9, 8).requires_grad_(wanted[1])
    calls, gemm = [], cpu.gemm
    monkeypatch.setattr(cpu, "gemm", lambda *args, **kwargs: calls.append(args) or gemm(*args, **kwargs))
    ops.linear(x, w).sum().backward()
    assert len(calls) == 2 and (x.grad is not None, w.grad is not None) == wanted


def test_no_rows(packed):
    x, w, bias = torch.randn(0, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True), torch.randn(9)
    y = ops.linear(x, w, bias.requires_grad_())
    y.sum().backward()
    assert y.shape == (0, 9) and torch.equal(w.grad, torch.zeros(9, 8)) and torch.equal(bias.grad, torch.zeros(9))


def test_opcheck_and_fullgraph_compile(packed):
    leaves = [torch.randn(size, requires_grad=True) for size in ((2, 3, 16), (5, 16), (5,))]
    torch.library.opcheck(torch.ops.pyfast.linear.default, tuple(leaves))
    compiled = torch.compile(lambda *args: ops.linear(*args).square().sum(), fullgraph=True, backend="aot_eager")
    compiled(*leaves).backward()
    grads = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    ops.linear(*leaves).square().sum().backward()
    torch.testing.assert_close(grads, [leaf.grad for leaf in leaves])


@pytest.mark.parametrize(
    "rows, dtype, packed_calls",
    [(256, torch.float32, 3), (4, torch.float32, 0), (256, torch.float64, 0)],
)
def test_the_route_follows_the_measurements(rows, dtype, packed_calls, monkeypatch):
    calls, gemm = [], cpu.gemm
    monkeypatch.setattr(cpu, "gemm", lambda *args, **kwargs: calls.append(args) or gemm(*args, **kwargs))
    x, w = torch.randn(rows, 128, dtype=dtype), torch.randn(300, 128, dtype=dtype)
    ops.linear(x.requires_grad_(), w.requires_grad_()).sum().backward()
    assert len(calls) == packed_calls


@pytest.mark.parametrize("rows", [4, 256], ids=["torch", "packed"])
def test_autocast_casts_as_torch_does(rows):
    leaves = [torch.randn(size, requires_grad=True) for size in ((rows, 128), (64, 128), (64,))]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = ops.linear(*leaves), F.linear(*leaves)
    assert y.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=1e-2, atol=1e-1)
    grads = torch.autograd.grad(y.float().sum(), leaves)
    assert {grad.dtype for grad in grads} == {torch.float32}


@pytest.mark.parametrize(
    ("x", "w", "bias", "error", "words"),
    [
        (torch.ones(3, 4, dtype=torch.int32), torch.ones(5, 4), None, TypeError, "x has dtype"),
        (torch.ones(3, 4), torch.ones(5, 4).double(), None, TypeError, "w has dtype"),
        (torch.ones(3, 4), torch.ones(4, 5), None, ValueError, "w has shape"),
        (torch.ones(3, 4), torch.ones(5, 4), torch.ones(4), ValueError, "bias has shape"),
    ],
)
def test_bad_arguments_are_named(x, w, bias, error, words):
    with pytest.raises(error, match=words):
        ops.linear(x, w, bias)
