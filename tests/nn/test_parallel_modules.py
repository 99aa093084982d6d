"""The modules cut over 2, 3 and 4 ranks against the same module on one, in float64: outputs, gradients, collectives."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from pyfast.comm import record
from pyfast.kernels import cpu
from pyfast.nn import ColumnParallelLinear, FeedForward, RowParallelLinear, VocabParallelEmbedding
from pyfast.nn.layout import get_layout
from pyfast.parallel import ParallelConfig, ParallelMesh


def mesh_of(rank: int, world_size: int) -> ParallelMesh:
    return ParallelMesh.create(ParallelConfig(tensor=world_size), rank=rank, world_size=world_size, checked=True)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@torch.no_grad()
def fill(module: torch.nn.Module, mesh: ParallelMesh | None) -> torch.nn.Module:
    for seed, parameter in enumerate(module.parameters()):
        layout = get_layout(parameter)
        full = numbers(*layout.shape, seed=seed + 10)
        parameter.copy_(full if mesh is None else layout.shard(full, mesh))
    return module


def mlp(rank: int, world_size: int, rows: list[int]) -> list[torch.Tensor]:
    """Column- then row-parallel with prime sizes and biases; the number of rows changes call by call."""
    mesh = mesh_of(rank, world_size)
    group = mesh.group("tp")
    up = fill(ColumnParallelLinear(7, 13, bias=True, group=group, dtype=torch.float64), mesh)
    down = fill(RowParallelLinear(13, 5, bias=True, group=group, dtype=torch.float64), mesh)
    results = []
    for call, count in enumerate(rows):
        x = numbers(count, 7, seed=call).requires_grad_()
        hidden = up(x).tanh()
        hidden.retain_grad()
        out = down(hidden)
        (out * numbers(count, 5, seed=call + 50)).sum().backward()
        layers = [p for layer in (up, down) for p in layer.parameters()]
        whole = [get_layout(p).unshard(p.grad, mesh) for p in layers]
        results += [out.detach(), x.grad, *whole, group.all_gather_object(hidden.grad, name="hidden")]
        up.zero_grad()
        down.zero_grad()
    return results


def test_linears_on_ranks_equal_one_rank(ranks):
    rows = [7, 64, 1, 64, 20]
    want = mlp(0, 1, rows)
    for world_size in (2, 3, 4):
        for got in ranks.run(mlp, world_size, rows):
            for a, b in zip(got, want, strict=True):
                if isinstance(a, list):  # the input gradient of the row-parallel layer: every rank has its slice
                    a, b = torch.cat(a, -1), b[0]
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def embedding(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = mesh_of(rank, world_size)
    layer = fill(VocabParallelEmbedding(11, 4, group=mesh.group("tp"), dtype=torch.float64), mesh)
    out = layer(torch.tensor([[0, 10, 3, 5], [3, 3, 7, 6]]))
    (out * numbers(2, 4, 4, seed=1)).sum().backward()
    return out.detach(), get_layout(layer.weight).unshard(layer.weight.grad, mesh)


def test_embedding_on_ranks_equals_one_rank(ranks):
    want = embedding(0, 1)
    for got in ranks.run(embedding, 3):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def frozen(rank: int, world_size: int) -> dict[str, list]:
    group = mesh_of(rank, world_size).group("tp")
    layer, x = ColumnParallelLinear(6, 4, group=group, name="layer"), torch.randn(3, 6)
    seen = {}
    layer.requires_grad_(False)
    live = x.clone().requires_grad_()
    with record() as events:
        layer(live).sum().backward()
    total = layer.weight.sum(0).clone()
    group.all_reduce(total, name="expected")
    seen["frozen weight"] = [event.name for event in events]
    assert layer.weight.grad is None
    torch.testing.assert_close(live.grad, total.expand(3, -1))

    layer.requires_grad_(True)
    with record() as events:
        layer(x).sum().backward()
    seen["frozen input"] = [event.name for event in events]
    torch.testing.assert_close(layer.weight.grad, x.sum(0).expand(2, -1))
    return seen


def test_frozen_weights_and_inputs_skip_their_work(ranks):
    for seen in ranks.run(frozen, 2):
        assert seen == {"frozen weight": ["layer input gradient"], "frozen input": []}


def drawn(rank: int, world_size: int) -> list[torch.Tensor]:
    mesh = mesh_of(rank, world_size)
    torch.manual_seed(0)
    layer = FeedForward(5, 7, group=mesh.group("tp"))
    return [get_layout(p).unshard(p.data, mesh) for p in layer.parameters()]


def test_ranks_with_one_random_state_draw_the_weights_of_one_rank(ranks):
    want = drawn(0, 1)
    for got in ranks.run(drawn, 3):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def with_process_group(rank: int, world_size: int) -> torch.Tensor:
    mesh = mesh_of(rank, world_size)
    layer = fill(FeedForward(5, 7, group=dist.group.WORLD, dtype=torch.float64), mesh)
    return layer(numbers(3, 5, seed=0)).detach()


def test_a_torch_process_group_serves_as_group(ranks):
    want = fill(FeedForward(5, 7, dtype=torch.float64), None)(numbers(3, 5, seed=0))
    for got in ranks.run(with_process_group, 2):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


def autocast(rank: int, world_size: int) -> None:
    group = mesh_of(rank, world_size).group("tp")
    up, down = ColumnParallelLinear(6, 4, group=group, bias=True), RowParallelLinear(4, 3, group=group)
    x = torch.randn(3, 6, requires_grad=True)
    with record() as events, torch.autocast("cpu", dtype=torch.bfloat16):
        out = down(up(x))
    with record() as back:
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16 and x.grad.dtype == torch.float32
    assert {event.dtype for event in [*events, *back]} == {"bfloat16"}
    assert {parameter.grad.dtype for layer in (up, down) for parameter in layer.parameters()} == {torch.float32}


def test_autocast_sends_bfloat16_and_leaves_float32_gradients(ranks):
    ranks.run(autocast, 2)


def products(rank: int, world_size: int) -> tuple[int, list[torch.Tensor]]:
    mesh = mesh_of(rank, world_size)
    layer = fill(FeedForward(128, 256, group=mesh.group("tp")), mesh)
    x = numbers(200, 128, seed=0).float().requires_grad_()
    calls, gemm = [], cpu.gemm
    cpu.gemm = lambda *args, **kwargs: calls.append(args) or gemm(*args, **kwargs)
    try:
        layer(x).sum().backward()
    finally:
        cpu.gemm = gemm
    return len(calls), [x.grad, *(get_layout(p).unshard(p.grad, mesh) for p in layer.parameters())]


def test_every_product_of_a_cut_layer_is_packed_where_that_is_faster(ranks):
    want = products(0, 1)[1]
    for count, got in ranks.run(products, 2):
        assert count == 6  # forward, gradient by input and by weight, of two layers
        for a, b in zip(got, want, strict=True):
            assert (a - b).norm() < 1e-5 * b.norm()


def refused(rank: int, world_size: int) -> list[str]:
    group = mesh_of(rank, world_size).group("tp")
    messages = []
    for make in (
        lambda: ColumnParallelLinear(4, 5, group=group, parts=(3, 2)),
        lambda: RowParallelLinear(2, 4, group=group),
        lambda: VocabParallelEmbedding(2, 4, group=group),
        lambda: FeedForward(4, 2, group=group),
    ):
        with pytest.raises(ValueError, match="3 ranks") as error:
            make()
        messages.append(str(error.value))
    return messages


def test_fewer_rows_than_ranks_are_refused_alike(ranks):
    first, *others = ranks.run(refused, 3)
    assert all(other == first for other in others)
