"""ops.grouped_gemm against one dense float64 product an expert."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfast import ops
from pyfast.kernels import for_device, plain, reference_moe

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 4e-3, torch.float16: 5e-4}
OFFSETS = [0, 7, 7, 40, 90, 90, 163]  # two empty experts; expert 4 ends off every tile


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()


def expected(x, w, offsets, bias=None, *, transpose=False, dy=None) -> list[torch.Tensor]:
    """y and, given dy, the gradients of x, w and bias: a loop over experts in float64."""
    leaves = [t.detach().double().requires_grad_() for t in (x, w, *(() if bias is None else (bias,)))]
    bounds = torch.as_tensor(offsets).tolist()
    width = w.shape[2 if transpose else 1]
    parts = [torch.zeros(bounds[0], width).double()]
    for e, (low, high) in enumerate(zip(bounds, bounds[1:], strict=False)):
        part = leaves[0][low:high] @ (leaves[1][e] if transpose else leaves[1][e].t())
        parts.append(part if bias is None else part + leaves[2][e])
    y = torch.cat([*parts, torch.zeros(x.shape[0] - bounds[-1], width).double()])
    return [y.detach(), *([] if dy is None else torch.autograd.grad(y, leaves, dy.double()))]


def random_problem(offsets, rows, out_features, in_features, dtype, transpose=False):
    torch.manual_seed(0)
    experts = len(offsets) - 1
    width, out = (out_features, in_features) if transpose else (in_features, out_features)
    x = torch.randn(rows, width, dtype=dtype, requires_grad=True)
    w = torch.randn(experts, out_features, in_features, dtype=dtype, requires_grad=True)
    bias = torch.randn(experts, out, dtype=dtype, requires_grad=True)
    return x, w, bias, torch.randn(rows, out, dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("transpose", [False, True], ids=["", "transpose"])
@pytest.mark.parametrize("sizes", [(31, 15), (1, 1), (129, 70), (64, 513)], ids=str)
def test_equals_dense_products_in_float64(sizes, transpose, dtype):
    x, w, bias, dy = random_problem(OFFSETS, OFFSETS[-1], *sizes, dtype, transpose)
    offsets = torch.tensor(OFFSETS, dtype=torch.int32)
    y = ops.grouped_gemm(x, w, offsets, transpose=transpose, bias=bias)
    actual = (y, *torch.autograd.grad(y, (x, w, bias), dy))
    for got, want in zip(actual, expected(x, w, OFFSETS, bias, transpose=transpose, dy=dy), strict=True):
        assert got.dtype == dtype and got.shape == want.shape
        assert relative_error(got, want) < TOLERANCE[dtype]


def test_reference_agrees():
    x, w, bias, _ = random_problem([2, 9, 9, 30], 33, 31, 15, torch.float64)
    offsets = torch.tensor([2, 9, 9, 30])
    for transpose, rows, b in ((False, x, bias), (True, torch.randn(33, 31).double(), None)):
        want = expected(rows, w, offsets, b, transpose=transpose)[0]
        torch.testing.assert_close(reference_moe.grouped_gemm(rows, w, offsets, transpose=transpose, bias=b), want)


@settings(max_examples=15, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 5, 13]), min_size=1, max_size=4),
    before=st.integers(0, 2), after=st.integers(0, 3), out_features=st.integers(1, 5), in_features=st.integers(1, 5),
    transpose=st.booleans(), wide_offsets=st.booleans(),
)  # fmt: skip
def test_gradcheck_runs_the_real_kernel(counts, before, after, out_features, in_features, transpose, wide_offsets):
    offsets = [before + sum(counts[:e]) for e in range(len(counts) + 1)]
    x, w, bias, _ = random_problem(offsets, offsets[-1] + after, out_features, in_features, torch.float64, transpose)
    offsets = torch.tensor(offsets, dtype=torch.int64 if wide_offsets else torch.int32)
    if x.numel():
        torch.autograd.gradcheck(
            lambda x, w, bias: ops.grouped_gemm(x, w, offsets, transpose=transpose, bias=bias), (x, w, bias),
            fast_mode=True,
        )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_without_an_expert_are_zero_on_every_backward(dtype):
    """Whatever those rows hold: here NaN, in x and in the upstream gradient."""
    offsets = torch.tensor([3, 20, 20, 50])
    x, w, bias, dy = random_problem(offsets, 61, 31, 15, dtype)
    outside = torch.ones(61, dtype=torch.bool)
    outside[3:50] = False
    with torch.no_grad():
        x[outside] = float("nan")
        dy[outside] = float("nan")
    y = ops.grouped_gemm(x, w, offsets, bias=bias)
    for _ in range(2):
        dx, dw, dbias = torch.autograd.grad(y, (x, w, bias), dy, retain_graph=True)
        for rows in (y, dx):
            assert torch.equal(rows[outside], torch.zeros_like(rows[outside]))
        for got, want in zip((y, dx, dw, dbias), expected(x, w, offsets, bias, dy=dy), strict=True):
            inside = ~outside if got.shape[0] == 61 else slice(None)
            assert relative_error(got[inside], want[inside]) < TOLERANCE[dtype]


def test_an_expert_without_rows_has_a_gradient_of_exactly_zero():
    x, w, bias, dy = random_problem(OFFSETS, OFFSETS[-1], 31, 15, torch.float32)
    y = ops.grouped_gemm(x, w, torch.tensor(OFFSETS), bias=bias)
    _, dw, dbias = torch.autograd.grad(y, (x, w, bias), dy)
    for e in (1, 4):
        assert torch.equal(dw[e], torch.zeros_like(dw[e])) and torch.equal(dbias[e], torch.zeros_like(dbias[e]))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("transpose", [False, True], ids=["", "transpose"])
@pytest.mark.parametrize("later", [False, True], ids=["now", "deferred"])
def test_main_grad_is_added_to(later, transpose, dtype):
    x, w, bias, dy = random_problem(OFFSETS, OFFSETS[-1], 31, 15, dtype, transpose)
    main_grad = torch.full(w.shape, 7.0, dtype=wide_dtype(dtype))
    version, closures = main_grad._version, []
    options = {"main_grad": main_grad, "defer": closures.append if later else None}
    y = ops.grouped_gemm(x, w, torch.tensor(OFFSETS), transpose=transpose, bias=bias, **options)
    y.backward(dy)
    assert w.grad is None and x.grad is not None and bias.grad is not None
    if later:
        assert torch.equal(main_grad, torch.full_like(main_grad, 7.0)) and len(closures) == 1
        closures[0]()
    assert main_grad._version > version and not main_grad.requires_grad
    dw = expected(x, w, OFFSETS, transpose=transpose, dy=dy)[2]
    assert relative_error(main_grad.double() - 7, dw) < (1e-13 if dtype == torch.float64 else 2e-6)
    for e in (1, 4):
        assert torch.equal(main_grad[e], torch.full_like(main_grad[e], 7.0))


def test_main_grad_may_be_a_strided_view():
    x, w, _, dy = random_problem(OFFSETS, OFFSETS[-1], 31, 15, torch.float32)
    buffer = torch.full((6, 15, 31), 1.0)
    ops.grouped_gemm(x, w, torch.tensor(OFFSETS), main_grad=buffer.transpose(1, 2)).backward(dy)
    assert relative_error(buffer.transpose(1, 2) - 1, expected(x, w, OFFSETS, dy=dy)[2]) < 2e-6


def test_a_frozen_weight_leaves_main_grad_alone():
    x, w, _, dy = random_problem(OFFSETS, OFFSETS[-1], 31, 15, torch.float32)
    main_grad, closures = torch.full(w.shape, 7.0), []
    y = ops.grouped_gemm(x, w.detach(), torch.tensor(OFFSETS), main_grad=main_grad, defer=closures.append)
    y.backward(dy)
    assert not closures and torch.equal(main_grad, torch.full_like(main_grad, 7.0))
    assert relative_error(x.grad, expected(x, w, OFFSETS, dy=dy)[1]) < 1e-6


def test_any_strides_and_expanded_or_transposed_gradients():
    offsets = torch.tensor(OFFSETS)
    rows = OFFSETS[-1]
    xs = (torch.randn(15, rows).t(), torch.randn(rows, 40)[:, 3:33:2], torch.randn(1, 15).expand(rows, 15))
    ws = (
        torch.randn(6, 15, 31).transpose(1, 2),
        torch.randn(31, 6, 15).transpose(0, 1),
        torch.randn(6, 31, 45)[..., ::3],
    )
    dys = (torch.ones(()).expand(rows, 31), torch.randn(31, rows).t(), torch.randn(rows, 1).expand(rows, 31))
    for x, w, dy in zip(xs, ws, dys, strict=True):
        for transpose in (False, True):
            a, b = (dy, x) if transpose else (x, dy)
            a, w = a.detach().requires_grad_(), w.detach().requires_grad_()
            y = ops.grouped_gemm(a, w, offsets, transpose=transpose)
            actual = (y, *torch.autograd.grad(y, (a, w), b))
            for got, want in zip(actual, expected(a, w, offsets, transpose=transpose, dy=b), strict=True):
                assert relative_error(got, want) < 1e-6
    x = torch.randn(rows, 15, requires_grad=True)
    ops.grouped_gemm(x, ws[1], offsets).sum().backward()
    assert relative_error(x.grad, expected(x, ws[1], offsets, dy=dys[0])[1]) < 1e-6


def test_offsets_in_a_view_that_pass_two_to_the_31(tmp_path):
    """Rows of x, experts of w and of main_grad lie more than 2^31 elements apart, in sparse files."""
    stride = 2**30 + 7

    def far(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of that shape, its first dimension strided by `stride`, in a file that takes up a few pages."""
        values = torch.randn(shape).to(dtype)
        size = stride * (shape[0] - 1) + values[0].numel()
        memory = torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=dtype)
        view = memory.as_strided(shape, (stride, *values.stride()[1:]))
        return view.copy_(values)

    x, w, dy = (
        far(name, shape, torch.bfloat16) for name, shape in (("x", (4, 40)), ("w", (3, 24, 40)), ("dy", (4, 24)))
    )
    x, w = x.requires_grad_(), w.requires_grad_()
    main_grad = far("main_grad", (3, 24, 40), torch.float32)
    before = main_grad.contiguous()
    offsets = torch.tensor([0, 1, 1, 4])
    y = ops.grouped_gemm(x, w, offsets, main_grad=main_grad)
    (dx,) = torch.autograd.grad(y, x, dy)
    near = x.detach().contiguous().requires_grad_(), w.detach().contiguous().requires_grad_()
    z = ops.grouped_gemm(*near, offsets)
    dx2, dw = torch.autograd.grad(z, near, dy.contiguous())
    assert torch.equal(y, z) and torch.equal(dx, dx2)
    torch.testing.assert_close(main_grad - before, dw.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_number_of_threads_and_run(dtype):
    x, w, bias, dy = random_problem([0, 400, 400, 413, 999], 999, 203, 161, dtype)
    offsets = torch.tensor([0, 400, 400, 413, 999])
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3, 3):
        torch.set_num_threads(count)
        main_grad = torch.ones(w.shape)
        y = ops.grouped_gemm(x, w, offsets, bias=bias)
        z = ops.grouped_gemm(x, w, offsets, main_grad=main_grad)
        torch.autograd.grad(z, (x, w), dy, allow_unused=True)
        results.append((y.detach(), *torch.autograd.grad(y, (x, w, bias), dy), main_grad))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_a_row_does_not_depend_on_the_rows_beside_it():
    x, w, bias, _ = random_problem([0, 100], 100, 70, 90, torch.float32)
    whole = ops.grouped_gemm(x, w, torch.tensor([0, 100]), bias=bias)
    for low, high in ((0, 1), (5, 22), (31, 100)):
        part = ops.grouped_gemm(x[low:high], w, torch.tensor([0, high - low]), bias=bias)
        assert torch.equal(part, whole[low:high])


