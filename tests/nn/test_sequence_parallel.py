"""Layers whose input and output are cut along the sequence, on 2, 3 and 4 ranks, against the same layers on one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyfast.comm import record
from pyfast.nn import Attention, FeedForward, RMSNorm
from pyfast.nn.layout import get_layout
from pyfast.parallel import ParallelConfig, ParallelMesh


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class Block(nn.Module):
    """Two norms on sequence shards, attention and a feed-forward layer between them, with biases and residuals."""

    def __init__(self, group, dim: int | None) -> None:
        super().__init__()
        partial = ("tp",) if dim is not None else ()
        options = {"group": group, "sequence_dim": dim, "dtype": torch.float64}
        self.first = RMSNorm(24, partial=partial, dtype=torch.float64)
        self.attention = Attention(24, 12, qk_norm=True, bias=True, output_bias=True, **options)
        self.second = RMSNorm(24, partial=partial, dtype=torch.float64)
        self.ffn = FeedForward(24, 13, bias=True, **options)

    def forward(self, x, cos, sin, cu_seqlens):
        x = x + self.attention(self.first(x), cos, sin, cu_seqlens=cu_seqlens)
        return x + self.ffn(self.second(x))


def block(rank, world_size, dim, length):
    """Output, gradients of x and of every parameter, whole; and the operations of forward and backward."""
    mesh = ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size)
    group = mesh.group("tp")
    layer = Block(group, dim if world_size > 1 else None)
    with torch.no_grad():
        for seed, parameter in enumerate(layer.parameters()):
            layout = get_layout(parameter)
            parameter.copy_(layout.shard(numbers(*layout.shape, seed=seed) / 3, mesh))
    shape = (2, length, 24) if dim == 1 else (length, 24)
    x_full, up = numbers(*shape, seed=50), numbers(*shape, seed=51)
    x = x_full.tensor_split(world_size, dim)[rank].clone().requires_grad_()
    cu_seqlens = None if dim == 1 else torch.tensor([0, 4, length], dtype=torch.int32)  # [T, H]: packed documents
    angle = torch.arange(length).unsqueeze(1) * torch.tensor([1.0])
    with record() as events:
        out = layer(x, angle.cos(), angle.sin(), cu_seqlens)
        out.backward(up.tensor_split(world_size, dim)[rank])
    names = [event.operation for event in events]
    grads = []
    for parameter in layer.parameters():
        layout, grad = get_layout(parameter), parameter.grad
        if "tp" in layout.partial:
            group.all_reduce(grad, name="partial")
        grads.append(layout.unshard(grad, mesh))
    cut = [torch.cat(group.all_gather_object(t, name="x"), dim) for t in (out.detach(), x.grad)]
    return [*cut, *grads], names


@pytest.mark.parametrize(("dim", "length"), [(1, 8), (1, 7), (0, 9)])
def test_a_block_on_sequence_shards_equals_one_rank(ranks, dim, length):
    want, _ = block(0, 1, dim, length)
    for world_size in (2, 3, 4):
        for got, names in ranks.run(block, world_size, dim, length):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
            gather, scatter = "all_gather_matmul", "matmul_reduce_scatter"
            assert names[:4] == [gather, scatter, gather, scatter], "q, k, v share one gather, gate and up too"
            assert sorted(names[4:]) == sorted([gather, "all_gather", scatter] * 2)
