"""ops.linear_cross_entropy against torch's cross entropy of dense float64 logits, on one rank and over a group."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from pyfast import kernels, ops
from pyfast.kernels import cpu, plain
from pyfast.ops import vocabulary

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-300)).item()


def oracle(h, w, target, *, ignore_index=-100, softcap=0.0, z_loss=0.0, reduction="sum"):
    """The same in dense float64 with torch's cross entropy."""
    logits = F.linear(h.double(), w.double()).flatten(0, -2)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    target = target.flatten()
    valid = target != ignore_index
    losses = F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")
    losses = losses + torch.where(valid, z_loss * torch.logsumexp(logits, -1).square(), 0.0)
    if reduction == "none":
        return losses.view(h.shape[:-1])
    return losses.sum() / valid.sum().clamp(min=1) if reduction == "mean" else losses.sum()


def problem(shape, width, vocab, dtype=torch.float32, ignored=0.2):
    torch.manual_seed(0)
    h = torch.randn(*shape, width, dtype=dtype, requires_grad=True)
    w = torch.randn(vocab, width, dtype=dtype).mul_(2 / width**0.5).requires_grad_()
    target = torch.randint(0, vocab, shape)
    target[torch.rand(shape) < ignored] = -100
    return h, w, target


def both(h, w, target, upstream=None, **options):
    """((loss, dh, dw) of the op, the same of the oracle)."""
    results = []
    for function, x, y in ((ops.linear_cross_entropy, h, w), (oracle, h.double(), w.double())):
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        loss = function(x, y, target, **options)
        scale = torch.tensor(1.0) if upstream is None else upstream
        (loss * scale).sum().backward()
        results.append((loss.detach(), x.grad, y.grad))
    return results


def check(h, w, target, **options):
    actual, expected = both(h, w, target, **options)
    assert actual[0].dtype == (torch.float64 if h.dtype == torch.float64 else torch.float32)
    assert actual[1].dtype == h.dtype and actual[2].dtype == w.dtype
    exact = TOLERANCE[torch.float64 if h.dtype == torch.float64 else torch.float32]
    assert relative_error(actual[0], expected[0]) < exact  # the loss is never rounded to bf16 or f16
    assert relative_error(actual[1], expected[1]) < TOLERANCE[h.dtype]
    assert relative_error(actual[2], expected[2]) < TOLERANCE[h.dtype]


@pytest.fixture
def small_chunks(monkeypatch):
    """Many chunks, the last one ragged, at test sizes."""
    monkeypatch.setattr(vocabulary, "WORKSPACE_BYTES", 1)
    monkeypatch.setattr(vocabulary, "MIN_ROWS", 7)


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}, {"z_loss": 0.03}, {"softcap": 5.0, "z_loss": 0.03}], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_equals_torch_in_float64(dtype, reduction, options, small_chunks):
    h, w, target = problem((3, 17), 37, 101, dtype)
    check(h, w, target, reduction=reduction, **options)


@pytest.mark.parametrize("shape, width, vocab", [((1,), 1, 1), ((2,), 3, 2), ((97,), 64, 50257), ((300,), 20, 1009)])
def test_sizes_that_nothing_divides(shape, width, vocab):
    check(*problem(shape, width, vocab, ignored=0.0))


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_upstream_gradient_scales_each_gradient(reduction, small_chunks):
    h, w, target = problem((40,), 12, 33)
    upstream = torch.randn(40) if reduction == "none" else torch.tensor(-0.37)
    actual, expected = both(h, w, target, upstream=upstream, reduction=reduction, z_loss=0.01)
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 2e-6


@pytest.mark.parametrize("reduction", ["sum", "mean", "none"])
def test_every_token_ignored(reduction):
    h, w, target = problem((5,), 8, 11, ignored=2.0)
    loss = ops.linear_cross_entropy(h, w, target, reduction=reduction, z_loss=0.1)
    loss.sum().backward()
    assert torch.equal(loss, torch.zeros_like(loss))
    assert torch.equal(h.grad, torch.zeros_like(h)) and torch.equal(w.grad, torch.zeros_like(w))


