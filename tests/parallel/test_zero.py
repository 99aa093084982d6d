"""ZeRO stages without the trainer: against one process of plain torch, torch's DDP and FSDP2, and the formulas."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyfast.comm import record
from pyfast.parallel import ParallelConfig, ParallelMesh, ZeroOptimizer, make_buckets

STAGES = (0, 1, 2, 3)
VOCAB, WIDTH, ROWS, STEPS = 13, 7, 16, 5
LOOKED_AT = (0, 3)  # steps whose gradients are compared
CLIP, RATE = 0.05, 0.5
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
# accumulation, clipping, tied
CASES = list(itertools.product((1, 4), (False, True), (False, True)))


class Net(nn.Module):
    """Odd sizes, a frozen layer, a layer used in odd steps only and one only where a row begins with token 0, which not
    every rank and micro-batch has; the head's weight is read, its module never called."""

    def __init__(self, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, 11), nn.GELU(), nn.LayerNorm(11), nn.Linear(11, WIDTH))
        self.odd_steps, self.zeros = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.never = nn.Parameter(torch.ones(3, 5))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 3
                parameter.data = values.to(dtype)

    def forward(self, ids, step):
        x = self.frozen(self.embedding(ids))
        x = x + self.block(x)
        if step % 2:
            x = x + self.odd_steps(x)
        if (ids[:, 0] == 0).any():
            x = x + self.zeros(x) * (ids == 0).unsqueeze(-1)
        return x @ self.head.weight.T


def batch(step: int) -> torch.Tensor:
    ids = torch.randint(1, VOCAB, (ROWS, 4), generator=torch.Generator().manual_seed(step))
    ids[5, 0] = 0
    return ids


def loss_of(model, ids, step):
    return F.cross_entropy(model(ids, step)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum") / (ROWS * 3)


def optimizer_arguments(rule: str) -> dict:
    return {"lr": RATE, "momentum": 0.9} if rule == "sgd" else {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.9)}


def one_process(tied: bool, dtype: torch.dtype, clip: bool, rule: str) -> dict:
    """The same steps with torch's own optimizers; parameters without gradient have a zero one."""
    model = Net(tied, dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() > 1]}, {"params": [p for p in trained if p.dim() == 1]}]
    if rule == "sgd":
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=0.9)
    else:
        groups[1]["weight_decay"] = 0.0
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1, betas=(0.8, 0.9))
    result = {"loss": [], "norm": [], "gradient": []}
    for step in range(STEPS):
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        loss = loss_of(model, batch(step), step)
        loss.backward()
        norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in trained))
        if step in LOOKED_AT:
            result["gradient"].append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
        if clip and norm > CLIP:
            for parameter in trained:
                parameter.grad *= CLIP / norm
        optimizer.step()
        result["loss"].append(loss.item())
        result["norm"].append(norm)
    result["parameters"] = {n: p.detach().clone() for n, p in model.named_parameters()}
    kind = "momentum_buffer" if rule == "sgd" else "exp_avg_sq"
    result["state"] = {n: optimizer.state[p][kind] for n, p in model.named_parameters() if p.requires_grad}
    return result


def steps(rank, world_size, stage, cases, dtype_name, rule, zero_ranks=None):
    config = ParallelConfig(zero=stage, zero_ranks=zero_ranks)
    mesh = ParallelMesh.create(config, rank=rank, world_size=world_size, checked=world_size == 2)
    return [run(mesh, stage, *case, getattr(torch, dtype_name), rule) for case in cases]


