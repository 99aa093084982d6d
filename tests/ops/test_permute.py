"""ops.permute and ops.unpermute against torch's indexing in float64, values and gradients."""

from __future__ import annotations

import pytest
import torch

from pyfast import ops

TOLERANCE = {torch.float32: 3e-7, torch.float64: 1e-15, torch.bfloat16: 2.5e-3, torch.float16: 3e-4}
DROPPED = torch.tensor([[1, 3], [0, -1], [2, 2], [-1, -1], [3, 0]])  # expert 2 twice in one token, one token left out


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def kept_sum(values: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """[T, H]: for each token the weighted sum of values_e = x * (e + 1) over its experts, by loops over tokens."""
    out = []
    for x, ids, w in zip(values, experts.tolist(), weights, strict=True):
        out.append(sum((w[k] * x * (e + 1) for k, e in enumerate(ids) if e >= 0), torch.zeros_like(x)))
    return torch.stack(out)


def through_experts(x, experts, weights, num_experts):
    """permute, multiply each expert's rows by (e + 1), unpermute."""
    rows, mapped = ops.permute(x, experts, num_experts)
    factor = torch.zeros(len(rows), dtype=rows.dtype)
    for e in range(num_experts):
        factor[mapped.offsets[e] : mapped.offsets[e + 1]] = e + 1
    return ops.unpermute(rows * factor[:, None], mapped, weights)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("width", [1, 15, 31, 64, 257])
def test_a_layer_of_experts_equals_a_loop_over_tokens(width, dtype):
    torch.manual_seed(0)
    x, dy = torch.randn(5, width, dtype=dtype, requires_grad=True), torch.randn(5, width, dtype=dtype)
    weights = torch.rand(5, 2, dtype=torch.float64 if dtype == torch.float64 else torch.float32, requires_grad=True)
    y = through_experts(x, DROPPED, weights, 4)
    dx, dweights = torch.autograd.grad(y, (x, weights), dy)
    x64, weights64 = x.detach().double().requires_grad_(), weights.detach().double().requires_grad_()
    y64 = kept_sum(x64, DROPPED, weights64, 4)
    dx64, dweights64 = torch.autograd.grad(y64, (x64, weights64), dy.double())
    assert y.dtype == dx.dtype == dtype and dweights.dtype == weights.dtype
    bound = TOLERANCE[dtype] * 2  # two ops, two roundings (rows * factor and dx have one each)
    assert relative_error(y, y64) < bound and relative_error(dx, dx64) < bound
    assert relative_error(dweights, dweights64) < max(bound, 1e-6 if dtype != torch.float64 else 0)
    assert not y[3].any() and not dx[3].any() and not dweights[DROPPED < 0].any()


def test_rows_are_sorted_and_zero_behind_the_last():
    x = torch.arange(1.0, 6)[:, None].expand(5, 3)
    rows, mapped = ops.permute(x, DROPPED, 4)
    assert rows[:, 0].tolist() == [2, 5, 1, 3, 3, 1, 5, 0, 0, 0]
    assert mapped.offsets.tolist() == [0, 2, 3, 5, 7]


def test_gradient_of_weights_is_float32_and_exact_for_half_inputs():
    """bf16 rows, F = 4096: the dot product is summed in float32."""
    torch.manual_seed(0)
    rows, mapped = ops.permute(torch.randn(64, 4096).bfloat16(), torch.randint(0, 8, (64, 2)), 8)
    weights = torch.rand(64, 2, requires_grad=True)
    dy = torch.randn(64, 4096).bfloat16()
    (dweights,) = torch.autograd.grad(ops.unpermute(rows, mapped, weights), weights, dy)
    expected = (rows.double()[mapped.inverse.long()].view(64, 2, 4096) * dy.double()[:, None]).sum(-1)
    assert dweights.dtype == torch.float32
    assert relative_error(dweights, expected) < 1e-6


def test_a_weight_of_zero_has_its_gradient():
    rows, mapped = ops.permute(torch.tensor([[2.0, 3.0]]), torch.tensor([[1, 0]]), 2)
    weights = torch.tensor([[0.0, 1.0]], requires_grad=True)
    ops.unpermute(rows, mapped, weights).sum().backward()
    assert weights.grad.tolist() == [[5.0, 5.0]]


def test_unweighted_sums_and_half_weights():
    x, experts = torch.randn(5, 8), DROPPED
    rows, mapped = ops.permute(x, experts, 4)
    kept = (experts >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(ops.unpermute(rows, mapped), kept * x)
    weights = torch.rand(5, 2).bfloat16().requires_grad_()
    y = ops.unpermute(rows, mapped, weights)
    torch.testing.assert_close(y, (weights.detach().float() * (experts >= 0)).sum(1, keepdim=True) * x)
    y.sum().backward()
    assert weights.grad.dtype == torch.bfloat16
    by_hand = ops.RowMap(*mapped[:4])
    torch.testing.assert_close(ops.unpermute(rows, by_hand, k=2), kept * x)


def test_gradcheck_runs_the_real_kernels():
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 2, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: ops.permute(x, DROPPED, 4)[0], (x,))
    torch.autograd.gradcheck(lambda x, w: through_experts(x, DROPPED, w, 4), (x, weights))
    torch.autograd.gradcheck(lambda x: through_experts(x, DROPPED, None, 4), (x,))


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:, 1:9],
        lambda x: x[:, ::2],
        lambda x: x.t().contiguous().t(),
        lambda x: x[::1, :1].expand(-1, 8),
        lambda x: x[:1].expand(5, -1),
    ],
)
def test_strides(make):
    x = make(torch.randn(5, 17))
    leaf, copy = x.detach().requires_grad_(), x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
    weights = torch.rand(2, 5).t()
    for source in (leaf, copy):
        rows, mapped = ops.permute(source, DROPPED, 4)
        y = ops.unpermute(make_rows_strided(rows), mapped, weights)
        (y * y.detach()).sum().backward()
    assert torch.equal(leaf.grad, copy.grad)


