"""Weight gradients that linear layers write straight into the buckets: the same as through autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyfast.nn.gradient_sink import get_sink
from pyfast.nn.layout import get_layout
from pyfast.nn.linear import ColumnParallelLinear, RowParallelLinear
from pyfast.ops.linear import write_weight_gradient
from pyfast.parallel import ParallelConfig, ParallelMesh, make_buckets

IN, WIDTH = 24, 40
MICRO_BATCHES = 3


class Net(nn.Module):
    """Column then row, a square layer called twice, a weight that is read besides, and one that is frozen."""

    def __init__(self, mesh: ParallelMesh, dtype: torch.dtype) -> None:
        super().__init__()
        options = {"group": mesh.group("tp"), "dtype": dtype}
        self.up = ColumnParallelLinear(IN, WIDTH, bias=True, **options)
        self.down = RowParallelLinear(WIDTH, IN, bias=True, **options)
        self.twice = RowParallelLinear(IN, IN, mesh_dim="pp", dtype=dtype)
        self.read = ColumnParallelLinear(IN, IN, mesh_dim="pp", dtype=dtype)
        self.frozen = ColumnParallelLinear(IN, IN, mesh_dim="pp", dtype=dtype)
        self.frozen.weight.requires_grad_(False)
        generator = torch.Generator().manual_seed(2)
        for parameter in self.parameters():
            layout = get_layout(parameter)
            full = torch.randn(layout.shape, generator=generator, dtype=torch.float64) / 5
            parameter.data.copy_(layout.shard(full, mesh))

    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(x)))
        x = torch.tanh(self.twice(torch.tanh(self.twice(x)))) + self.frozen(x)
        return self.read(x) + x @ self.read.weight * 0.5


def inputs(step: int, index: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * index + rank)
    return torch.randn(2, 9, IN, generator=generator, dtype=torch.float64)


def plain(state: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """The same net in torch's own functions."""
    up = torch.tanh(F.linear(x, state["up.weight"], state["up.bias"]))
    x = x + F.linear(up, state["down.weight"], state["down.bias"])
    x = torch.tanh(F.linear(torch.tanh(F.linear(x, state["twice.weight"])), state["twice.weight"])) + F.linear(
        x, state["frozen.weight"]
    )
    return F.linear(x, state["read.weight"]) + x @ state["read.weight"] * 0.5


def gradients(rank, world_size, tensor, stage, dtype_name):
    """Each step's summed gradients, whole, and what came to the hook of a weight: values not zero, and an address."""
    dtype = getattr(torch, dtype_name)
    mesh = ParallelMesh.create(ParallelConfig(tensor=tensor), rank=rank, world_size=world_size)
    net, seen, found = Net(mesh, dtype), [], []
    net.up.weight.register_post_accumulate_grad_hook(
        lambda p: seen.append((int(p.grad.count_nonzero()), p.grad.data_ptr()))
    )
    layouts = {name: get_layout(p) for name, p in net.named_parameters()}
    buckets = make_buckets(net, mesh, stage=stage, bucket_bytes=4000)
    for step in range(2):
        for index in range(MICRO_BATCHES):
            buckets.start_micro_batch(last=index == MICRO_BATCHES - 1)
            x = inputs(step, index, mesh.coordinate("dp")).to(dtype)
            net(x).square().sum().backward()
            buckets.end_micro_batch()
        buckets.finish()
        parts = buckets.gradient_parts().items()
        found.append({name: layouts[name].unshard(buckets.gather(name, part), mesh).clone() for name, part in parts})
    assert all(p.grad is None for p in net.parameters())
    return found, seen


@pytest.mark.parametrize("dtype, tolerance", [("float64", 1e-11), ("float32", 1e-4), ("bfloat16", 5e-2)])
@pytest.mark.parametrize(
    "tensor, world_size, stage", [(1, 1, 0), (2, 2, 0), (1, 2, 1), (1, 2, 2), (1, 2, 3), (2, 4, 1), (2, 4, 3)]
)
def test_gradients_are_those_of_torch(ranks, tensor, world_size, stage, dtype, tolerance):
    start = Net(ParallelMesh.single(), getattr(torch, dtype))
    state = {name: p.detach().double().requires_grad_(p.requires_grad) for name, p in start.named_parameters()}
    expected = []
    for step in range(2):
        for parameter in state.values():
            parameter.grad = None
        for index in range(MICRO_BATCHES):
            for rank in range(world_size // tensor):
                x = inputs(step, index, rank).to(getattr(torch, dtype)).double()
                plain(state, x).square().sum().backward()
        expected.append({name: p.grad for name, p in state.items() if p.requires_grad})
    for found, seen in ranks.run(gradients, world_size, tensor, stage, dtype):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.keys() == theirs.keys()
            for name, grad in theirs.items():
                difference = (ours[name].double() - grad).norm() / grad.norm()
                assert difference < tolerance, (name, difference)
        assert len(seen) == 2 * MICRO_BATCHES and not any(count for count, _ in seen)
        assert len({place for _, place in seen}) == 1, "autograd copied the shared zeros"


def test_outside_a_step_and_after_close_gradients_go_the_usual_way():
    net = Net(ParallelMesh.single(), torch.float32)
    buckets = make_buckets(net, ParallelMesh.single(), stage=0)
    (grad,) = torch.autograd.grad(net(inputs(0, 0, 0).float()).sum(), net.up.weight)
    assert grad.count_nonzero() > 0
    with pytest.raises(RuntimeError, match="came outside a step"):
        net(inputs(0, 0, 0).float()).sum().backward()
    assert get_sink(net.up.weight) is not None
    buckets.close()
    assert get_sink(net.up.weight) is None
    for parameter in net.parameters():
        parameter.grad = None
    net(inputs(0, 0, 0).float()).sum().backward()
    assert net.up.weight.grad.count_nonzero() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows, out, width", [(1, 3, 5), (70, 33, 48), (512, 256, 256)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_the_product_into_a_buffer(dtype, rows, out, width, accumulate):
    dy = torch.randn(*((2, rows // 2) if rows > 1 else (rows,)), out).to(dtype)
    x = torch.randn(*dy.shape[:-1], width).to(dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    before = torch.randn(out, width, dtype=wide)
    target = before.clone() if accumulate else torch.full_like(before, float("nan"))
    write_weight_gradient(dy, x, target, accumulate)
    exact = dy.double().flatten(0, -2).T @ x.double().flatten(0, -2) + (before.double() if accumulate else 0)
    tolerance = {torch.float64: 1e-14, torch.float32: 2e-6}.get(dtype, 2.0**-8)
    assert (target - exact).norm() / exact.norm() < tolerance