def run(mesh, stage, accumulation, clip, tied, dtype, rule):
    model = Net(tied, dtype)
    optimizer = ZeroOptimizer(
        model, mesh, stage=stage, optimizer=rule, bucket_mb=400 / (1 << 20), **optimizer_arguments(rule)
    )
    assert len(optimizer.buckets.buckets) >= 3, "or nothing can go wrong between buckets"
    result = {"loss": [], "norm": [], "gradient": []}
    for step in range(STEPS):
        rows = [part.tensor_split(mesh.size("dp"))[mesh.rank] for part in batch(step).tensor_split(accumulation)]
        total = torch.zeros((), dtype=torch.float64)
        for index, ids in enumerate(rows):
            loss = loss_of(model, ids, step)
            total += loss.detach()
            optimizer.backward(loss, last=index == accumulation - 1)
        mesh.group("dp").all_reduce(total, name="loss")
        result["loss"].append(total.item())
        if step in LOOKED_AT:
            result["gradient"].append(optimizer.gradients())
        result["norm"].append(optimizer.clip_grad_norm(CLIP) if clip else optimizer.grad_norm())
        optimizer.step()
    with optimizer.whole_parameters():
        result["parameters"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    kind = "momentum" if rule == "sgd" else "exp_avg_sq"
    result["state"] = optimizer.state_dict()["state"][kind]
    return result


def assert_same(ours: dict, theirs: dict, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    assert max(theirs["norm"]) > CLIP, "or clipping is not tested"
    for name in ("loss", "norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=tolerance), name
    for what in ("parameters", "state"):
        assert ours[what].keys() == theirs[what].keys()
        for name, value in theirs[what].items():
            torch.testing.assert_close(ours[what][name], value, rtol=tolerance, atol=tolerance, msg=f"{what} {name}")
    for step, gradients in enumerate(theirs["gradient"]):
        assert ours["gradient"][step].keys() == gradients.keys()
        for name, value in gradients.items():
            torch.testing.assert_close(
                ours["gradient"][step][name], value, rtol=tolerance, atol=tolerance, msg=f"step {step}, {name}"
            )


@pytest.mark.parametrize(
    "world_size, dtype", [(1, torch.float64), (2, torch.float64), (4, torch.float64), (2, torch.float32)]
)
@pytest.mark.parametrize("stage", STAGES)
def test_losses_gradients_norms_and_state_equal_one_process(ranks, stage, world_size, dtype):
    name = str(dtype).removeprefix("torch.")
    expected = {(clip, tied): one_process(tied, dtype, clip, "sgd") for _, clip, tied in CASES}
    for answer in ranks.run(steps, world_size, stage, CASES, name, "sgd"):
        for (accumulation, clip, tied), ours in zip(CASES, answer, strict=True):
            try:
                assert_same(ours, expected[clip, tied], dtype)
            except AssertionError as error:
                raise AssertionError(f"accumulation {accumulation}, clip {clip}, tied {tied}: {error}") from error


@pytest.mark.parametrize("stage", STAGES)
def test_adamw_equals_torchs_and_its_state_is_the_same_in_every_stage(ranks, stage):
    """On two ranks with accumulation: the second moments after five steps, too."""
    expected = one_process(True, torch.float64, True, "adamw")
    for (ours,) in ranks.run(steps, 2, stage, [(4, True, True)], "float64", "adamw"):
        assert_same(ours, expected, torch.float64)


@pytest.mark.parametrize("stage", (1, 2, 3))
def test_groups_that_share_out_for_themselves_equal_one_process(ranks, stage):
    """Hybrid sharding, two groups of two ranks."""
    cases = [(1, True, False), (4, False, True)]
    for answers in ranks.run(steps, 4, stage, cases, "float64", "sgd", 2):
        for ours, (_, clip, tied) in zip(answers, cases, strict=True):
            assert_same(ours, one_process(tied, torch.float64, clip, "sgd"), torch.float64)


def divided(rank, world_size):
    """Groups, what a rank keeps, what travels in the second step."""
    config = ParallelConfig(zero=3, zero_ranks=2)
    mesh = ParallelMesh.create(config, rank=rank, world_size=world_size, checked=True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    optimizer = ZeroOptimizer(model, mesh, stage=3)
    for _ in range(2):
        with record() as events:
            optimizer.backward(model(torch.ones(1, 64)).sum())
            optimizer.step()
    kept = optimizer.buckets.buckets[0].data_shard.numel()
    return mesh.group("zero").ranks, mesh.group("zero-across").ranks, kept, [(e.operation, e.bytes) for e in events]


def test_what_groups_keep_and_send(ranks):
    n = 64 * 64
    sent = [("all_gather", 4 * n // 2), ("reduce_scatter", 4 * n), ("all_reduce", 4 * n // 2)]
    inside, across = [(0, 1), (0, 1), (2, 3), (2, 3)], [(0, 2), (1, 3), (0, 2), (1, 3)]
    expected = [(i, a, n // 2, sent) for i, a in zip(inside, across, strict=True)]
    assert ranks.run(divided, 4) == expected


# ---- second oracles --------------------------------------------------------------------------------------------------


def plain(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 3)).double()


def own_rows(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def against_torch(rank, world_size, stage, oracle):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    ours, theirs = plain(), plain()
    optimizer = ZeroOptimizer(ours, mesh, stage=stage, lr=0.05, weight_decay=0.0, bucket_mb=200 / (1 << 20))
    if oracle == "ddp":
        theirs = nn.parallel.DistributedDataParallel(theirs)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        theirs = fully_shard(theirs, mesh=init_device_mesh("cpu", (world_size,)))
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=0.05, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(4):
        x = own_rows(rank, step)
        optimizer.backward((ours(x) ** 2).mean() / world_size)  # theirs average
        optimizer.step()
        their_optimizer.zero_grad()
        (theirs(x) ** 2).mean().backward()
        their_optimizer.step()
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in theirs.parameters()]
    with optimizer.whole_parameters():
        return [(a.detach().clone(), b.detach()) for a, b in zip(ours.parameters(), whole, strict=True)]


@pytest.mark.parametrize("oracle", ["ddp", "fsdp2"])
@pytest.mark.parametrize("stage", STAGES)
def test_trains_like_ddp_and_fsdp2(ranks, stage, oracle):
    start = list(plain().parameters())
    for pairs in ranks.run(against_torch, 2, stage, oracle):
        for (ours, theirs), before in zip(pairs, start, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
            assert (ours - before).abs().max() > 0.01


# ---- what travels, what is kept ----------------------------------------------------------------------------------


def traffic(rank, world_size, stage, micro_batches):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size, checked=True)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    optimizer = ZeroOptimizer(model, mesh, stage=stage, bucket_mb=256 / (1 << 20), decay_all=True)
    sizes = [bucket.numel for bucket in optimizer.buckets.buckets]
    for _ in range(2):  # the second step counts: in the first nothing is gathered before forward
        during = []
        with record() as events:
            for index in range(micro_batches):
                loss = model(torch.ones(2, 8)).sum()
                during.append(len(events))
                optimizer.backward(loss, last=index == micro_batches - 1)
                during.append(len(events))
            optimizer.step()
    optimizer.wait_for_parameters()
    return sizes, during, [(event.operation, event.bytes, event.name) for event in events]


@pytest.mark.parametrize("stage", STAGES)
def test_collectives_and_bytes_of_a_step(ranks, stage):
    """A step of N parameters: an all-reduce of 4 N bytes at stage 0; from 1 a reduce-scatter (in each micro-batch from
    stage 2 on) and an all-gather of this rank's 1/P; all reductions but the last ones start within backward. At stage 3
    each micro-batch gathers every layer in forward and all but the last again in backward, one ahead."""
    micro_batches = 3
    for sizes, during, events in ranks.run(traffic, 2, stage, micro_batches):
        count = len(sizes)
        assert count == 4
        if stage == 3:
            gather, reduce = ("all_gather", 4 * sizes[0] // 2), ("reduce_scatter", 4 * sizes[0])
            backward = [gather, reduce, gather, reduce, gather, reduce, reduce]
            assert len(set(sizes)) == 1 and [event[:2] for event in events] == ([gather] * 4 + backward) * micro_batches
            assert during == [4, 11, 15, 22, 26, 33]
            continue
        reductions = "all_reduce" if stage == 0 else "reduce_scatter"
        rounds = micro_batches if stage == 2 else 1
        expected = [(reductions, 4 * n) for n in sizes] * rounds
        if stage:
            expected += [("all_gather", 4 * n // 2) for n in reversed(sizes)]
        assert [(operation, size) for operation, size, _ in events] == expected
        assert during == ([0, 4, 4, 8, 8, 12] if stage == 2 else [0, 0, 0, 0, 0, 4])
        assert events[0][2].startswith("gradients bucket 0 (3.bias ..")


def memory(rank, world_size, stage, dtype_name):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)]).to(getattr(torch, dtype_name))
    optimizer = ZeroOptimizer(model, mesh, stage=stage, bucket_mb=0.5)
    seen = []

    def held() -> int:
        buckets = optimizer.buckets.buckets
        tensors = [t for b in buckets for t in (b.data, b.main_grad, b.data_shard, b.grad_shard) if t is not None]
        tensors += [t for state in optimizer._rule._state for t in state.values()]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
        return sum(storages.values())

    for layer in model:  # called after the buckets' own hooks
        layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(held()))
        layer.register_forward_pre_hook(lambda *_: seen.append(held()))
    for last in (False, True):
        optimizer.backward(model(torch.ones(2, 256, dtype=getattr(torch, dtype_name))).sum(), last=last)
    optimizer.step()
    optimizer.wait_for_parameters()
    return held(), max(seen), sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype, size, state", [("bfloat16", 2, 12), ("float32", 4, 8)])
def test_memory_of_a_rank_is_the_formula(ranks, dtype, size, state):
    """N parameters on P ranks: N (size + 4 + state) bytes at stage 0; stage 1 divides the state by P, stage 2 the
    gradients too, beside the whole gradients of the buckets that are under way, stage 3 the parameters too, beside
    those of the layer at work and the next one."""
    for world_size in (2, 4):
        for stage in STAGES:
            for held, peak, n in ranks.run(memory, world_size, stage, dtype):
                shared = 1 if stage == 0 else world_size
                formula = n * (
                    size / (shared if stage == 3 else 1) + 4 / (shared if stage >= 2 else 1) + state / shared
                )
                assert held == pytest.approx(formula, rel=0.02), (world_size, stage)
                if stage == 3:
                    layer = 256 * 256
                    assert formula + layer * (2 * size + 4) <= peak <= formula + layer * (2 * size + 3 * 4)
                elif stage == 2:
                    bucket = 2 * 256 * 256 * 4
                    assert formula + bucket <= peak <= formula + 4 * bucket
                else:
                    assert peak == held


# ---- ways to use it ------------------------------------------------------------------------------------------------


def state_travels(rank, world_size, first, second, directory):
    """Three steps under one stage and two under another, by state_dict and by checkpoint, against five under one."""
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    arguments = {"lr": 0.02, "weight_decay": 0.1, "bucket_mb": 200 / (1 << 20)}

    def train(model, optimizer, steps):
        for step in steps:
            optimizer.backward((model(own_rows(rank, step).bfloat16()).float() ** 2).sum())
            optimizer.step()
        optimizer.wait_for_parameters()

    def new(stage, seed):
        model = plain(seed).bfloat16()
        return model, ZeroOptimizer(model, mesh, stage=stage, **arguments)

    whole, optimizer = new(first, 0)
    train(whole, optimizer, range(3))
    optimizer.save(directory, 3, scalars={"note": "three"})
    by_dict, other = new(second, 1)
    with optimizer.whole_parameters():
        values = {name: p.clone() for name, p in whole.state_dict().items()}
    with other.whole_parameters(write=True):
        by_dict.load_state_dict(values)
    other.load_state_dict(optimizer.state_dict())
    by_file, third = new(second, 2)
    note = third.load(directory)
    for model, its in ((whole, optimizer), (by_dict, other), (by_file, third)):
        train(model, its, range(3, 5))
    states = [its.state_dict() for its in (optimizer, other, third)]
    for its in (optimizer, other, third):
        its.close()  # whole parameters at stage 3 too
    return note, [list(m.state_dict().values()) for m in (whole, by_dict, by_file)], states


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0), (2, 1), (0, 2), (3, 0), (1, 3), (3, 3)])
def test_state_goes_from_stage_to_stage(ranks, tmp_path, first, second):
    """bfloat16 parameters with float32 masters, the same bits afterwards."""
    for note, models, states in ranks.run(state_travels, 2, first, second, str(tmp_path)):
        assert note == {"note": "three"}
        for other in models[1:]:
            assert all(torch.equal(a, b) for a, b in zip(models[0], other, strict=True))
        for other in states[1:]:
            assert other["steps"] == 5 and set(other["state"]) == {"exp_avg", "exp_avg_sq", "master"}
            for kind, tensors in states[0]["state"].items():
                assert all(torch.equal(value, other["state"][kind][name]) for name, value in tensors.items()), kind


def discarded(rank, world_size, stage):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size, checked=True)
    model = plain()
    optimizer = ZeroOptimizer(model, mesh, stage=stage, lr=0.1, optimizer="sgd")
    optimizer.backward((model(own_rows(rank, 7)) ** 3).sum(), last=False)
    optimizer.zero_grad()
    optimizer.backward((model(own_rows(rank, 8)) ** 3).sum())
    optimizer.clip_grad_norm(1e-3)
    optimizer.zero_grad()
    optimizer.backward((model(own_rows(rank, 0)) ** 2).sum())
    optimizer.step()
    optimizer.close()
    model(own_rows(rank, 1)).sum().backward()
    return [p.detach() for p in model.parameters()], model[0].weight.grad is not None


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_that_is_given_up_leaves_nothing(ranks, stage):
    model = plain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sum((model(own_rows(rank, 0)) ** 2).sum() for rank in range(2)).backward()
    optimizer.step()
    for parameters, own_gradient in ranks.run(discarded, 2, stage):
        assert own_gradient, "after close the model is torch's again"
        for ours, theirs in zip(parameters, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-12, atol=1e-12)


def waits(rank, world_size):
    """Gathers not yet waited for: after the step, after the first layer's call, after the whole forward."""
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size, checked=True)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    optimizer = ZeroOptimizer(model, mesh, stage=1, bucket_mb=256 / (1 << 20), decay_all=True)
    counts = []
    for _ in range(2):
        loss = model(torch.ones(2, 8)).sum()
        optimizer.backward(loss)
        optimizer.step()
    counts.append(len(optimizer.buckets._gathers))
    x = model[0](torch.ones(2, 8))
    counts.append(len(optimizer.buckets._gathers))
    model[2](x)
    counts.append(len(optimizer.buckets._gathers))
    optimizer.wait_for_parameters()
    counts.append(len(optimizer.buckets._gathers))
    return counts


def test_parameters_are_waited_for_bucket_by_bucket_in_forward(ranks):
    assert ranks.run(waits, 2) == [[4, 3, 1, 0]] * 2


def different_start(rank, world_size):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    try:
        ZeroOptimizer(plain(seed=rank), mesh, stage=1)
    except RuntimeError as error:
        return str(error)


def test_ranks_that_start_from_different_parameters_are_named(ranks):
    answers = ranks.run(different_start, 2)
    assert answers[0] == answers[1] and "'0.weight' over dp group (0, 1): rank(s) [1] differ" in answers[0]


def test_what_is_not_allowed_is_named():
    mesh, model = ParallelMesh.single(), plain()
    with pytest.raises(ValueError, match="stage: is 4, must be 0, 1, 2 or 3"):
        make_buckets(model, mesh, stage=4)
    with pytest.raises(ValueError, match=r"optimizer\.name = 'adam'"):
        ZeroOptimizer(model, mesh, stage=1, optimizer="adam")
    optimizer = ZeroOptimizer(model, mesh, stage=1)
    with pytest.raises(RuntimeError, match="last=True"):
        optimizer.step()
    with pytest.raises(ValueError, match="state_dict: lacks .*exp_avg"):
        optimizer.load_state_dict({"steps": 1, "state": {}})
