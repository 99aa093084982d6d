"""ops.scaled_dot_product_attention against F.scaled_dot_product_attention, which it replaces argument for argument."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfast import kernels, ops

# Forward and gradients; torch's own bfloat16 gradients are rounded several times.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def tensors(*shapes, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def check_equal(q, k, v, tolerance=None, **options):
    """Result and gradients, also under an upstream gradient that is not contiguous."""
    dtype = q.dtype
    actual, expected = (
        f(q, k, v, **options) for f in (ops.scaled_dot_product_attention, F.scaled_dot_product_attention)
    )
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    upstream = torch.randn(expected.mT.shape, generator=torch.Generator().manual_seed(1)).to(expected.dtype).mT
    pairs = [(actual, expected)]
    pairs += zip(*(torch.autograd.grad(out, (q, k, v), upstream) for out in (actual, expected)), strict=True)
    least = 0.1 * max(b.double().norm() for _, b in pairs)  # on a single key dq and dk are 0 but for rounding
    for a, b in pairs:
        assert a.isfinite().all()
        assert (a - b).double().norm() <= (tolerance or TOLERANCE[dtype]) * b.double().norm().clamp_min(least)


def test_the_signature_is_torchs():
    expected = F.scaled_dot_product_attention.__doc__.partition("(")[2].partition(")")[0]
    names = [part.partition("=")[0].strip(" *\n") for part in expected.split(",")]
    assert [name for name in names if name] == list(inspect.signature(ops.scaled_dot_product_attention).parameters)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("L", "S"), [(50, 50), (1, 30), (30, 1), (20, 45), (45, 20)], ids=str)
def test_lengths_and_dtypes(L, S, dtype, is_causal):
    check_equal(*tensors((2, 3, L, 24), (2, 3, S, 24), (2, 3, S, 16), dtype=dtype), is_causal=is_causal)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3), (2, 2, 2, 3)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_leading_dimensions(lead, is_causal):
    check_equal(*tensors((*lead, 9, 8), (*lead, 12, 8), (*lead, 12, 8)), is_causal=is_causal, scale=0.7)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 60), st.integers(1, 60), st.sampled_from([(1, 1), (4, 2), (6, 1)]), st.integers(1, 20),
    st.integers(1, 20), st.sampled_from(["none", "causal", "keys"]), st.integers(0, 2**31),
)  # fmt: skip
def test_any_shape(L, S, heads, D, Dv, mask, seed):
    q, k, v = tensors((2, heads[0], L, D), (2, heads[1], S, D), (2, heads[1], S, Dv), seed=seed)
    seen = torch.rand(2, 1, 1, S, generator=torch.Generator().manual_seed(seed)) < 0.7
    options = {"none": {}, "causal": {"is_causal": True}, "keys": {"attn_mask": seen}}[mask]
    check_equal(q, k, v, enable_gqa=True, tolerance=1e-11, **options)


@pytest.mark.parametrize("form", ["[B, 1, 1, S]", "[1, 1, 1, S]", "[1, S]", "expanded", "sliced"])
def test_masks_of_keys(form):
    q, k, v = tensors((3, 4, 11, 8), (3, 4, 17, 8), (3, 4, 17, 8))
    seen = torch.arange(17) < torch.tensor([17, 9, 1])[:, None]
    seen[0, 3:6] = False  # holes too
    mask = {
        "[B, 1, 1, S]": seen[:, None, None],
        "[1, 1, 1, S]": seen[None, None, None, 1],
        "[1, S]": seen[1:2],
        "expanded": seen[:, None, None].expand(3, 4, 11, 17),
        "sliced": torch.cat([seen, seen], 1)[:, None, None, :17],
    }[form]
    check_equal(q, k, v, attn_mask=mask)


def test_a_sequence_whose_keys_are_all_masked_gets_zeros():
    q, k, v = tensors((2, 1, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8))
    seen = torch.tensor([True, False]).view(2, 1, 1, 1).expand(2, 1, 1, 6)
    out = ops.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    out.sum().backward()
    for x in (out, q.grad, k.grad, v.grad):
        assert torch.equal(x[1], torch.zeros_like(x[1])) and x[0].any()


def test_masked_keys_may_hold_anything():
    q, k, v = (x.detach() for x in tensors((1, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8)))
    seen = torch.tensor([1, 1, 0, 1, 0, 0], dtype=torch.bool)
    expected = ops.scaled_dot_product_attention(q, k, v, seen)
    k[:, :, ~seen], v[:, :, ~seen] = math.nan, math.inf
    assert torch.equal(ops.scaled_dot_product_attention(q, k, v, seen), expected)


def test_causal_is_top_left_aligned_where_torch_is():
    q, k = (torch.zeros(1, n, 4) for n in (3, 5))
    weights = ops.scaled_dot_product_attention(q, k, torch.eye(5)[None], is_causal=True)[0]
    assert (weights > 0).sum(1).tolist() == [1, 2, 3]
    weights = ops.scaled_dot_product_attention(k, q, torch.eye(3)[None], is_causal=True)[0]
    assert (weights > 0).sum(1).tolist() == [1, 2, 3, 3, 3]


def test_any_strides():
    q, k, v = (x.detach() for x in tensors((2, 20, 3, 8), (2, 3, 8, 20), (3, 2, 20, 16)))
    q, k, v = q.transpose(1, 2), k.mT, v.transpose(0, 1)[..., ::2]
    check_equal(*(x.requires_grad_() for x in (q, k, v)), is_causal=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_gives_torchs_dtype(dtype):
    q, k, v = tensors((2, 2, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8), dtype=torch.float32)
    with torch.autocast("cpu", dtype=dtype):
        check_equal(q, k.to(dtype), v, tolerance=TOLERANCE[dtype], attn_mask=torch.arange(9)[None] < 6)
        check_equal(q, k, v, tolerance=TOLERANCE[dtype], is_causal=True)


def test_fullgraph_compile():
    q, k, v = tensors((2, 4, 9, 8), (2, 2, 12, 8), (2, 2, 12, 8), dtype=torch.float32)
    seen = torch.arange(12) < torch.tensor([5, 12])[:, None]

    def function(q, k, v, seen):
        causal = ops.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        masked = ops.scaled_dot_product_attention(q, k, v, seen[:, None, None], enable_gqa=True, scale=0.2)
        return causal.sum() + masked.square().sum()

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    actual = torch.autograd.grad(compiled(q, k, v, seen), (q, k, v))
    torch.testing.assert_close(actual, torch.autograd.grad(function(q, k, v, seen), (q, k, v)))


@pytest.mark.parametrize("options", [{"is_causal": True}, {"attn_mask": torch.tensor([True, False, True, True])}, {}])
def test_gradcheck(options):
    q, k, v = tensors((2, 4, 5, 3), (2, 2, 4, 3), (2, 2, 4, 2))

    def function(q, k, v):
        return ops.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)

    assert torch.autograd.gradcheck(function, (q, k, v))


Q = torch.randn(2, 4, 5, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((Q, Q, Q), {"dropout_p": 0.1}, ValueError, "dropout_p is 0.1"),
        ((Q, Q, Q), {"dropout_p": True}, TypeError, "dropout_p"),
        ((Q, Q, Q), {"dropout_p": None}, TypeError, "dropout_p"),
        ((Q, Q, Q), {"is_causal": "no"}, TypeError, "is_causal"),
        ((Q, Q, Q), {"enable_gqa": 1}, TypeError, "enable_gqa"),
        ((Q, Q, Q), {"scale": "1"}, TypeError, "scale"),
        ((Q, Q, Q), {"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, ValueError, "differ between queries"),
        ((Q, Q, Q), {"attn_mask": torch.ones(2, 4, 1, 5, dtype=torch.bool)}, ValueError, "differ between queries"),
        ((Q, Q, Q), {"attn_mask": torch.ones(2, 4, 5, 5, dtype=torch.bool).tril()}, ValueError, "differ between"),
        ((Q, Q, Q), {"attn_mask": torch.ones(6, dtype=torch.bool)}, ValueError, "must broadcast"),
        ((Q, Q, Q), {"attn_mask": torch.ones(1, 2, 1, 1, 5, dtype=torch.bool)}, ValueError, "must broadcast"),
        ((Q, Q, Q), {"attn_mask": torch.zeros(5)}, TypeError, "torch.float32; a boolean"),
        ((Q, Q, Q), {"attn_mask": torch.ones(5, dtype=torch.int64)}, TypeError, "torch.int64; a boolean"),
        ((Q, Q, Q), {"attn_mask": [True] * 5}, TypeError, "list; a boolean"),
        ((Q, Q, Q), {"attn_mask": torch.ones(5, dtype=torch.bool, device="meta")}, ValueError, "attn_mask is on meta"),
        ((Q, Q, Q), {"attn_mask": torch.ones(5, dtype=torch.bool), "is_causal": True}, ValueError, "with is_causal"),
        ((Q, Q[:, :2], Q[:, :2]), {}, ValueError, "enable_gqa=True"),
        ((Q[:, :3], Q[:, :2], Q[:, :2]), {"enable_gqa": True}, ValueError, "multiple"),
        ((Q, Q[:1], Q[:1]), {}, ValueError, "key has leading dimensions"),
        ((Q, Q[0], Q[0]), {}, ValueError, "key has shape"),
        ((Q[0, 0, 0],) * 3, {}, ValueError, "query has shape"),
        ((Q, Q.double(), Q), {}, TypeError, "k has dtype"),
        ((Q.int(), Q, Q), {}, TypeError, "query has dtype"),
        ((None, Q, Q), {}, TypeError, "query is a NoneType"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named_before_anything_is_computed(monkeypatch, arguments, options, error, words):
    monkeypatch.setattr(kernels.for_device(Q.device), "attention_forward", None)
    with pytest.raises(error, match=words):
        ops.scaled_dot_product_attention(*arguments, **options)
