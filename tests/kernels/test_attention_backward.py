"""What the C++ backward owes to the order of its blocks of keys, and to float32 that is coarse beside large scores."""

from __future__ import annotations

import pytest
import torch

from pyfast import ops


def gradients(q, k, v, dout, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    return torch.autograd.grad(ops.attention(*leaves, **options), leaves, dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_keys_add_to_dq_in_order(dtype):
    """256 keys, then one: the second block is through with each panel of queries long before the first, and waits."""
    torch.manual_seed(0)
    q, dout = torch.randn(2, 1, 1500, 1, 128).to(dtype)
    k, v = torch.randn(2, 1, 257, 1, 128).to(dtype)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = gradients(q, k, v, dout)
        torch.set_num_threads(2)
        for _ in range(6):
            assert all(map(torch.equal, gradients(q, k, v, dout), expected))
    finally:
        torch.set_num_threads(threads)


def test_no_probability_passes_one_however_large_the_scores():
    """float32 scores of 1e8 stand 8 apart, and lse too: exp(score - lse) could be e^16."""
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 300, 1, 16)
    dq, dk, dv = gradients(6e3 * q, 6e3 * k, v, dout, scale=1.0, causal=True)
    assert (dv.abs() <= dout.abs().sum(1, keepdim=True) * 1.001).all()
    assert dq.isfinite().all()
    assert dk.isfinite().all()
