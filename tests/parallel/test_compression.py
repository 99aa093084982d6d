"""Compressed gradient sums: what arrives, what stays behind, how many bytes travel, and that training converges."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pyfast.comm import record
from pyfast.parallel import ParallelConfig, ParallelMesh, ZeroOptimizer, check_replicas, make_buckets
from pyfast.parallel.compression import _BFloat16, _Float16, _OneBit

STAGES = (0, 1, 2, 3)


class Odd(nn.Module):
    """Sizes that leave gaps between parameters, one longer than the blocks of one_bit, and a frozen one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (37, 2500))
        self.frozen = nn.Parameter(torch.zeros(5, dtype=dtype), requires_grad=False)
        self.third = nn.Parameter(torch.zeros(3, 7, dtype=dtype))


def gradient(rank: int, step: int, name: str, like: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + 10 * step + len(name))
    return torch.randn(like.shape, generator=generator) * 10.0 ** (step % 3 - 6)


def sums(mesh: ParallelMesh, stage: int, compression: str, steps: int):
    """What each step's reduction gave, by parameter; residuals; values between parameters; bytes sent; sizes."""
    model, found = Odd(), []
    buckets = make_buckets(model, mesh, stage=stage, bucket_bytes=9000, compression=compression)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    with record() as events:
        for step in range(steps):
            buckets.start_micro_batch(last=True)
            sum((p * gradient(mesh.rank, step, name, p)).sum() for name, p in trained).backward()
            buckets.end_micro_batch()
            buckets.finish()
            found.append({name: buckets.gather(name, part).clone() for name, part in buckets.gradient_parts().items()})
    gaps = 0
    for bucket in buckets.buckets:
        for slot in bucket.slots:
            mine = bucket.mine(slot)
            bucket.grad_shard[mine.start - bucket.shard.start : mine.stop - bucket.shard.start] = 0
        gaps += int(bucket.grad_shard.count_nonzero())
    sent = sum(e.bytes for e in events if "gradients" in e.name)
    return found, buckets.residuals(), gaps, sent, [bucket.numel for bucket in buckets.buckets]


def on_ranks(rank, world_size, stage, compression, steps):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size, checked=world_size == 2)
    return sums(mesh, stage, compression, steps)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("compression", ["bf16", "fp16"])
