"""Flat buckets against one process on the whole batch, and against torch's DistributedDataParallel."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pyfast.comm import record
from pyfast.nn.layout import Layout, Shard, get_layout, set_layout
from pyfast.ops.collective import copy_to_group, reduce_from_group
from pyfast.parallel import FlatBuckets, ParallelConfig, ParallelMesh, check_replicas, clip_coefficient

WIDTH, HIDDEN, VOCAB = 6, 7, 11
VALID = 16 * 3 - 7  # labels of `batches` that are not ignored


class Model(nn.Module):
    """Tied embedding, a replicated scale, a tensor-parallel block of three stacked matrices, and a parameter unused.

    `inner` holds (in, gate, out^T), cut over HIDDEN; `hidden_scale` is replicated over tp but sees a part of HIDDEN
    only, like a QK norm: its gradient is partial.
    """

    def __init__(self, mesh: ParallelMesh, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.mesh = mesh
        shard = Layout((3, HIDDEN, WIDTH), (Shard("tp", 1, (HIDDEN,)),))
        layouts = {
            "embedding": Layout((VOCAB, WIDTH)),
            "scale": Layout((WIDTH,)),
            "inner": shard,
            "hidden_scale": Layout((1,), partial=("tp",)),
            "unused": Layout((5,)),
        }
        for name, layout in layouts.items():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            full = torch.randn(layout.shape, generator=generator, dtype=torch.float64).to(dtype)
            parameter = nn.Parameter(layout.shard(full, mesh))
            set_layout(parameter, layout)
            setattr(self, name, parameter)
        self.head = self.embedding  # tied

    def forward(self, ids):
        tp = self.mesh.group("tp")
        x = copy_to_group(self.embedding[ids] * self.scale, tp, "block")
        first, gate, last = self.inner
        hidden = torch.tanh(x @ first.T) * (x @ gate.T) * self.hidden_scale
        return reduce_from_group(hidden @ last, tp, "block out") @ self.head.T


def batches(micro_batches: int, dp: int) -> list[list[tuple[torch.Tensor, torch.Tensor]]]:
    """[micro-batch][dp rank] -> (ids, labels): always the same 16 rows, some labels ignored, rank 0's first all so."""
    generator = torch.Generator().manual_seed(5)
    ids, labels = (torch.randint(0, VOCAB, (16, 3), generator=generator) for _ in range(2))
    labels[:2] = -100
    labels[9, 1] = -100
    rows = []
    for some_ids, some_labels in zip(ids.tensor_split(micro_batches), labels.tensor_split(micro_batches), strict=True):
        rows.append(list(zip(some_ids.tensor_split(dp), some_labels.tensor_split(dp), strict=True)))
    return rows


def loss_of(model, ids, labels, valid_tokens):
    logits = model(ids)
    return F.cross_entropy(logits.flatten(0, 1).double(), labels.flatten(), reduction="sum") / valid_tokens


def reference() -> dict[str, torch.Tensor]:
    model = Model(ParallelMesh.single())
    ((ids, labels),) = batches(1, 1)[0]
    loss_of(model, ids, labels, (labels != -100).sum()).backward()
    model.unused.grad = torch.zeros_like(model.unused)
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def step(rank, world_size, tp, micro_batches, bucket_bytes):
    mesh = ParallelMesh.create(ParallelConfig(tensor=tp), rank=rank, world_size=world_size, checked=True)
    model = Model(mesh)
    buckets = FlatBuckets(model.named_parameters(), mesh, bucket_bytes=bucket_bytes)
    grads = []
    for _ in range(2):  # the second step must not see the first one's gradients
        for index, row in enumerate(batches(micro_batches, mesh.size("dp"))):
            buckets.start_micro_batch(last=index == micro_batches - 1)
            ids, labels = row[mesh.coordinate("dp")]
            loss_of(model, ids, labels, VALID).backward()
            assert all(parameter.grad is None for parameter in model.parameters())
        buckets.finish()
        grads.append({n: get_layout(p).unshard(buckets.main_grad(p), mesh) for n, p in model.named_parameters()})
    check_replicas(model.named_parameters(), mesh)
    check_replicas([(n, with_layout(buckets.main_grad(p), p)) for n, p in model.named_parameters()], mesh)
    return grads, buckets.grad_norm(), len(buckets.buckets)