def make_rows_strided(rows: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows, rows], 1)[:, : rows.shape[1]]


def test_expanded_and_transposed_gradients():
    x, weights = torch.randn(5, 5, requires_grad=True), torch.rand(5, 2, requires_grad=True)

    def gradients(upstream):
        rows, mapped = ops.permute(x, DROPPED, 4)
        y = ops.unpermute(rows, mapped, weights)
        return torch.autograd.grad(y, (x, weights), upstream)

    dy = torch.randn(5, 5)
    for upstream in (torch.ones(()).expand(5, 5), dy.t(), dy[:1].expand(5, 5)):
        for strided, plain in zip(gradients(upstream), gradients(upstream.contiguous()), strict=True):
            assert torch.equal(strided, plain)


def test_rows_of_nobody_are_never_read():
    rows, mapped = ops.permute(torch.randn(5, 8), DROPPED, 4)
    weights = torch.rand(5, 2, requires_grad=True)
    spoilt = rows.clone()
    spoilt[7:] = float("nan")
    spoilt.requires_grad_()
    expected = ops.unpermute(rows, mapped, weights)
    for _ in range(2):  # the second backward too
        y = ops.unpermute(spoilt, mapped, weights)
        assert torch.equal(y, expected)
        drows, dweights = torch.autograd.grad(y, (spoilt, weights), torch.randn(5, 8))
        assert not drows[7:].any() and dweights.isfinite().all()


def test_same_bits_for_any_number_of_threads():
    torch.manual_seed(0)
    experts = torch.randint(-1, 9, (3000, 3))
    x, w, dy = torch.randn(3000, 75), torch.rand(3000, 3), torch.randn(3000, 75)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        leaf, weights = x.clone().requires_grad_(), w.clone().requires_grad_()
        rows, mapped = ops.permute(leaf, experts, 9)
        y = ops.unpermute(rows.sin(), mapped, weights)
        results.append((rows.detach(), y.detach(), *torch.autograd.grad(y, (leaf, weights), dy)))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_empty():
    for tokens, width in ((0, 8), (3, 0)):
        x, experts = torch.randn(tokens, width, requires_grad=True), torch.zeros(tokens, 2, dtype=torch.int32)
        weights = torch.rand(tokens, 2, requires_grad=True)
        rows, mapped = ops.permute(x, experts, 2)
        y = ops.unpermute(rows, mapped, weights)
        y.sum().backward()
        assert rows.shape == (2 * tokens, width) and y.shape == x.grad.shape == (tokens, width)
        assert not weights.grad.any()


