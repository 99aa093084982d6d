"""ops.merge_attention: attention over parts of the keys, merged, equals attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch

from pyfast import ops


def parts(dtype=torch.float64, packed=False, Sq=20, Sk=50):
    torch.manual_seed(0)
    shape = (lambda S, N: (S, N, 8)) if packed else (lambda S, N: (2, S, N, 8))
    return [torch.randn(shape(S, N), dtype=dtype, requires_grad=True) for S, N in ((Sq, 4), (Sk, 2), (Sk, 2))]


def attention(q, k, v, packed):
    cu = (torch.tensor([0, q.shape[0]], dtype=torch.int32), torch.tensor([0, k.shape[0]], dtype=torch.int32))
    options = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1]} if packed else {}
    return ops.attention(q, k, v, return_lse=True, **options)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("cut", [0, 1, 23, 50])
def test_two_halves_are_the_whole(packed, cut):
    q, k, v = parts(packed=packed)
    dim = 0 if packed else 1
    whole = attention(q, k, v, packed)
    k_parts, v_parts = k.split([cut, 50 - cut], dim), v.split([cut, 50 - cut], dim)
    halves = [attention(q, k_part, v_part, packed) for k_part, v_part in zip(k_parts, v_parts, strict=True)]
    merged = ops.merge_attention(*halves[0], *halves[1])
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-13)
    loss = [(out.sin().sum() + lse.square().sum()) for out, lse in (merged, whole)]
    torch.testing.assert_close(
        torch.autograd.grad(loss[0], (q, k, v)), torch.autograd.grad(loss[1], (q, k, v)), rtol=1e-10, atol=1e-11
    )


def test_a_side_without_keys_is_left_out_whatever_it_holds():
    q, k, v = parts(torch.float32)
    out, lse = ops.attention(q, k, v, return_lse=True)
    garbage = torch.full_like(out, math.nan).requires_grad_()
    nothing = torch.full_like(lse, -math.inf).requires_grad_()
    for merged in (ops.merge_attention(out, lse, garbage, nothing), ops.merge_attention(garbage, nothing, out, lse)):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
        grads = torch.autograd.grad(merged[0].sum() + merged[1].sum(), (q, k, v, garbage, nothing), retain_graph=True)
        assert all(x.isfinite().all() for x in grads) and not grads[3].any() and not grads[4].any()


def test_neither_side_has_keys():
    out, lse = torch.full((1, 3, 2, 4), math.nan), torch.full((1, 2, 3), -math.inf)
    merged = ops.merge_attention(out, lse, out, lse)
    assert torch.equal(merged[0], torch.zeros_like(out)) and torch.equal(merged[1], lse)


def test_far_apart_and_large_lse():
    out_a, out_b = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), 2.0)
    for a, b, expected in ((300.0, -300.0, 1.0), (-300.0, 300.0, 2.0), (1e30, 1e30, 1.5)):
        out, lse = ops.merge_attention(out_a, torch.full((1, 1, 1), a), out_b, torch.full((1, 1, 1), b))
        assert torch.equal(out, torch.full_like(out, expected)) and lse.item() == pytest.approx(max(a, b), rel=1e-6)


def test_gradcheck():
    torch.manual_seed(0)
    out = [torch.randn(1, 3, 2, 4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    lse = [torch.randn(1, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    assert torch.autograd.gradcheck(ops.merge_attention, (out[0], lse[0], out[1], lse[1]))


def test_half_precision_rounds_once_and_fullgraph_compile():
    out, lse = torch.randn(2, 1, 5, 2, 8, dtype=torch.bfloat16), torch.randn(2, 1, 2, 5)
    merged = ops.merge_attention(out[0], lse[0], out[1], lse[1])
    exact = ops.merge_attention(out[0].double(), lse[0].double(), out[1].double(), lse[1].double())
    assert merged[0].dtype == torch.bfloat16 and merged[1].dtype == torch.float32
    torch.testing.assert_close(merged[0], exact[0].bfloat16(), rtol=8e-3, atol=1e-6)
    compiled = torch.compile(ops.merge_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(out[0], lse[0], out[1], lse[1]), merged)


OUT, LSE = torch.randn(1, 5, 2, 8), torch.randn(1, 2, 5)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((OUT, LSE, OUT[:, :4], LSE), ValueError, "out_b"),
        ((OUT, LSE, OUT.double(), LSE), TypeError, "out_b has dtype"),
        ((OUT, LSE, OUT, LSE.bfloat16()), TypeError, "lse_b is torch.bfloat16"),
        ((OUT, LSE.transpose(1, 2), OUT, LSE), ValueError, "lse_a has shape"),
        ((OUT[0, 0], LSE, OUT[0, 0], LSE), ValueError, "out_a has shape"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    with pytest.raises(error, match=words):
        ops.merge_attention(*arguments)