def test_no_tokens():
    h, w = torch.randn(0, 8, requires_grad=True), torch.randn(11, 8, requires_grad=True)
    ops.linear_cross_entropy(h, w, torch.empty(0, dtype=torch.int64)).backward()
    assert h.grad.shape == (0, 8) and torch.equal(w.grad, torch.zeros(11, 8))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_what_ignored_rows_hold_does_not_matter(reduction):
    h, w, target = problem((60,), 16, 50)
    poisoned = h.detach().clone()
    poisoned[target == -100] = torch.tensor([float("nan"), float("inf")] * 8)
    results = []
    for x in (h, poisoned.requires_grad_()):
        w.grad = x.grad = None
        loss = ops.linear_cross_entropy(x, w, target, reduction=reduction)
        loss.sum().backward()
        results.append((loss.detach(), x.grad, w.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch.equal(results[0][1][target == -100], torch.zeros(int((target == -100).sum()), 16))


@pytest.mark.parametrize("size", [30.0, 1e4])
def test_large_logits_stay_finite(size):
    h, w, target = problem((20,), 16, 50)
    for softcap in (0.0, 30.0):
        actual, expected = both(h.detach() * size, w, target, softcap=softcap)
        assert all(torch.isfinite(a).all() for a in actual)
        assert relative_error(actual[0], expected[0]) < 1e-5


def test_another_ignore_index_and_ids_at_both_ends():
    h, w, _ = problem((4,), 6, 10)
    check(h, w, torch.tensor([0, 9, 3, 0]), ignore_index=3)


def test_strided_arguments():
    wide_h, wide_w = torch.randn(6, 5, 3, 24), torch.randn(24, 77)
    check(wide_h[:, 1:4, 1, ::2], wide_w[::2].t(), torch.randint(0, 77, (6, 3)))


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_gradcheck_runs_the_real_kernel(reduction, softcap, small_chunks):
    h, w, target = problem((9,), 5, 13, torch.float64)
    torch.autograd.gradcheck(
        lambda x, y: ops.linear_cross_entropy(x, y, target, softcap=softcap, z_loss=0.05, reduction=reduction), (h, w)
    )


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_same_bits_for_any_number_of_threads(reduction):
    h, w, target = problem((301,), 96, 3000)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        h.grad = w.grad = None
        loss = ops.linear_cross_entropy(h, w, target, reduction=reduction)
        loss.sum().backward()
        results.append((loss.detach(), h.grad, w.grad))
    torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


@pytest.mark.parametrize("need_dh, need_dw", [(True, False), (False, True), (False, False)])
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_gradient_nobody_wants_costs_no_gemm(need_dh, need_dw, reduction, monkeypatch):
    h, w, target = problem((20,), 8, 30)
    h, w = h.detach().requires_grad_(need_dh), w.detach().requires_grad_(need_dw)
    calls, gemm = [], cpu.gemm
    monkeypatch.setattr(cpu, "gemm", lambda *args, **kwargs: calls.append(args) or gemm(*args, **kwargs))
    loss = ops.linear_cross_entropy(h, w, target, reduction=reduction).sum()
    if not (need_dh or need_dw):
        assert len(calls) == 1
        return
    loss.backward()
    assert (h.grad is not None, w.grad is not None) == (need_dh, need_dw)
    # "sum": logits and one gradient; "none": logits once more in backward.
    assert len(calls) == (2 if reduction == "sum" else 3)


def test_no_logits_are_stored_in_full(small_chunks):
    h, w, target = problem((500,), 8, 400, ignored=0.0)
    largest = [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple) else [result]:
                if isinstance(tensor, torch.Tensor):
                    largest[0] = max(largest[0], tensor.numel())
            return result

    with Watch():
        torch.ops.pyfast.linear_cross_entropy(h, w, target, -100, 0.0, 0.0, True, True, None, "", "loss")
    assert 0 < largest[0] <= 500 * 8  # h itself; the logits would be 200000


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_opcheck_and_fullgraph_compile(reduction):
    h, w, target = problem((4, 6), 16, 30)
    if reduction == "sum":
        arguments = (h, w, target, -100, 0.0, 0.01, True, True, None, "", "loss")
        torch.library.opcheck(torch.ops.pyfast.linear_cross_entropy.default, arguments)
    else:
        arguments = (h, w, target, -100, 2.0, 0.01, None, "", "loss")
        torch.library.opcheck(torch.ops.pyfast.linear_cross_entropy_tokens.default, arguments)

    def loss(x, y):
        return ops.linear_cross_entropy(x.sin(), y, target, reduction=reduction, z_loss=0.1).square().sum()

    torch.compile(loss, fullgraph=True, backend="aot_eager")(h, w).backward()
    compiled = h.grad.clone(), w.grad.clone()
    h.grad = w.grad = None
    loss(h, w).backward()
    torch.testing.assert_close(compiled, (h.grad, w.grad))


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "z_loss": 0.02}], ids=str)
@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_plain_form_agrees(reduction, options, monkeypatch, small_chunks):
    h, w, target = problem((40,), 12, 33)
    expected, _ = both(h, w, target, reduction=reduction, **options)
    monkeypatch.setattr(kernels, "for_device", lambda device: plain)
    actual, _ = both(h, w, target, reduction=reduction, **options)
    for a, b in zip(actual, expected, strict=True):
        assert relative_error(a, b) < 1e-5