def with_layout(tensor, parameter):
    tensor = tensor.clone()
    set_layout(tensor, get_layout(parameter))
    return tensor


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
@pytest.mark.parametrize(
    ("world_size", "tp", "micro_batches"), [(1, 1, 4), (2, 1, 1), (2, 2, 2), (4, 1, 2), (4, 2, 4), (3, 3, 1)]
)
def test_gradients_equal_one_process(ranks, world_size, tp, micro_batches, bucket_bytes):
    expected = reference()
    norm = math.sqrt(sum((grad**2).sum().item() for grad in expected.values()))
    for grads, our_norm, count in ranks.run(step, world_size, tp, micro_batches, bucket_bytes):
        for ours in grads:
            assert ours.keys() == expected.keys()
            for name, grad in expected.items():
                torch.testing.assert_close(ours[name], grad, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        assert our_norm == pytest.approx(norm, rel=1e-12)
        assert count == 5 if bucket_bytes == 1 else count <= 3


def norm_of_ones(rank, world_size, tp, bucket_bytes):
    mesh = ParallelMesh.create(ParallelConfig(tensor=tp), rank=rank, world_size=world_size, checked=True)
    model = Model(mesh)
    buckets = FlatBuckets(model.named_parameters(), mesh, bucket_bytes=bucket_bytes)
    for parameter in model.parameters():
        buckets.main_grad(parameter).fill_(1.0)
    return buckets.grad_norm()


@pytest.mark.parametrize(("world_size", "tp"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_norm_of_ones_is_the_root_of_the_parameter_count(ranks, world_size, tp):
    parameters = VOCAB * WIDTH + WIDTH + 3 * HIDDEN * WIDTH + 1 + 5
    for bucket_bytes in (1, 1 << 20):
        norms = ranks.run(norm_of_ones, world_size, tp, bucket_bytes)
        assert norms == [norms[0]] * world_size and norms[0] == pytest.approx(math.sqrt(parameters), rel=1e-14)


def traffic(rank, world_size, micro_batches):
    mesh = ParallelMesh.create(ParallelConfig(data=world_size), rank=rank, world_size=world_size, checked=True)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    buckets = FlatBuckets(model.named_parameters(), mesh, bucket_bytes=8 * 8 * 4)
    during_backward = []
    with record() as events:
        for index in range(micro_batches):
            buckets.start_micro_batch(last=index == micro_batches - 1)
            model(torch.ones(2, 8)).sum().backward()
            during_backward.append(len(events))
        buckets.finish()
    return during_backward, [(e.operation, e.name, e.bytes) for e in events], [b.names for b in buckets.buckets]


def test_one_all_reduce_a_bucket_started_during_the_last_backward(ranks):
    for during_backward, events, names in ranks.run(traffic, 2, 3):
        assert names[0] == ["3.bias", "3.weight"] and len(names) == 4
        assert during_backward == [0, 0, 4], "nothing is sent before the last micro-batch, everything within it"
        assert [(operation, name) for operation, name, _ in events] == [
            ("all_reduce", f"gradients bucket {i} ({bucket[0]} ..)") for i, bucket in enumerate(names)
        ]
        assert all(size >= (8 * 8 + 8) * 4 for _, _, size in events)


def against_ddp(rank, world_size):
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 3)).double()
    theirs = nn.Sequential(nn.Linear(5, 9), nn.GELU(), nn.LayerNorm(9), nn.Linear(9, 3)).double()
    theirs.load_state_dict(ours.state_dict())
    ddp = nn.parallel.DistributedDataParallel(theirs)
    mesh = ParallelMesh.create(ParallelConfig(), rank=rank, world_size=world_size)
    buckets = FlatBuckets(ours.named_parameters(), mesh)
    x = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    buckets.start_micro_batch(last=True)
    (ours(x) ** 2).sum().backward()
    buckets.finish()
    (ddp(x) ** 2).sum().backward()
    return [
        (buckets.main_grad(a), b.grad * world_size) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    ]


@pytest.mark.parametrize("world_size", [2, 4])
def test_sums_equal_ddp(ranks, world_size):
    """DDP averages; ours is a sum."""
    for pairs in ranks.run(against_ddp, world_size):
        for ours, theirs in pairs:
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_parameters_are_views_and_gradients_wide(dtype):
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).to(dtype)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    buckets = FlatBuckets(model.named_parameters(), ParallelMesh.single(), group_of=lambda n, p: p.dim() > 1)
    assert sorted(bucket.key for bucket in buckets.buckets) == [False, True]
    for bucket in buckets.buckets:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert (bucket.data.dtype, bucket.main_grad.dtype) == (dtype, wide)
        assert bucket.data.numel() == bucket.main_grad.numel() and bucket.data.numel() % 16 == 0
        for name, parameter, offset in zip(bucket.names, bucket.parameters, bucket.offsets, strict=True):
            assert torch.equal(parameter, before[name])
            assert parameter.data_ptr() == bucket.data[offset:].data_ptr()
        used = sum(parameter.numel() for parameter in bucket.parameters)
        assert bucket.data.count_nonzero() <= used, "gaps must be zero"
    # accumulated in float32: 300 times 1 + 2^-9 in bfloat16 would stop growing at 256
    weight = model[1].bias
    for index in range(300):
        buckets.start_micro_batch(last=index == 299)
        (weight * 1.0).sum().backward()
    buckets.finish()
    assert torch.equal(buckets.main_grad(weight), torch.full((3,), 300.0, dtype=wide))
    assert all(buckets.main_grad(p).count_nonzero() == 0 for p in model.parameters() if p is not weight)