def test_nothing_to_do():
    for rows, out_features, in_features in ((0, 3, 4), (5, 0, 4), (5, 3, 0)):
        x = torch.randn(rows, in_features, requires_grad=True)
        w = torch.randn(2, out_features, in_features, requires_grad=True)
        bias = torch.randn(2, out_features, requires_grad=True)
        y = ops.grouped_gemm(x, w, torch.tensor([0, rows // 2, rows]), bias=bias)
        y.sum().backward()
        counts = torch.tensor([[rows // 2], [rows - rows // 2]])
        assert torch.equal(y, bias.repeat_interleave(counts.flatten(), 0)) and torch.equal(w.grad, torch.zeros_like(w))
        assert torch.equal(x.grad, torch.zeros_like(x)) or in_features
        assert torch.equal(bias.grad, counts.float().expand(2, out_features))


def test_plain_backend_agrees():
    x, w, bias, dy = (t.detach() for t in random_problem(OFFSETS, OFFSETS[-1], 31, 15, torch.bfloat16))
    offsets, cpu = torch.tensor(OFFSETS), for_device(torch.device("cpu"))
    for backend_result in (
        lambda k: k.grouped_gemm_forward(x, w, offsets, bias, False),
        lambda k: k.grouped_gemm_forward(dy, w, offsets, None, True),
        lambda k: k.grouped_bias_gradient(dy, offsets, 6),
    ):
        torch.testing.assert_close(backend_result(plain), backend_result(cpu), rtol=1e-2, atol=1e-4)
    for accumulate, dtype in ((False, torch.bfloat16), (True, torch.float32)):
        results = [torch.ones(w.shape, dtype=dtype), torch.ones(w.shape, dtype=dtype)]
        for kernel, dw in zip((plain, cpu), results, strict=True):
            kernel.grouped_gemm_weight_gradient(dy, x, offsets, dw, accumulate)
        torch.testing.assert_close(*results, rtol=1e-2, atol=1e-4)


def test_autocast_casts_as_a_linear_layer_does():
    x, w, bias, _ = random_problem(OFFSETS, OFFSETS[-1], 31, 15, torch.float32)
    main_grad = torch.zeros_like(w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = ops.grouped_gemm(x, w, torch.tensor(OFFSETS), bias=bias)
        z = ops.grouped_gemm(x, w, torch.tensor(OFFSETS), main_grad=main_grad)
    assert y.dtype == z.dtype == torch.bfloat16
    assert {grad.dtype for grad in torch.autograd.grad(y.float().sum(), (x, w, bias))} == {torch.float32}
    z.float().sum().backward()
    assert main_grad.norm() > 0 and w.grad is None


def test_opcheck_and_fullgraph_compile():
    x, w, bias, _ = random_problem(OFFSETS, OFFSETS[-1], 31, 15, torch.float32)
    offsets = torch.tensor(OFFSETS)
    torch.library.opcheck(torch.ops.pyfast.grouped_gemm.default, (x, w, offsets, bias, False))
    compiled = torch.compile(
        lambda x, w, b: ops.grouped_gemm(x, w, offsets, bias=b).square().sum(), fullgraph=True, backend="aot_eager"
    )
    grads = torch.autograd.grad(compiled(x, w, bias), (x, w, bias))
    torch.testing.assert_close(
        grads, torch.autograd.grad(ops.grouped_gemm(x, w, offsets, bias=bias).square().sum(), (x, w, bias))
    )


def test_second_derivatives_are_refused():
    x, w, _, _ = random_problem(OFFSETS, OFFSETS[-1], 31, 15, torch.float32)
    for main_grad in (None, torch.zeros_like(w)):
        y = ops.grouped_gemm(x, w, torch.tensor(OFFSETS), main_grad=main_grad)
        with pytest.raises((NotImplementedError, RuntimeError)):
            (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            dx.sum().backward()


X, W = torch.randn(5, 4), torch.randn(2, 3, 4)


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([0, 3, 2], "decreases from 3 to 2 at index 2"),
        ([-1, 2, 5], "runs from -1 to 5"),
        ([0, 2, 6], "runs from 0 to 6"),
        ([0, 5], "offsets has shape"),
    ],
)
def test_bad_offsets_are_refused(offsets, words):
    for dtype in (torch.int32, torch.int64):
        with pytest.raises(ValueError, match=words):
            ops.grouped_gemm(X, W, torch.tensor(offsets, dtype=dtype))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": X.int()}, TypeError, "x has dtype"),
        ({"x": X[0]}, ValueError, "x has shape"),
        ({"w": W.double()}, TypeError, "w has dtype"),
        ({"w": W.transpose(1, 2)}, ValueError, "w has shape"),
        ({"transpose": True}, ValueError, "w has shape"),
        ({"offsets": torch.tensor([0.0, 2.0, 5.0])}, TypeError, "offsets is torch.float32"),
        ({"offsets": [0, 2, 5]}, TypeError, "offsets is list"),
        ({"bias": torch.randn(3)}, ValueError, "bias has shape"),
        ({"bias": torch.randn(2, 3).double()}, TypeError, "bias has dtype"),
        ({"main_grad": torch.zeros(2, 4, 3)}, ValueError, "main_grad has shape"),
        ({"main_grad": torch.zeros(2, 3, 4).bfloat16()}, TypeError, "main_grad is torch.bfloat16"),
        ({"main_grad": torch.zeros(2, 3, 4, requires_grad=True)}, ValueError, "main_grad requires a gradient"),
        ({"defer": print}, ValueError, "defer is given without main_grad"),
        ({"main_grad": torch.zeros(2, 3, 4), "defer": 3}, TypeError, "defer is a int"),
    ],
)
def test_bad_arguments_are_named(change, error, words):
    arguments = {"x": X, "w": W, "offsets": torch.tensor([0, 2, 5])} | change
    with pytest.raises(error, match=words):
        ops.grouped_gemm(**arguments)