def test_no_width_is_a_uniform_vocabulary():
    loss = ops.linear_cross_entropy(torch.ones(2, 0), torch.ones(5, 0), torch.tensor([0, 4]))
    assert abs(loss.item() - 2 * math.log(5)) < 1e-6


@pytest.mark.parametrize("bad, where", [(50, 3), (-1, 0), (-100, 2), (10**12, 5)])
def test_targets_outside_the_vocabulary_are_named(bad, where):
    h, w, target = problem((6,), 8, 50, ignored=0.0)
    target[where] = bad
    with pytest.raises(ValueError, match=f"target holds {bad}; allowed are 0 to 49"):
        ops.linear_cross_entropy(h, w, target, ignore_index=-7)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"h": torch.ones(3, 4, dtype=torch.int32)}, TypeError, "h has dtype"),
        ({"w": torch.ones(9, 4).double()}, TypeError, "w has dtype"),
        ({"w": torch.ones(9, 5)}, ValueError, "w has shape"),
        ({"target": torch.zeros(3)}, TypeError, "target is torch.float32"),
        ({"target": torch.zeros(2, dtype=torch.int64)}, ValueError, "target has shape"),
        ({"reduction": "average"}, ValueError, "reduction is 'average'"),
        ({"softcap": "big"}, TypeError, "softcap is 'big'"),
        ({"ignore_index": 1.5}, TypeError, "ignore_index is 1.5"),
        ({"softcap": -1.0}, ValueError, "softcap is -1"),
        ({"z_loss": float("nan")}, ValueError, "z_loss is nan"),
        ({"vocab": 10}, ValueError, "vocab is 10"),
        ({"group": "tp"}, TypeError, "group"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_arguments_are_named(change, error, words):
    arguments = {"h": torch.ones(3, 4), "w": torch.ones(9, 4), "target": torch.zeros(3, dtype=torch.int64)} | change
    with pytest.raises(error, match=words):
        ops.linear_cross_entropy(**arguments)


# ---- over a group ---------------------------------------------------------------------------------------------------


def on_a_shard(rank, world_size, h, w, target, options, frozen=(), compiled=False):
    """One rank's (loss, dh, dw, collectives) with its rows of w."""
    import torch

    from pyfast import comm, ops

    torch._dynamo.reset()
    group = comm.Group.create("tp", range(world_size), rank=rank, checked=True)
    h = h.clone().requires_grad_("h" not in frozen)
    w = torch.tensor_split(w, world_size)[rank].clone().requires_grad_("w" not in frozen)

    def function(x, y):
        loss = ops.linear_cross_entropy(x, y, target, group=group, name="head loss", **options)
        return loss * torch.linspace(0.5, 1.5, loss.numel()) if loss.dim() else loss * 0.25

    if compiled:
        function = torch.compile(function, fullgraph=True, backend="aot_eager")
    with comm.record() as events:
        loss = function(h, w)
        loss.sum().backward()
    return loss.detach(), h.grad, w.grad, [(event.operation, event.name, event.shape) for event in events]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "world_size, vocab, options",
    [
        (2, 50257, {"vocab": 50257}),
        (2, 101, {"softcap": 3.0, "z_loss": 0.01, "reduction": "none"}),
        (4, 103, {"reduction": "mean", "z_loss": 0.01}),
        (4, 3, {"vocab": 3}),
    ],
    ids=str,
)
def test_a_vocabulary_cut_over_ranks_equals_the_whole(world_size, vocab, options, compiled, ranks):
    h, w, target = problem((30,), 16, vocab)
    h, w = h.detach(), w.detach()
    answers = ranks.run(on_a_shard, world_size, h, w, target, options, (), compiled)
    scale = torch.linspace(0.5, 1.5, 30) if options.get("reduction") == "none" else torch.tensor(0.25)
    dense = {key: value for key, value in options.items() if key != "vocab"}
    x, y = h.double().requires_grad_(), w.double().requires_grad_()
    expected = oracle(x, y, target, **dense) * scale
    expected.sum().backward()
    for rank, (loss, dh, dw, _) in enumerate(answers):
        assert torch.equal(loss, answers[0][0]) and torch.equal(dh, answers[0][1])  # the same bits on every rank
        assert relative_error(loss, expected) < 2e-6
        assert relative_error(dh, x.grad) < 2e-6
        assert relative_error(dw, torch.tensor_split(y.grad, world_size)[rank]) < 2e-6


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_collectives_over_a_group(reduction, ranks):
    h, w, target = problem((30,), 16, 50, ignored=0.0)
    h, w = h.detach(), w.detach()
    exchange = ("all_gather", "head loss logsumexp", (2, 30))
    sizes = ("all_gather", "head loss vocabulary", (1,))
    total = ("all_reduce", "head loss hidden gradient", (30, 16))
    given = {"reduction": reduction, "vocab": 50}
    assert ranks.run(on_a_shard, 2, h, w, target, given)[1][3] == [exchange, total]
    assert ranks.run(on_a_shard, 2, h, w, target, given, ("h",))[1][3] == [exchange]
    events = ranks.run(on_a_shard, 2, h, w, target, {"reduction": reduction}, ("w",))[0][3]
    assert events[:2] == [sizes, exchange] and events[-1] == total


