"""bfloat16 moments are rounded alike in every layout and stage of ZeRO, bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyfast.kernels.stochastic import indices
from pyfast.nn.layout import Layout, Shard, get_layout, set_layout
from pyfast.parallel import ParallelConfig, ParallelMesh, make_buckets
from pyfast.parallel.flat_part import FlatPart
from pyfast.parallel.places import bucket_places
from pyfast.train.config import OptimizerConfig
from pyfast.train.optimizer import make_optimizer, parameter_group

LAYOUTS = {
    "whole": Layout((6, 5)),
    "rows": Layout((7, 5), (Shard("tp", 0, (7,)),)),
    "columns": Layout((4, 37), (Shard("tp", 1, (37,)),)),
    "fused": Layout((13, 6), (Shard("tp", 0, (6, 4, 3)),)),
    "expert": Layout((3, 4, 10), (Shard("tp", 1, (2, 2)),)),
    "vector": Layout((21,), (Shard("tp", 0, (21,)),)),
    "scalar": Layout(()),
}


class Cut(nn.Module):
    """This rank's part of one parameter of each layout."""

    def __init__(self, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        for name, layout in LAYOUTS.items():
            full = torch.randn(layout.shape, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(layout.shard(full, mesh)))
            set_layout(getattr(self, name), layout)

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return sum((p * grad).sum() for p, grad in zip(self.parameters(), grads, strict=True))


def numbers(mesh: ParallelMesh, stage: int) -> dict[str, torch.Tensor]:
    """The number of each value of each parameter, put together from all tensor-parallel ranks."""
    model, found = Cut(mesh, torch.float32), {}
    for bucket in make_buckets(model, mesh, stage=stage, bucket_bytes=500).buckets:
        flat = indices(0, bucket.numel, bucket_places(bucket, mesh))
        for slot in bucket.slots:
            found[slot.name] = get_layout(getattr(model, slot.name)).unshard(flat[slot.place].view(slot.shape), mesh)
    return found


def state_after_steps(mesh: ParallelMesh, stage: int, dtype: torch.dtype, rule: str) -> dict[str, torch.Tensor]:
    model = Cut(mesh, dtype)
    config = OptimizerConfig(name=rule, weight_decay=0.1, moments_dtype="bfloat16")
    group_of = lambda name, p: parameter_group(name, p, config)  # noqa: E731
    buckets = make_buckets(model, mesh, stage=stage, group_of=group_of, bucket_bytes=500)
    optimizer = make_optimizer(buckets, config)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        buckets.start_micro_batch(last=True)
        grads = [layout.shard(torch.randn(layout.shape, generator=generator), mesh) for layout in LAYOUTS.values()]
        model([grad.to(dtype) / mesh.size("dp") for grad in grads]).backward()  # halves: the sum is exact
        buckets.end_micro_batch()
        buckets.finish()
        optimizer.step(0.01)
    buckets.wait_for_parameters()
    found, parameters = {}, {**dict(model.named_parameters()), **buckets.parameter_parts()}
    for kind, parts in {"parameter": parameters, **optimizer.state_by_name()}.items():
        for name in LAYOUTS:
            if name in parts:
                part = parts[name]
                local = buckets.gather(name, part) if isinstance(part, FlatPart) else part.detach()
                found[f"{kind}.{name}"] = layout_whole(local, getattr(model, name), mesh)
    return found


def layout_whole(local: torch.Tensor, parameter: nn.Parameter, mesh: ParallelMesh) -> torch.Tensor:
    return get_layout(parameter).unshard(local, mesh)


def on_ranks(rank: int, world_size: int, tensor: int, stage: int, dtype: torch.dtype, rule: str):
    mesh = ParallelMesh.create(ParallelConfig(tensor=tensor), rank=rank, world_size=world_size)
    return numbers(mesh, stage), state_after_steps(mesh, stage, dtype, rule)


def test_numbers_are_places_in_the_unsharded_tensor():
    found = numbers(ParallelMesh.single(), 0)
    for name, layout in LAYOUTS.items():
        count = torch.tensor(layout.shape).prod().item() if layout.shape else 1
        assert torch.equal(found[name] - found[name].flatten()[0], torch.arange(count).view(layout.shape)), name
    starts = torch.tensor([found[name].flatten()[0] for name in LAYOUTS]).sort().values
    assert (starts.diff() > 1000).all() and 0 <= starts[0] and starts[-1] < 2**62


@pytest.mark.parametrize(
    "tensor, world_size, stage, dtype, rule",
    [
        (2, 2, 0, torch.float32, "adamw"),
        (1, 2, 1, torch.bfloat16, "adamw"),
        (2, 4, 1, torch.bfloat16, "adamw"),
        (2, 4, 2, torch.float32, "adamw"),
        (4, 4, 0, torch.bfloat16, "adamw"),
        (2, 4, 3, torch.bfloat16, "adamw"),
    ],
)
def test_every_layout_has_the_bits_of_one_process(ranks, tensor, world_size, stage, dtype, rule):
    single = ParallelMesh.single()
    expected_numbers, expected = numbers(single, 0), state_after_steps(single, 0, dtype, rule)
    assert {value.dtype for name, value in expected.items() if "exp_avg" in name} == {torch.bfloat16}
    for rank, (found, state) in enumerate(ranks.run(on_ranks, world_size, tensor, stage, dtype, rule)):
        for name, value in expected_numbers.items():
            assert torch.equal(found[name], value), (rank, name)
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(state[name], value), (rank, name)
