"""ops.attention against dense float64 maths (written here) and torch's scaled_dot_product_attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfast import ops
from pyfast.kernels import cpu, plain, reference

# Relative error (in norm) of out and gradients: rounding the result once, and a few float32 roundings before.
TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def dense(q, k, v, *, causal=False, scale=None, window=(-1, -1), softcap=0.0, sinks=None):
    """(out, lse) of [B, S, N, D] by the textbook: every score stored, softmax over the visible ones."""
    group, offset = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, keys = torch.arange(q.shape[1])[:, None] + offset, torch.arange(k.shape[1])[None]
    hidden = (keys > rows) if causal else torch.zeros(len(rows), k.shape[1], dtype=torch.bool)
    if window[0] >= 0:
        hidden = hidden | (keys < rows - window[0])
    if window[1] >= 0:
        hidden = hidden | (keys > rows + window[1])
    blind = hidden.all(1)
    # A row that sees nothing: give it a harmless row of scores, then take its results away.
    scores = scores.masked_fill(hidden & ~blind[:, None], -math.inf)
    if sinks is not None:
        sink = sinks.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[1], 1)
        scores = torch.cat([scores, sink], -1)
    lse = torch.logsumexp(scores, -1) if scores.shape[-1] else scores.sum(-1)
    p = torch.exp(scores - lse[..., None])[..., : k.shape[1]].masked_fill(blind[:, None], 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse.masked_fill(blind, -math.inf)


def inputs(B, Sq, Sk, Nq, Nk, D, Dv, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((B, Sq, Nq, D), (B, Sk, Nk, D), (B, Sk, Nk, Dv))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def relative_error(actual, expected) -> float:
    assert actual.isfinite().all()
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def run(function, tensors, gradient_dtype=None, **options):
    """[out, lse, *gradients] with random upstream gradients for out (rounded to a dtype) and for every finite lse."""
    tensors = [x.detach().requires_grad_() for x in tensors]
    out, lse = function(*tensors, **options)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(gradient_dtype or out.dtype)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64)
    dlse = dlse.masked_fill(lse.detach() == -math.inf, 0.0)
    grads = torch.autograd.grad([out, lse], tensors, [dout.to(out.dtype), dlse.to(lse.dtype)])
    return [out.detach(), lse.detach(), *grads]


def ours(q, k, v, sinks=None, **options):
    return ops.attention(q, k, v, sinks=sinks, return_lse=True, **options)


def dense_with_sinks(q, k, v, sinks=None, **options):
    return dense(q, k, v, sinks=sinks, **options)


def check_equal_to_dense(tensors, **options):
    dtype = tensors[0].dtype
    actual = run(ours, tensors, **options)
    expected = run(dense_with_sinks, [x.detach().double() for x in tensors], dtype, **options)
    seen = expected[1] > -math.inf
    assert torch.equal(actual[1] > -math.inf, seen)
    assert relative_error(actual[1][seen], expected[1][seen]) < (1e-14 if dtype == torch.float64 else 1e-6)
    for a, b in zip(actual[:1] + actual[2:], expected[:1] + expected[2:], strict=True):
        assert a.dtype == dtype or a.dim() == 1
        assert relative_error(a, b) < TOLERANCE[dtype]


# ---- equal to dense maths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "shape",
    [(2, 150, 300, 4, 2, 64, 64), (1, 257, 257, 3, 1, 40, 24), (1, 49, 131, 6, 2, 192, 128)],
    ids=["gqa", "mqa", "value size"],
)
def test_equals_dense_float64(shape, dtype, causal):
    check_equal_to_dense(inputs(*shape, dtype=dtype), causal=causal)


@pytest.mark.parametrize("head", [1, 8, 33, 40, 64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("value", [None, 128, 256])
def test_head_sizes(head, value):
    check_equal_to_dense(inputs(1, 19, 37, 2, 1, head, value or head), causal=True)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 150), st.integers(0, 300), st.sampled_from([(1, 1), (4, 2), (5, 1)]), st.integers(1, 40),
    st.integers(1, 40), st.booleans(), st.tuples(st.integers(-1, 140), st.integers(-1, 140)),
    st.sampled_from([0.0, 3.0]), st.booleans(),
)  # fmt: skip
def test_any_shape_and_features(Sq, Sk, heads, D, Dv, causal, window, softcap, sink):
    tensors = inputs(1, Sq, Sk, *heads, D, Dv, dtype=torch.float64)
    if sink:
        tensors.append(torch.randn(heads[0], dtype=torch.float64, generator=torch.Generator().manual_seed(5)))
    options = dict(causal=causal, window=window, softcap=softcap)
    actual, expected = run(ours, tensors, **options), run(dense_with_sinks, tensors, **options)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_equals_torch_sdpa(dtype, causal):
    q, k, v = inputs(2, 200, 200, 4, 4, 64, 64, dtype=dtype)
    out = ops.attention(q, k, v, causal=causal)
    theirs = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal).transpose(1, 2)
    assert relative_error(out, theirs) < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("length", [2048])
def test_bfloat16_gradients_are_rounded_once(length):
    """Sums in float32: error at the rounding floor (1.65e-3), where torch's own kernel has 4.6e-3 in dk and dv."""
    tensors = inputs(1, length, length, 2, 2, 64, 64, dtype=torch.bfloat16)
    actual = run(ours, tensors, causal=True)
    expected = run(dense, [x.double() for x in tensors], torch.bfloat16, causal=True)
    assert relative_error(actual[0], expected[0]) <= 2.2e-3
    assert all(relative_error(a, b) <= 2.4e-3 for a, b in zip(actual[2:], expected[2:], strict=True))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 6), st.integers(1, 6), st.sampled_from([(1, 1), (4, 2), (3, 1)]), st.integers(1, 3),
    st.integers(1, 3), st.booleans(), st.tuples(st.integers(-1, 4), st.integers(-1, 4)), st.sampled_from([0.0, 2.0]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_gradcheck_runs_the_real_kernel(Sq, Sk, heads, D, Dv, causal, window, softcap, sink, packed):
    tensors = inputs(1, Sq, Sk, *heads, D, Dv, dtype=torch.float64)
    options = dict(causal=causal, window=window, softcap=softcap, scale=0.7)
    if packed:
        tensors = [x.detach()[0].requires_grad_() for x in tensors]
        options["cu_seqlens_q"] = torch.tensor([0, Sq // 3, Sq // 2, Sq], dtype=torch.int32)
        options["cu_seqlens_k"] = torch.tensor([0, 0, Sk // 2, Sk], dtype=torch.int32)
    if sink:
        tensors.append(torch.randn(heads[0], dtype=torch.float64, requires_grad=True))

    def function(q, k, v, sinks=None):
        out, lse = ops.attention(q, k, v, sinks=sinks, return_lse=True, **options)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(function, tensors)


@pytest.mark.parametrize("isa", ["avx512bf16", "avx512", "avx2", "baseline"])
def test_every_instruction_set(isa):
    """Panels, blocks and tails have other sizes on each; all features at once."""
    if isa not in cpu.available_isas():
        pytest.skip(f"{isa} was not built or this processor lacks it")
    try:
        cpu.use_isa(isa)
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            tensors = inputs(2, 140, 270, 4, 2, 36, 20, dtype=dtype)
            check_equal_to_dense(tensors, causal=True)
            sinks = torch.randn(4, dtype=dtype, generator=torch.Generator().manual_seed(3))
            check_equal_to_dense([*tensors, sinks], window=(50, 3), softcap=4.0)
    finally:
        cpu.use_isa(cpu.available_isas()[0])


# ---- masks ----------------------------------------------------------------------------------------------------------


def test_causal_is_bottom_right_aligned():
    q, k, v = inputs(1, 3, 5, 1, 1, 4, 5, dtype=torch.float64)
    v = torch.eye(5, dtype=torch.float64).view(1, 5, 1, 5)  # out row i is its weights
    weights = ops.attention(q, k, v, causal=True)[0, :, 0]
    assert torch.equal(weights > 0, torch.arange(5)[None] <= torch.arange(3)[:, None] + 2)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_rows_without_keys(dtype, sink):
    tensors = inputs(1, 5, 3, 2, 1, 8, 8, dtype=dtype)
    sinks = torch.zeros(2, dtype=dtype) if sink else None
    q, k, v = tensors
    out, lse = ops.attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    dout = torch.randn_like(out)
    dout[:, :2], dlse = math.nan, torch.full_like(lse, 0.5)  # whatever comes upstream of such a row leads nowhere
    torch.autograd.backward([out, lse], [dout, dlse])
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2])) and (lse[..., :2] == -math.inf).all()
    assert torch.equal(q.grad[:, :2], torch.zeros_like(q.grad[:, :2])) and (q.grad[:, 2:] != 0).any()
    assert all(x.isfinite().all() for x in (out, lse[..., 2:], q.grad, k.grad, v.grad))


@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_rows_without_keys_are_zero_whatever_the_values_hold(garbage):
    """Beside rows that do see keys, whose values are not finite: 0 times such a value would be NaN."""
    q, k, v = (x.detach() for x in inputs(1, 5, 3, 2, 1, 8, 8))
    v[:, 0] = garbage
    q.requires_grad_()
    out = ops.attention(q, k, v, causal=True)
    out.sum().backward()
    assert torch.equal(out[:, :2], torch.zeros_like(out[:, :2])) and not out[:, 2:].isfinite().any()
    assert torch.equal(q.grad[:, :2], torch.zeros_like(q.grad[:, :2]))


def test_no_keys_and_no_queries_at_all():
    q, k, v = inputs(2, 3, 0, 2, 1, 8, 6)
    out, lse = ops.attention(q, k, v, return_lse=True)
    out.sum().backward()
    assert torch.equal(out, torch.zeros(2, 3, 2, 6)) and (lse == -math.inf).all()
    assert torch.equal(q.grad, torch.zeros_like(q)) and k.grad.shape == k.shape
    q, k, v = inputs(2, 0, 3, 2, 1, 8, 6)
    ops.attention(q, k, v).sum().backward()
    assert torch.equal(k.grad, torch.zeros_like(k)) and torch.equal(v.grad, torch.zeros_like(v))


def test_window_counts_both_ends():
    q, k = (torch.zeros(1, 6, 1, 8) for _ in range(2))
    v = torch.eye(6).view(1, 6, 1, 6)
    weights = ops.attention(q, k, v, causal=True, window=(2, 0))[0, :, 0]
    assert (weights > 0).sum(1).tolist() == [1, 2, 3, 3, 3, 3]
    assert (ops.attention(q, k, v, window=(1, 1))[0, :, 0] > 0).sum(1).tolist() == [2, 3, 3, 3, 3, 2]


def test_a_window_wider_than_the_sequence_is_plain_causal_bit_for_bit():
    tensors = inputs(1, 300, 300, 2, 1, 32, 32)
    plain_causal, windowed = run(ours, tensors, causal=True), run(ours, tensors, causal=True, window=(300, 0))
    assert all(torch.equal(a, b) for a, b in zip(plain_causal, windowed, strict=True))


def test_a_window_of_any_integer_is_unbounded_not_overflown():
    tensors = inputs(1, 30, 30, 2, 1, 8, 8)
    for size in (2**62, 2**63 - 1, 2**63, 2**80):
        windowed = run(ours, tensors, window=(size, size))
        assert all(torch.equal(a, b) for a, b in zip(run(ours, tensors), windowed, strict=True))


def test_softcap_of_huge_scores_is_finite():
    q, k, v = inputs(1, 70, 70, 2, 2, 32, 32)
    out = ops.attention(q * 1000, k, v, softcap=20.0, causal=True)
    out.sum().backward()
    assert all(x.isfinite().all() for x in (out, q.grad, k.grad, v.grad))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks_join_the_maximum(dtype):
    q, k, v = inputs(1, 9, 9, 2, 1, 16, 16, dtype=dtype)
    sinks = torch.tensor([100.0, -100.0], dtype=dtype, requires_grad=True)
    out, lse = ops.attention(q, k, v, sinks=sinks, return_lse=True)
    out.float().square().sum().backward()
    assert torch.allclose(lse[0, 0], torch.full((9,), 100.0)) and out.isfinite().all()
    assert (out[:, :, 0].abs() < 1e-30).all()  # the sink takes all the weight
    torch.testing.assert_close(out[:, :, 1], ops.attention(q, k, v)[:, :, 1])
    assert sinks.grad.dtype == dtype and sinks.grad.isfinite().all()


# ---- packed documents -----------------------------------------------------------------------------------------------


def packed_inputs(cu_q, cu_k, Nq=4, Nk=2, D=16, Dv=24, dtype=torch.float64):
    q, k, v = (x.detach()[0] for x in inputs(1, cu_q[-1], cu_k[-1], Nq, Nk, D, Dv, dtype=dtype))
    return [q, k, v], {
        "cu_seqlens_q": torch.tensor(cu_q, dtype=torch.int32), "cu_seqlens_k": torch.tensor(cu_k, dtype=torch.int32)
    }  # fmt: skip


def dense_documents(q, k, v, *, cu_seqlens_q, cu_seqlens_k, **options):
    pieces = []
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for a, b, c, d in zip(starts_q, starts_q[1:], starts_k, starts_k[1:], strict=False):
        pieces.append(dense(q[None, a:b], k[None, c:d], v[None, c:d], **options))
    return torch.cat([out[0] for out, _ in pieces]), torch.cat([lse[0] for _, lse in pieces], 1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("cu_q", "cu_k"),
    [
        ([0, 0, 5, 5, 9], [0, 4, 9, 12, 12]),
        ([0, 76, 110, 256], [0, 1, 2, 3]),
        ([0, 1, 2, 300, 301], [0, 1, 130, 131, 500]),
        ([0, 7, 7, 200], [0, 7, 7, 200]),
    ],
    ids=str,
)
def test_packed_equals_each_document_alone(cu_q, cu_k, causal):
    tensors, cu = packed_inputs(cu_q, cu_k)
    actual, expected = run(ours, tensors, causal=causal, **cu), run(dense_documents, tensors, causal=causal, **cu)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_documents_no_query_looks_at_have_zero_gradients():
    tensors, cu = packed_inputs([0, 0, 5, 5, 9], [0, 4, 9, 12, 12], dtype=torch.float32)
    _, _, _, dk, dv = run(ours, tensors, **cu)
    for gradient in (dk, dv):
        for unseen in (gradient[0:4], gradient[9:12]):
            assert torch.equal(unseen, torch.zeros_like(unseen))
        assert (gradient[4:9] != 0).all()


def test_many_queries_on_single_keys():
    tensors, cu = packed_inputs([0, 76, 110, 256], [0, 1, 2, 3], dtype=torch.float32)
    for result in run(ours, [3 * x for x in tensors], causal=True, **cu):
        assert not result.isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("garbage", [math.nan, math.inf])
def test_rows_of_no_document_change_nothing(dtype, garbage):
    tensors, _ = packed_inputs([0, 60], [0, 200], dtype=dtype)
    cu = {
        "cu_seqlens_q": torch.tensor([5, 20, 50], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([9, 140, 190], dtype=torch.int32),
    }
    clean = run(ours, tensors, causal=True, **cu)
    for x, (first, last) in zip(tensors, [(5, 50), (9, 190), (9, 190)], strict=True):
        x[:first], x[last:] = garbage, garbage
    dirty = run(ours, tensors, causal=True, **cu)
    assert all(torch.equal(a, b) for a, b in zip(clean, dirty, strict=True))
    out, lse, dq, dk, dv = dirty
    for x, (first, last) in ((out, (5, 50)), (dq, (5, 50)), (dk, (9, 190)), (dv, (9, 190))):
        assert not x[:first].any() and not x[last:].any()
    assert (lse[:, :5] == -math.inf).all() and (lse[:, 50:] == -math.inf).all()


def test_memory_kept_from_an_earlier_call_reaches_no_result():
    """The kernels keep scratch memory from call to call; fill it with NaN by attending over NaN."""
    tensors = inputs(1, 100, 135, 2, 1, 20, 12)
    before = run(ours, tensors, causal=True)
    poison = [torch.full_like(x, math.nan) for x in inputs(1, 400, 400, 2, 1, 256, 256)]
    ours(*(x.requires_grad_() for x in poison))[0].sum().backward()
    after = run(ours, tensors, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


# ---- exact and extreme values ---------------------------------------------------------------------------------------


def test_one_token_returns_its_value():
    q, k, v = ((3 * x.detach()).requires_grad_() for x in inputs(1, 1, 1, 2, 2, 8, 8, dtype=torch.float64))
    out = ops.attention(q, k, v, causal=True)
    out.square().sum().backward()
    assert torch.equal(out, v) and q.grad.abs().max() < 1e-12 and k.grad.abs().max() < 1e-12


def test_large_scores_in_float32():
    q, k, v = inputs(1, 130, 130, 2, 2, 64, 64)
    q, k = q.detach() * 30, k.detach() * 30
    actual, expected = run(ours, [q, k, v], causal=True), run(dense, [x.double() for x in (q, k, v)], causal=True)
    assert all(relative_error(a, b) < 3e-3 for a, b in zip(actual, expected, strict=True))


def test_query_heads_share_kv_heads_in_order():
    q = torch.randn(1, 40, 6, 8)
    k = torch.randn(1, 40, 2, 8)
    v = torch.arange(2.0).view(1, 1, 2, 1).expand(1, 40, 2, 8)
    out = ops.attention(q, k, v, causal=True)
    for head in range(6):
        torch.testing.assert_close(out[:, :, head], torch.full((1, 40, 8), float(head // 3)), rtol=1e-6, atol=0)


def test_nan_in_a_query_stays_visible():
    q, k, v = (x.detach() for x in inputs(1, 20, 20, 1, 1, 8, 8))
    q[0, 3] = math.nan
    out = ops.attention(q, k, v)
    assert out[0, 3].isnan().all() and out[0, :3].isfinite().all() and out[0, 4:].isfinite().all()


# ---- memory layouts -------------------------------------------------------------------------------------------------


def test_any_strides():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, 70, 24, generator=generator).transpose(1, 2)
    kv = torch.randn(2, 70, 2, 3, 24, generator=generator)
    k, v = kv[:, :, :, 0], kv[:, :, :, 2]
    strided = [q, k, v, torch.randn(24, 70, 2, 2, generator=generator).permute(2, 1, 3, 0)]
    for tensors in (strided[:3], [q, strided[3], v]):
        actual, expected = run(ours, tensors), run(ours, [x.contiguous() for x in tensors])
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_any_strides_of_the_small_arrays():
    tensors, cu = packed_inputs([0, 30, 31, 70], [0, 9, 40, 70])
    sinks = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    expected = run(ours, [*tensors, sinks[::2].contiguous()], causal=True, **cu)
    strided = {name: torch.stack([starts, starts * 0 + 1], 1)[:, 0] for name, starts in cu.items()}

    def with_strided_sinks(q, k, v, both, **options):
        return ours(q, k, v, both[::2], **options)

    actual = run(with_strided_sinks, [*tensors, sinks], causal=True, **strided)
    assert all(torch.equal(a, b) for a, b in zip(actual[:5], expected[:5], strict=True))
    assert torch.equal(actual[5][::2], expected[5])


@pytest.mark.parametrize(("rows", "stride"), [(4, 1 << 30), (190, 1 << 24)], ids=["rows far apart", "many rows"])
def test_strides_whose_offsets_pass_2_31_elements(tmp_path, rows, stride):
    """In a sparse file of which few pages exist: within the first block of rows, and where later blocks begin."""
    memory = torch.from_file(str(tmp_path / "sparse"), shared=True, size=(3 << 30) + 64, dtype=torch.bfloat16)
    far = memory.as_strided((1, rows, 1, 8), (0, stride, 8, 1))
    far.copy_(torch.randn(far.shape))
    actual, expected = run(ours, [far] * 3, causal=True), run(ours, [far.contiguous()] * 3, causal=True)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_expanded_and_transposed_gradients():
    q, k, v = inputs(1, 60, 60, 2, 2, 16, 16)
    for make in (lambda out: torch.ones(()).expand_as(out), lambda out: torch.ones(1, 2, 60, 16).transpose(1, 2)):
        out = ops.attention(q, k, v, causal=True)
        strided = torch.autograd.grad(out, (q, k, v), make(out))
        out = ops.attention(q, k, v, causal=True)
        contiguous = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        assert all(torch.equal(a, b) for a, b in zip(strided, contiguous, strict=True))


# ---- autograd, determinism ------------------------------------------------------------------------------------------


def test_gradient_of_lse_alone_and_of_one_input_alone():
    q, k, v = inputs(1, 30, 30, 2, 1, 8, 8, dtype=torch.float64)
    _, lse = ops.attention(q, k, v, return_lse=True)
    lse.sum().backward()
    expected = torch.autograd.grad(dense(q, k, v)[1].sum(), (q, k))
    torch.testing.assert_close([q.grad, k.grad], list(expected), rtol=1e-11, atol=1e-12)
    assert torch.equal(v.grad, torch.zeros_like(v))
    q, k, v = q.detach(), k.detach(), v.detach().requires_grad_()
    ops.attention(q, k, v).sum().backward()
    assert v.grad is not None and q.grad is None


def test_twenty_backward_runs_and_any_number_of_threads_give_the_same_bits():
    tensors, cu = packed_inputs([0, 300, 301, 700], [0, 300, 420, 700], dtype=torch.float32)
    sinks = torch.randn(4)
    threads, results = torch.get_num_threads(), []
    for count in [1] * 2 + [2] * 14 + [3] * 4:
        torch.set_num_threads(count)
        results.append(run(ours, [*tensors, sinks], causal=True, **cu))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_one_head_on_several_threads_gives_the_same_bits():
    tensors = inputs(1, 900, 900, 1, 1, 32, 32)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results.append(run(ours, tensors, causal=True))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


def test_saved_for_backward_is_inputs_out_and_lse():
    q, k, v = inputs(1, 64, 64, 2, 2, 16, 16)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(tuple(x.shape)) or x, lambda x: x):
        out = ops.attention(q, k, v, causal=True)
    assert sorted(saved) == sorted([(1, 64, 2, 16)] * 4 + [(1, 2, 64)])
    assert not any(isinstance(x, torch.Tensor) for x in vars(out.grad_fn).values())


def test_selective_checkpointing_runs_the_forward_once():
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    calls = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            calls.append(str(function))
            return function(*args, **(kwargs or {}))

    def policy(ctx, op, *args, **kwargs):
        ours = op == torch.ops.pyfast.attention.default
        return CheckpointPolicy.MUST_SAVE if ours else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = inputs(1, 40, 40, 2, 2, 8, 8)

    def block(q, k, v):
        return ops.attention(q * 2, k, v, causal=True).sin()

    with Count():
        out = checkpoint(
            block, q, k, v, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
        )
        out.sum().backward()
    assert calls.count("pyfast.attention.default") == 1 and calls.count("pyfast.attention_backward.default") == 1
    expected = torch.autograd.grad(block(q, k, v).sum(), (q, k, v))
    torch.testing.assert_close([q.grad, k.grad, v.grad], list(expected))


@pytest.mark.parametrize("packed", [False, True])
def test_opcheck(packed):
    q, k, v = inputs(1, 12, 12, 2, 1, 8, 8)
    cu = torch.tensor([0, 5, 12], dtype=torch.int32) if packed else None
    tensors = [x.detach()[0].requires_grad_() for x in (q, k, v)] if packed else [q, k, v]
    sinks = torch.randn(2, requires_grad=True)
    torch.library.opcheck(torch.ops.pyfast.attention.default, (*tensors, sinks, cu, cu, True, 0.3, 4, -1, 2.0))
    torch.library.opcheck(torch.ops.pyfast.attention.default, (*tensors, None, cu, cu, False, 0.3, -1, -1, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sink", [False, True])
def test_the_backward_op_gives_the_shapes_and_dtypes_it_promises(sink, dtype):
    """Autograd would cast a gradient of the wrong dtype silently; a compiled graph would not."""
    q, k, v = (x.detach() for x in inputs(1, 12, 15, 2, 1, 8, 16, dtype=dtype))
    sinks = torch.zeros(2, dtype=dtype) if sink else None
    arguments = (q, k, v, sinks, None, None, True, 0.3, -1, -1, 0.0)
    out, lse = torch.ops.pyfast.attention(*arguments)
    backward = (torch.ones_like(out), torch.ones_like(lse), q, k, v, out, lse, *arguments[3:])
    operator = torch.ops.pyfast.attention_backward.default
    torch.library.opcheck(operator, backward, test_utils=("test_schema", "test_faketensor"))
    assert [x.dtype for x in operator(*backward)[:3]] == [dtype] * 3


def test_fullgraph_compile():
    q, k, v = inputs(1, 50, 50, 2, 1, 8, 8)
    cu = torch.tensor([0, 20, 50], dtype=torch.int32)

    def function(q, k, v, cu):
        out, lse = ops.attention(q, k, v, causal=True, return_lse=True)
        packed = ops.attention(q[0], k[0], v[0], causal=True, cu_seqlens_q=cu, window=(9, 0))
        return out.square().sum() + lse.sum() + packed.sin().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(q, k, v, cu), (q, k, v))
    torch.testing.assert_close(actual, torch.autograd.grad(function(q, k, v, cu), (q, k, v)))


def test_plain_and_reference_agree_with_the_kernel():
    tensors, cu = packed_inputs([0, 5, 9], [0, 7, 12])
    tensors.append(torch.randn(4, dtype=torch.float64))
    options = dict(causal=True, window=(3, 2), softcap=2.0, **cu)
    actual = run(ours, tensors, **options)
    expected = run(lambda q, k, v, sinks, **o: reference.attention(q, k, v, sinks=sinks, **o), tensors, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)
    arguments = (*tensors, cu["cu_seqlens_q"], cu["cu_seqlens_k"], True, 0.25, 3, 2, 2.0)
    out, lse = plain.attention_forward(*arguments)
    torch.testing.assert_close([out, lse], actual[:2], rtol=1e-11, atol=1e-12)
    generator = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).masked_fill(lse == -math.inf, 0.0)
    q, k, v, sinks, *rest = arguments
    grads = plain.attention_backward(dout, dlse, q, k, v, out, lse, sinks, *rest)
    torch.testing.assert_close(list(grads), actual[2:], rtol=1e-11, atol=1e-12)


# ---- refused --------------------------------------------------------------------------------------------------------

Q, K = torch.randn(1, 4, 4, 8), torch.randn(1, 6, 2, 8)
CU = torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((Q, K, K.double()), {}, TypeError, "v has dtype"),
        ((Q, K, K[:, :5]), {}, ValueError, "v has shape"),
        ((Q[0], K[0], K[0]), {}, ValueError, "cu_seqlens_q"),
        ((Q, K, K), {"cu_seqlens_q": CU}, ValueError, "q has shape"),
        ((Q, K, K), {"cu_seqlens_k": CU}, ValueError, "cu_seqlens_k"),
        ((Q[0], K[0], K[0]), {"cu_seqlens_q": CU.long()}, TypeError, "int32"),
        ((Q[0], K[0], K[0]), {"cu_seqlens_q": torch.tensor([0, 5], dtype=torch.int32)}, ValueError, "cu_seqlens_q is"),
        ((Q[0], K[0], K[0]), {"cu_seqlens_q": torch.tensor([0, 3, 2], dtype=torch.int32)}, ValueError, "ascend"),
        (
            (Q[0], K[0], K[0]),
            {"cu_seqlens_q": CU, "cu_seqlens_k": torch.tensor([0, 1, 2], dtype=torch.int32)},
            ValueError,
            "documents",
        ),
        ((Q[:, :, :3], K, K), {}, ValueError, "multiple"),
        ((Q[..., :7], K, K), {}, ValueError, "head size 8, q has 7"),
        ((torch.randn(1, 2, 1, 257),) * 3, {}, ValueError, "257"),
        ((Q, K, K), {"window": 3}, ValueError, "window"),
        ((Q, K, K), {"window": (-2, 0)}, ValueError, "window"),
        ((Q, K, K), {"softcap": -1.0}, ValueError, "softcap"),
        ((Q, K, K), {"scale": math.nan}, ValueError, "scale"),
        ((Q, K, K), {"scale": "small"}, TypeError, "scale"),
        ((Q, K, K), {"softcap": None}, TypeError, "softcap"),
        ((Q.to_sparse(), K, K), {}, TypeError, "q has layout"),
        ((Q, K, K), {"sinks": torch.zeros(3)}, ValueError, "sinks"),
        ((Q.int(), K, K), {}, TypeError, "q has dtype"),
    ],
)
def test_bad_arguments_are_named(arguments, options, error, words):
    with pytest.raises(error, match=words):
        ops.attention(*arguments, **options)


@pytest.mark.parametrize("option", ["dropout_p", "alibi_slopes", "attn_mask", "mask"])
def test_unknown_options_are_refused(option):
    with pytest.raises(TypeError, match=option):
        ops.attention(Q, K, K, **{option: 0.1})