def refused(rank, world_size, h, w, target, options):
    """The error each rank raises, and whether anything was sent."""
    import torch

    from pyfast import comm, ops

    group = comm.Group.create("tp", range(world_size), rank=rank)
    with comm.record() as events:
        try:
            ops.linear_cross_entropy(h, torch.tensor_split(w, world_size)[rank], target, group=group, **options)
        except ValueError as error:
            return str(error), len(events)
    return "", len(events)


def test_a_bad_target_is_refused_alike_on_every_rank(ranks):
    h, w, target = problem((6,), 4, 51, ignored=0.0)
    target[2] = 51
    for text, sent in ranks.run(refused, 2, h.detach(), w.detach(), target, {"vocab": 51}):
        assert "target holds 51; allowed are 0 to 50" in text and sent == 0
    for text, sent in ranks.run(refused, 2, h.detach(), w.detach(), target, {"vocab": 53}):
        assert "of a vocabulary of 53" in text and sent == 0


def wrapped(rank, world_size, h, w, target):
    """With a plain torch process group instead of a Group."""
    import torch
    import torch.distributed as dist

    from pyfast import ops

    return ops.linear_cross_entropy(h, torch.tensor_split(w, world_size)[rank], target, group=dist.group.WORLD)


def test_takes_a_torch_process_group(ranks):
    h, w, target = problem((6,), 4, 51)
    expected = oracle(h, w, target)
    for loss in ranks.run(wrapped, 2, h.detach(), w.detach(), target):
        assert relative_error(loss, expected) < 2e-6