def test_only_the_maps_are_kept_without_weights():
    kept = []
    x = torch.randn(5, 64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        rows, mapped = ops.permute(x, DROPPED, 4)
        ops.unpermute(rows, mapped)
        ops.unpermute(rows, mapped, torch.rand(5, 2))
    assert kept and all(t.numel() <= 10 for t in kept)


def test_second_derivatives_are_right_or_refused():
    """Moving rows is linear; with weights the second derivative is refused instead of lost."""
    x = torch.randn(5, 8, requires_grad=True)
    rows, mapped = ops.permute(x, DROPPED, 4)
    y = ops.unpermute(rows, mapped)
    (dx,) = torch.autograd.grad(y, x, y, create_graph=True)
    (second,) = torch.autograd.grad(dx.sum(), x)
    kept = (DROPPED >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(second, (kept * kept).expand(5, 8).float())
    weights = torch.rand(5, 2, requires_grad=True)
    y = ops.unpermute(ops.permute(x, DROPPED, 4)[0], mapped, weights)
    (dx,) = torch.autograd.grad(y, x, y, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivatives of unpermute_rows"):
        torch.autograd.grad(dx.sum(), x)


def test_views_that_pass_two_billion_elements(tmp_path):
    """Rows 1.1e9 elements apart in a sparse file: equal to the contiguous call, in forward and backward."""
    path = tmp_path / "rows"
    path.touch()
    stride = 2**30 + 3
    far = torch.from_file(str(path), shared=True, size=2 * stride + 8, dtype=torch.bfloat16).as_strided(
        (3, 8), (stride, 1)
    )
    near = torch.randn(3, 8).bfloat16()
    far.copy_(near)
    experts = torch.tensor([[1, 0], [1, 1], [0, -1]])
    rows, mapped = ops.permute(near, experts, 2)
    assert torch.equal(ops.permute(far, experts, 2)[0], rows)
    one_slot = ops.row_map(torch.tensor([[1], [0], [1]]), 2)
    weights = torch.rand(3, 1, requires_grad=True)
    results = [
        (y := ops.unpermute(source, one_slot, weights), *torch.autograd.grad(y, weights, upstream))
        for source, upstream in ((near, near), (far, far))
    ]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_opcheck_and_fullgraph_compile():
    x, weights = torch.randn(5, 12, requires_grad=True), torch.rand(5, 2, requires_grad=True)
    _, (_, gather, slot, inverse, k) = ops.permute(x, DROPPED, 4)
    rows = torch.randn(10, 12, requires_grad=True)
    torch.library.opcheck(torch.ops.pyfast.permute_rows.default, (x, gather, inverse, k))
    for w in (None, weights):
        torch.library.opcheck(torch.ops.pyfast.unpermute_rows.default, (rows, gather, slot, inverse, w, k))
    torch.library.opcheck(
        torch.ops.pyfast.unpermute_rows_backward.default,
        (x.detach(), rows.detach(), gather, slot, weights.detach(), True, True),
    )

    def layer(x, weights):
        rows, mapped = ops.permute(x, DROPPED, 4)
        return ops.unpermute(rows.sin(), mapped, weights).square().sum()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ours = torch.autograd.grad(compiled(x, weights), (x, weights))
    for a, b in zip(ours, torch.autograd.grad(layer(x, weights), (x, weights)), strict=True):
        torch.testing.assert_close(a, b)


def test_no_recompilation_when_the_number_of_tokens_changes():
    compiled = torch.compile(
        lambda x, e, w: ops.unpermute(ops.permute(x, e, 4)[0], ops.row_map(e, 4), w),
        fullgraph=True, backend="aot_eager", dynamic=True,
    )  # fmt: skip
    for tokens in (5, 9, 14):
        x, e, w = torch.randn(tokens, 6), torch.randint(-1, 4, (tokens, 2)), torch.rand(tokens, 2)
        expected = (w * (e >= 0)).sum(1, keepdim=True) * x
        torch.testing.assert_close(compiled(x, e, w), expected)


MAPPED = ops.row_map(DROPPED, 4)
ROWS = torch.randn(10, 8)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: ops.permute(torch.randn(4, 8), DROPPED, 4), ValueError, r"x has shape \(4, 8\); it must be \(5, H\)"),
        (lambda: ops.permute(torch.randn(5), DROPPED, 4), ValueError, "x has shape"),
        (lambda: ops.permute(torch.ones(5, 8).long(), DROPPED, 4), TypeError, "x has dtype"),
        (lambda: ops.permute(torch.randn(5, 8), DROPPED, 3), ValueError, "experts holds 3 for token 0, slot 1"),
        (lambda: ops.unpermute(ROWS[:9], MAPPED), ValueError, r"rows has shape \(9, 8\); it must be \(10, H\)"),
        (lambda: ops.unpermute(ROWS, tuple(MAPPED)), TypeError, "row_map is a tuple"),
        (lambda: ops.unpermute(ROWS, MAPPED, torch.rand(5, 3)), ValueError, r"weights has shape \(5, 3\)"),
        (lambda: ops.unpermute(ROWS, MAPPED, torch.rand(10)), ValueError, r"weights has shape \(10,\)"),
        (lambda: ops.unpermute(ROWS, MAPPED, DROPPED), TypeError, "weights has dtype"),
        (lambda: ops.unpermute(ROWS, ops.RowMap(*MAPPED[:4])), ValueError, "k is None"),
        (lambda: ops.unpermute(ROWS, ops.RowMap(*MAPPED[:4]), k=3), ValueError, "k is 3; it must divide the 10"),
        (lambda: ops.unpermute(ROWS, ops.RowMap(*MAPPED[:4]), k=2.0), TypeError, "k is 2.0; an integer"),
        (lambda: ops.unpermute(ROWS, ops.RowMap(*MAPPED[:4]), k=True), TypeError, "k is True"),
        (lambda: ops.unpermute(ROWS, MAPPED._replace(inverse=None)), TypeError, "row_map.inverse is a NoneType"),
        (lambda: ops.unpermute(ROWS, MAPPED._replace(slot=MAPPED.slot[0])), TypeError, r"row_map.slot is \(\)"),
        (lambda: ops.unpermute(ROWS, MAPPED, k=5), ValueError, "k is 5; row_map was made with 2"),
        (
            lambda: ops.unpermute(ROWS, MAPPED._replace(slot=MAPPED.slot.long())),
            ValueError,
            "row_map.slot is torch.int64",
        ),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(call, error, words):
    with pytest.raises(error, match=words):
        call()
