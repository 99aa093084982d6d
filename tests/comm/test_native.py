"""The backend's own collectives, which GPU tensors use, run here over gloo: same results as the other transports."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pyfast.comm.native import Native


def every_collective(rank, world_size):
    native = Native(dist.group.WORLD)
    inputs = [torch.arange(6.0).view(2, 3) * (p + 1) for p in range(world_size)]
    x = inputs[rank].clone()
    total, largest, stacked, block = x.clone(), torch.empty_like(x), x.new_empty(world_size, 2, 3), x.new_empty(2, 3)
    blocks = torch.stack([inputs[rank] + p for p in range(world_size)])
    exchanged, copied = torch.empty_like(stacked), x.clone()
    for finish in [
        native.all_reduce(total, total, "sum"),
        native.all_reduce(x, largest, "max"),
        native.all_gather(x, stacked),
        native.reduce_scatter(blocks, block),
        native.all_to_all(blocks, exchanged),
        native.broadcast(copied, 1),
    ]:
        finish()
    assert torch.equal(total, sum(inputs))
    assert torch.equal(largest, inputs[-1])
    assert torch.equal(stacked, torch.stack(inputs))
    assert torch.equal(block, sum(inputs) + world_size * rank)
    assert torch.equal(exchanged, torch.stack([other + rank for other in inputs]))
    assert torch.equal(copied, inputs[1])
    assert torch.equal(x, inputs[rank]), "the input of an out-of-place reduction changed"


def test_the_backends_collectives(ranks):
    ranks.run(every_collective, 3)
