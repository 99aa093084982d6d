"""torch.autocast: products follow it as torch's do, whatever their size; kernels in plain torch are not touched."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pyfast import ops
from pyfast.kernels import plain

HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("rows", [3, 300])
def test_linear_gives_torchs_dtype(rows, dtype):
    x, w, bias = torch.randn(rows, 256), torch.randn(200, 256, requires_grad=True), torch.randn(200)
    with torch.autocast("cpu", dtype=dtype):
        y, expected = ops.linear(x, w, bias), F.linear(x, w, bias)
        mixed = ops.linear(x.to(dtype), w, bias)  # what the layer before gives
    assert y.dtype == expected.dtype == dtype and torch.equal(y, mixed)
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=1e-2)
    y.sum().backward()
    assert w.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_attention_gives_torchs_dtype(dtype):
    q, k, v = (torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3))
    with torch.autocast("cpu", dtype=dtype):
        out = ops.attention(q, k.to(dtype), v)
        expected = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)
    assert out.dtype == expected.dtype == dtype
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=1e-2)
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == torch.float32


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_loss_of_mixed_dtypes(reduction):
    h, w, target = torch.randn(20, 64), torch.randn(50, 64, requires_grad=True), torch.randint(0, 50, (20,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = ops.linear_cross_entropy(h.bfloat16(), w, target, reduction=reduction)
        expected = F.cross_entropy(F.linear(h, w), target, reduction=reduction)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=5e-2)
    loss.sum().backward()
    assert w.grad.dtype == torch.float32


def test_float64_stays():
    x = torch.randn(3, 8, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ops.linear(x, x).dtype == torch.float64


def test_plain_kernels_keep_their_precision():
    a, q = torch.randn(64, 64), torch.randn(1, 40, 2, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = plain.gemm(a, a, torch.empty(64, 64))
        out, _ = plain.attention_forward(q, q, q, None, None, None, True, 0.3, -1, -1, 0.0)
    torch.testing.assert_close(product, a @ a)
    torch.testing.assert_close(out, ops.attention(q, q, q, causal=True, scale=0.3))