def test_one_bucket_is_one_optimizer_call():
    """SGD over the flat buffers moves every parameter as torch's optimizer does."""
    torch.manual_seed(0)
    ours, theirs = (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double() for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    buckets = FlatBuckets(ours.named_parameters(), ParallelMesh.single())
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    x = torch.randn(4, 5, dtype=torch.float64)
    for _ in range(3):
        buckets.start_micro_batch(last=True)
        (ours(x) ** 2).sum().backward()
        buckets.finish()
        for bucket in buckets.buckets:
            bucket.data.add_(bucket.main_grad, alpha=-0.1)
        optimizer.zero_grad()
        (theirs(x) ** 2).sum().backward()
        optimizer.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_wrong_order_of_calls_is_named():
    model = nn.Linear(2, 2)
    buckets = FlatBuckets(model.named_parameters(), ParallelMesh.single())
    with pytest.raises(RuntimeError, match="'(weight|bias)': came outside a step; call start_micro_batch"):
        model(torch.ones(2)).sum().backward()
    with pytest.raises(RuntimeError, match="last=True"):
        buckets.finish()
    buckets.start_micro_batch(last=True)
    model(torch.ones(2)).sum().backward()
    with pytest.raises(RuntimeError, match="came a second time"):
        model(torch.ones(2)).sum().backward()
    with pytest.raises(RuntimeError, match="call finish"):
        buckets.start_micro_batch(last=False)
    buckets.finish()
    buckets.close()
    model(torch.ones(2)).sum().backward()
    assert model.weight.grad is not None


def test_clip_coefficient():
    assert clip_coefficient(4.0, 1.0) == 0.25 and clip_coefficient(0.5, 1.0) == 1.0
    with pytest.raises(ValueError, match="max_norm: is 0"):
        clip_coefficient(1.0, 0.0)


def replicas(rank, world_size, spoil):
    mesh = ParallelMesh.create(ParallelConfig(tensor=2), rank=rank, world_size=world_size)
    model = Model(mesh, torch.float32)
    with torch.no_grad():
        if spoil == "zero sign" and rank == 3:
            model.unused[0] = 0.0 * (-1.0)
        elif spoil == "zero sign":
            model.unused[0] = 0.0
        elif spoil == "shard" and rank == 3:
            model.inner[0, 0, 0] += 1
    try:
        check_replicas(model.named_parameters(), mesh)
    except RuntimeError as error:
        return str(error)
    return "equal"


@pytest.mark.parametrize(
    ("spoil", "parts"),
    [
        (None, None),
        ("zero sign", ["'unused' over tp group (2, 3): rank(s) [3] differ", "over dp group (1, 3): rank(s) [3]"]),
        ("shard", ["'inner' over dp group (1, 3): rank(s) [3] differ from rank 1"]),
    ],
)
def test_check_replicas_names_what_differs(ranks, spoil, parts):
    answers = ranks.run(replicas, 4, spoil)
    assert answers == [answers[0]] * 4, "every rank must say the same"
    assert answers[0] == "equal" if parts is None else all(part in answers[0] for part in parts), answers[0]
