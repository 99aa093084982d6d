"""The plain-torch reference agrees with torch's own modules and with its own limits."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from pyfast.kernels import reference


def randn(*shape, seed=0, dtype=torch.float64, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_(grad)


def test_rms_norm_and_swiglu_equal_torch():
    x, weight = randn(3, 5, 8), randn(8, seed=1)
    torch.testing.assert_close(reference.rms_norm(x, weight, eps=1e-5), F.rms_norm(x, (8,), weight, 1e-5))
    gate, up = x.chunk(2, -1)
    torch.testing.assert_close(reference.swiglu(x), F.silu(gate) * up)
    assert torch.equal(reference.swiglu(x), reference.swiglu(gate, up))


def test_rotary_is_a_complex_rotation_of_the_first_dimensions():
    x, angle = randn(2, 5, 3, 10), randn(16, 4, seed=1, grad=False)
    positions = torch.tensor([[3, 0, 15, 2, 2], [0, 1, 2, 3, 4]])
    out = reference.rotary(x, angle.cos(), angle.sin(), positions=positions)
    turn = torch.polar(torch.ones_like(angle), angle)[positions].unsqueeze(2)
    expected = torch.complex(x[..., :4], x[..., 4:8]) * turn
    torch.testing.assert_close(out, torch.cat([expected.real, expected.imag, x[..., 8:]], -1))


@pytest.mark.parametrize("heads,kv_heads", [(6, 6), (6, 2), (4, 1)])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_and_gradients_equal_torch(heads, kv_heads, causal):
    q, k, v = randn(2, 7, heads, 5), randn(2, 7, kv_heads, 5, seed=1), randn(2, 7, kv_heads, 9, seed=2)
    out, _ = reference.attention(q, k, v, causal=causal)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=causal, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    upstream = randn(*out.shape, seed=3, grad=False)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_attention_lse_is_the_logsumexp_of_what_each_row_sees():
    q, k, v = randn(1, 6, 2, 4), randn(1, 6, 2, 4, seed=1), randn(1, 6, 2, 4, seed=2)
    _, lse = reference.attention(q, k, v, causal=True, window=(2, 0), softcap=1.5, scale=0.7)
    for row in range(6):
        seen = slice(max(0, row - 2), row + 1)
        scores = torch.einsum("nd,knd->nk", q[0, row], k[0, seen]) * 0.7
        torch.testing.assert_close(lse[0, :, row], torch.logsumexp(1.5 * torch.tanh(scores / 1.5), -1))


def test_attention_sinks_are_one_more_key_of_value_zero():
    q, k, v = randn(1, 4, 2, 3), randn(1, 4, 2, 3, seed=1), randn(1, 4, 2, 3, seed=2)
    sinks = randn(2, seed=3)
    out, lse = reference.attention(q, k, v, sinks=sinks)
    scores = torch.einsum("bqnd,bknd->bnqk", q, k) / math.sqrt(3)
    scores = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(1, 2, 4, 1)], -1)
    expected = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1)[..., :4], v)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    upstream = randn(*out.shape, seed=4, grad=False)
    for got, want in zip(
        torch.autograd.grad(out, (q, sinks), upstream), torch.autograd.grad(expected, (q, sinks), upstream), strict=True
    ):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("sinks", [None, torch.zeros(2, dtype=torch.float64)])
def test_rows_without_keys_give_zero_and_no_gradient(sinks):
    q, k, v = randn(1, 5, 2, 4), randn(1, 3, 2, 4, seed=1), randn(1, 3, 2, 4, seed=2)
    out, lse = reference.attention(q, k, v, causal=True, sinks=sinks)
    assert (out[:, :2] == 0).all() and (lse[..., :2] == -math.inf).all() and lse[..., 2:].isfinite().all()
    (out.sum() + lse[..., 2:].sum()).backward()
    assert (q.grad[:, :2] == 0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


def test_packed_attention_equals_separate_documents_and_ignores_rows_outside():
    cu_q, cu_k = [1, 1, 6, 6, 10], [0, 4, 9, 12, 12]
    q, k, v = randn(12, 2, 4), randn(14, 1, 4, seed=1), randn(14, 1, 4, seed=2)
    with torch.no_grad():
        q[0], q[10:], k[12:], v[12:] = math.nan, math.inf, math.nan, math.inf
    out, lse = reference.attention(
        q, k, v, causal=True, cu_seqlens_q=torch.tensor(cu_q), cu_seqlens_k=torch.tensor(cu_k)
    )
    alone, _ = reference.attention(q[None, 1:6], k[None, 4:9], v[None, 4:9], causal=True)
    assert torch.equal(out[1:6], alone[0])
    assert (out[:1] == 0).all() and (out[6:] == 0).all() and (lse[:, 6:] == -math.inf).all()
    out.sum().backward()
    for grad in (q.grad, k.grad, v.grad):
        assert grad.isfinite().all()
    assert (v.grad[:4] == 0).all() and (v.grad[9:] == 0).all() and (q.grad[0] == 0).all()


def test_merged_halves_equal_the_whole_with_gradients():
    q, k, v = randn(1, 4, 2, 3), randn(1, 6, 2, 3, seed=1), randn(1, 6, 2, 3, seed=2)
    whole = reference.attention(q, k, v)
    halves = [reference.attention(q, k[:, part], v[:, part]) for part in (slice(0, 2), slice(2, 6))]
    merged = reference.merge_attention(*halves[0], *halves[1])
    upstream = [randn(*x.shape, seed=3, grad=False) for x in whole]
    torch.testing.assert_close(merged, whole)
    for got, want in zip(
        torch.autograd.grad(merged, (q, k, v), upstream), torch.autograd.grad(whole, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(got, want)
    nothing = torch.zeros(1, 4, 2, 3, dtype=torch.float64), torch.full((1, 2, 4), -math.inf, dtype=torch.float64)
    out, lse = reference.merge_attention(*nothing, *nothing)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_linear_cross_entropy_equals_torch(reduction):
    h, w = randn(2, 6, 5), randn(11, 5, seed=1)
    target = torch.randint(0, 11, (2, 6), generator=torch.Generator().manual_seed(0))
    target[0, 3] = target[1, 0] = -100
    loss = reference.linear_cross_entropy(h, w, target, reduction=reduction)
    expected = F.cross_entropy((h @ w.T).flatten(0, 1), target.flatten(), reduction=reduction)
    torch.testing.assert_close(loss.flatten(), expected.flatten())
    for got, want in zip(
        torch.autograd.grad(loss.sum(), (h, w)), torch.autograd.grad(expected.sum(), (h, w)), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_linear_cross_entropy_of_ignored_labels_only_is_zero():
    h, w = randn(4, 5), randn(11, 5, seed=1)
    with torch.no_grad():
        h.fill_(math.nan)
    for reduction in ("sum", "mean"):
        loss = reference.linear_cross_entropy(h, w, torch.full((4,), -100), reduction=reduction)
        grads = torch.autograd.grad(loss, (h, w))
        assert loss == 0 and all((grad == 0).all() for grad in grads)


def test_vocabulary_shards_give_the_whole_loss_and_the_closed_form_gradient():
    h, w = randn(7, 5), randn(11, 5, seed=1)
    target = torch.tensor([0, 10, 3, -100, 4, 7, 8])
    options = {"softcap": 3.0}
    whole = reference.linear_cross_entropy(h, w, target, z_loss=0.1, reduction="none", **options)
    starts = [(0, 4), (4, 4), (4, 11)]  # the second shard is empty
    shards = [reference.vocabulary_shard(h, w[a:b], target, start=a, **options) for a, b in starts]
    parallel = reference.combine_shards(*zip(*shards, strict=True), target, z_loss=0.1, reduction="none")
    torch.testing.assert_close(parallel, whole)

    upstream = randn(7, seed=3, grad=False)
    want = torch.autograd.grad(whole, (h, w), upstream)
    lse = torch.logsumexp(torch.stack([shard[0] for shard in shards]), 0)
    parts = [
        reference.linear_cross_entropy_backward(upstream, h, w[a:b], target, lse, start=a, z_loss=0.1, **options)
        for a, b in starts
    ]
    torch.testing.assert_close(sum(part[0] for part in parts), want[0])
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_equals_torch(dtype):
    start = randn(37, dtype=dtype)
    ours, theirs = start.detach().clone(), start.detach().clone().requires_grad_()
    optimizer = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    m, v = torch.zeros_like(ours), torch.zeros_like(ours)
    for step in range(1, 6):
        theirs.grad = randn(37, seed=step, dtype=dtype, grad=False) * 0.5
        optimizer.step()
        reference.adamw_(ours, theirs.grad * 2, m, v, step=step, learning_rate=1e-2, weight_decay=0.1, grad_scale=0.5)
    torch.testing.assert_close(ours, theirs.detach())


def test_adamw_keeps_the_weights_in_the_master_copy():
    param = torch.ones(5, dtype=torch.bfloat16)
    master, m, v = (torch.ones(5), torch.zeros(5), torch.zeros(5))
    for step in range(1, 4):
        reference.adamw_(param, torch.ones(5), m, v, step=step, learning_rate=1e-4, master=master)
    torch.testing.assert_close(master, torch.full((5,), 1 - 3e-4))
    assert torch.equal(param, master.to(torch.bfloat16))