def test_half_precision_sums_are_those_of_the_rounded_gradients(ranks, stage, compression, world_size):
    """bfloat16: to the bit. float16 has a power of two a message, here recovered from what it must achieve."""
    answers = ranks.run(on_ranks, world_size, stage, compression, 3)
    model = Odd()
    for step in range(3):
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            exact = [gradient(rank, step, name, p) for rank in range(world_size)]
            expected = exact[0].to(torch.bfloat16).float() if compression == "bf16" else exact[0].clone()
            for other in exact[1:]:
                expected += other.to(torch.bfloat16).float() if compression == "bf16" else other
            if compression == "bf16" and stage == 0:
                expected = expected.bfloat16().float()
            for found, residuals, *_ in answers:
                assert torch.equal(found[step][name], answers[0][0][step][name]) and not residuals
                if compression == "bf16":
                    assert torch.equal(found[step][name], expected), name
                else:
                    scale = torch.stack(exact).abs().amax(0).mul(world_size)
                    assert ((found[step][name] - expected).abs() <= 2**-10 * scale + 1e-12).all()
    for _, _, gaps, sent, sizes in answers:
        assert gaps == 0
        message = 2 * sum(sizes) + (4 * world_size * len(sizes) if compression == "fp16" else 0)
        again = (2 * sum(sizes) // world_size + 4 * len(sizes) * (compression == "fp16")) * (stage == 0)
        assert sent == 3 * (message + again)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("stage", STAGES)
def test_one_bit_loses_nothing_over_the_steps(ranks, stage, world_size):
    """What has arrived and what the ranks still keep add up to the gradients of all steps."""
    steps = 5
    answers = ranks.run(on_ranks, world_size, stage, "one_bit", steps)
    for name, p in Odd().named_parameters():
        if not p.requires_grad:
            continue
        exact = sum(gradient(rank, step, name, p).double() for rank in range(world_size) for step in range(steps))
        arrived = sum(answers[0][0][step][name].double() for step in range(steps))
        kept = sum(answers[rank][1][f"residual_{rank}"][name].double() for rank in range(world_size))
        torch.testing.assert_close(arrived + kept, exact, rtol=1e-5, atol=1e-9)
        assert (kept.abs().max() > 1e-6).item(), "or there is nothing to feed back"
        for found, *_ in answers:
            assert all(torch.equal(found[step][name], answers[0][0][step][name]) for step in range(steps))
    for _, _, gaps, sent, sizes in answers:
        assert gaps == 0
        assert sent < steps * 4 * sum(sizes) / 25


def test_codecs_round_as_they_say():
    x = torch.randn(3, 2064) * torch.tensor([[1e-30], [1.0], [1e30]])
    x[:, :5] = 0.0
    for codec, digits in ((_BFloat16(), 8), (_Float16(), 11)):
        messages = codec.encode(x)
        assert messages.dtype == torch.uint8 and messages.shape[0] == 3
        for row, message in zip(x, messages, strict=True):
            back = codec.decode(message, row.numel())
            # float16's scale lifts the largest value to 2^14: what is 2^-24 of it still has all digits
            assert ((back - row).abs() <= 2.0**-digits * row.abs() + 2.0**-38 * row.abs().max()).all()
    message = _OneBit().encode(x)[1]
    back = _OneBit().decode(message, 2064)
    assert torch.equal(back >= 0, x[1] >= 0)
    for block in (slice(0, 256), slice(256, 512), slice(2048, 2064)):
        torch.testing.assert_close(back[block].abs(), x[1, block].abs().mean().expand(block.stop - block.start))
    assert message.numel() == 9 * 4 + 260  # 2064 bits in whole words


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", [_BFloat16(), _Float16(), _OneBit()], ids=lambda c: type(c).__name__)
def test_what_is_not_finite_arrives_as_such(codec, bad):
    x = torch.randn(1, 1040)
    x[0, 7] = bad
    assert not codec.decode(codec.encode(x)[0], 1040)[7].isfinite()


def skipped_step(rank, world_size):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    model = Odd()
    buckets = make_buckets(model, mesh, stage=1, compression="one_bit")
    norms = []
    for factor in (1.0, float("inf") if rank else 1.0, 1.0):
        buckets.start_micro_batch(last=True)
        (model.second.sum() * factor + (model.third * torch.arange(21.0).view(3, 7)).sum()).backward()
        buckets.end_micro_batch()
        buckets.finish()
        norms.append(buckets.grad_norm())
    return norms, [p for names in buckets.residuals().values() for p in names.values()]


def test_a_step_that_overflowed_leaves_nothing_behind(ranks):
    for norms, residuals in ranks.run(skipped_step, 2):
        assert norms[0] > 0 and not torch.tensor(norms[1]).isfinite() and torch.tensor(norms[2]).isfinite()
        assert all(p.isfinite().all() for p in residuals)


# ---- convergence ----------------------------------------------------------------------------------------------------


def regression(rank, world_size, stage, compression, rule, steps=300):
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    y = torch.tanh(x @ torch.randn(16, 24, generator=generator) / 4) @ torch.randn(24, 4, generator=generator) / 4
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 4))
    arguments = {"lr": 0.2, "momentum": 0.9} if rule == "sgd" else {"lr": 0.01, "betas": (0.9, 0.99)}
    optimizer = ZeroOptimizer(
        model, mesh, stage=stage, optimizer=rule, compression=compression, bucket_mb=2000 / (1 << 20), **arguments
    )
    mine = slice(rank * 256 // world_size, (rank + 1) * 256 // world_size)
    losses = []
    for step in range(steps):
        optimizer.lr = arguments["lr"] * (1 - step / steps)
        loss = (model(x[mine]) - y[mine]).square().sum() / (256 * 4)
        optimizer.backward(loss)
        optimizer.step()
        total = loss.detach().clone()
        mesh.group("dp").all_reduce(total, name="loss")
        losses.append(total.item())
    optimizer.wait_for_parameters()
    check_replicas(model.named_parameters(), mesh)
    return losses


@pytest.mark.parametrize("rule", ["sgd", "adamw"])
def test_training_converges(ranks, rule):
    """Half precision as well as float32 in as many steps, one_bit in twice as many, in every stage."""
    exact = ranks.run(regression, 2, 1, "none", rule)[0]
    assert exact[-1] < exact[0] / 50, "or nothing was learnt"
    for stage in STAGES:
        for compression in ("bf16", "fp16"):
            assert ranks.run(regression, 2, stage, compression, rule)[0][-1] < 1.02 * exact[-1], (stage, compression)
        assert ranks.run(regression, 2, stage, "one_bit", rule, 600)[0][-1] < exact[-1], (stage, "one_bit")


# ---- checkpoints, settings ------------------------------------------------------------------------------------------


def interrupted(rank, world_size, stage, directory, stop):
    """Six steps, interrupted after `stop` by a checkpoint and a new start."""
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)

    def start():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
        return model, ZeroOptimizer(model, mesh, stage=stage, lr=0.05, compression="one_bit")

    model, optimizer = start()
    for step in range(6):
        x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.backward(model(x).square().mean() / world_size)
        optimizer.step()
        if step + 1 == stop:
            optimizer.save(directory, step=stop)
            model, optimizer = start()
            optimizer.load(directory)
    optimizer.wait_for_parameters()
    parts = {**dict(model.named_parameters()), **optimizer.buckets.parameter_parts()}
    parameters = [optimizer.buckets.gather(name, part).detach() for name, part in parts.items()]
    return parameters, optimizer.buckets.residuals()


@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_has_the_same_bits_residuals_included(ranks, tmp_path, stage):
    whole = ranks.run(interrupted, 2, stage, str(tmp_path / "a"), None)
    resumed = ranks.run(interrupted, 2, stage, str(tmp_path / "b"), 3)
    for (a, residual_a), (b, residual_b) in zip(whole, resumed, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(a, b, strict=True))
        assert residual_a.keys() == residual_b.keys() and len(residual_a) == 1
        for kind, names in residual_a.items():
            assert all(torch.equal(value, residual_b[kind][name]) for name, value in names.items())
            assert any(value.abs().max() > 0 for value in names.values())


def test_another_number_of_ranks_reads_the_checkpoint_without_its_residuals(ranks, tmp_path):
    ranks.run(interrupted, 2, 1, str(tmp_path), 3)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3))
    before = [p.detach().clone() for p in model.parameters()]
    for compression in ("none", "one_bit"):
        optimizer = ZeroOptimizer(model, ParallelMesh.single(), stage=0, compression=compression)
        optimizer.load(str(tmp_path))
        assert optimizer.steps == 3
        assert not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_wrong_settings_are_refused():
    single, model = ParallelMesh.single(), Odd()
    with pytest.raises(ValueError, match="compression: is '2bit', must be one of none, bf16, fp16, one_bit"):
        make_buckets(model, single, stage=0, compression="2bit")
    with pytest.raises(ValueError, match="compression: the gradients of third .. are torch.float64"):
        make_buckets(Odd(torch.float64), single, stage=0, compression="bf16")
    with pytest.raises(ValueError, match="parallel.compression: is 'gzip'"):
        ParallelConfig(compression="gzip")
