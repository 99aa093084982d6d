"""attention_state_*: carried from hop to hop between shards, against one dense float64 call over everything."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfast.kernels import cpu, plain
from pyfast.kernels import runs as rows_and_runs

CONTIGUOUS, ZIGZAG, STRIPED, UNEVEN = "contiguous", "zigzag", "striped", "uneven"
LAYOUTS = (CONTIGUOUS, ZIGZAG, STRIPED, UNEVEN)


def shard_runs(lengths, ranks: int, layout: str, padding: int = 0) -> list[torch.Tensor]:
    """Runs of each rank: every document of `lengths` spread over the ranks; `padding` rows between documents."""
    tables = [[] for _ in range(ranks)]
    for document, length in enumerate(lengths):
        cuts = [length * i // ranks for i in range(ranks + 1)]
        if layout == UNEVEN:
            cuts = [length * i * i // ranks**2 for i in range(ranks + 1)]
        halves = [length * i // (2 * ranks) for i in range(2 * ranks + 1)]
        for rank, table in enumerate(tables):
            if layout == STRIPED:
                table.append([document, rank, len(range(rank, length, ranks)), ranks])
            elif layout == ZIGZAG:
                for piece in (rank, 2 * ranks - 1 - rank):
                    table.append([document, halves[piece], halves[piece + 1] - halves[piece], 1])
            else:
                table.append([document, cuts[rank], cuts[rank + 1] - cuts[rank], 1])
            if padding:
                table.append([-1, 0, padding, 1])
    return [torch.tensor(table, dtype=torch.int64) for table in tables]


def places(table, starts, total: int) -> torch.Tensor:
    """Where each row of a shard lies in the packed whole; `total` (one row past the end) for rows of no document."""
    return torch.tensor(
        [
            starts[document] + start + i * stride if document >= 0 else total
            for document, start, length, stride in table.tolist()
            for i in range(length)
        ],
        dtype=torch.int64,
    )


def dense(q, k, v, lengths, causal, window, softcap, sinks, scale):
    """(out [T, Nq, Dv], lse [Nq, T]) by the textbook, documents by a block mask."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    ahead = torch.arange(len(q))[None] - torch.arange(len(q))[:, None]
    hidden = document[:, None] != document[None]
    hidden |= (ahead > 0) if causal else torch.zeros_like(hidden)
    for side, width in ((-ahead, window[0]), (ahead, window[1])):
        hidden |= (side > width) if width >= 0 else torch.zeros_like(hidden)
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qnd,knd->nqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -math.inf)
    with_sink = scores
    if sinks is not None:
        with_sink = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    lse = torch.logsumexp(with_sink, -1)
    return torch.einsum("nqk,knd->qnd", torch.exp(scores - lse[..., None]), v), lse


def tensors(total: int, Nq=2, Nk=1, D=16, Dv=24, dtype=torch.float64, seed=0):
    """q, k, v, dout [total, N, D] and dlse [Nq, total]."""
    generator = torch.Generator().manual_seed(seed)
    shapes = ((total, Nq, D), (total, Nk, D), (total, Nk, Dv), (total, Nq, Dv), (Nq, total))
    *rows, dlse = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return *(x.to(dtype) for x in rows), dlse


def relative_error(actual, expected) -> float:
    assert actual.isfinite().all()
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def ring(module, shards, inputs, starts, options, sinks=None, garbage=math.nan):
    """(out, lse, dq, dk, dv) of the whole in the sum dtype, hop by hop as a ring would: plain calls, state in place."""
    q, k, v, dout, dlse = inputs
    total, wide = len(q), torch.float64 if q.dtype == torch.float64 else torch.float32
    where = [places(table, starts, total) for table in shards]

    def shard(x, rank):  # padding rows hold garbage
        return torch.cat([x, torch.full_like(x[:1], garbage)])[where[rank]]

    ranks, states = range(len(shards)), []
    for rank in ranks:
        state = None
        for hop in ranks:
            other = (rank - hop) % len(shards)
            last = hop == len(shards) - 1
            state = module.attention_state_forward(
                shard(q, rank), shard(k, other), shard(v, other), shards[rank], shards[other], *options,
                sinks=sinks if last else None, state=state,
            )  # fmt: skip
        states.append(state)
    sums = {name: torch.zeros((total + 1, *x.shape[1:]), dtype=wide) for name, x in zip("qkv", inputs, strict=False)}
    whole_out, whole_lse = (
        torch.zeros((total + 1, *dout.shape[1:]), dtype=wide),
        torch.zeros(len(dlse), total + 1).to(wide),
    )
    for rank in ranks:
        acc, lse = states[rank]
        rows_dout = shard(dout, rank)
        rows_dlse = torch.cat([dlse, torch.full_like(dlse[:, :1], garbage)], 1)[:, where[rank]].to(wide)
        delta = module.attention_delta(acc.to(q.dtype), rows_dout, rows_dlse)
        dq = torch.zeros((len(where[rank]), *q.shape[1:]), dtype=wide)
        for hop in ranks:
            other = (rank - hop) % len(shards)
            dk, dv = (torch.zeros((len(where[other]), *x.shape[1:]), dtype=wide) for x in (k, v))
            module.attention_state_backward(
                rows_dout, shard(q, rank), shard(k, other), shard(v, other), lse, delta, shards[rank], shards[other],
                *options, dq, dk, dv,
            )  # fmt: skip
            sums["k"].index_add_(0, where[other], dk)
            sums["v"].index_add_(0, where[other], dv)
        sums["q"].index_add_(0, where[rank], dq)
        whole_out[where[rank]], whole_lse[:, where[rank]] = acc, lse
    for x in (whole_out, *sums.values()):
        assert not x[total].any(), "rows of no document must come out 0"
    if (torch.cat(where) == total).any():
        assert (whole_lse[:, total] == -math.inf).all()
    return whole_out[:total], whole_lse[:, :total], *(sums[name][:total] for name in "qkv")


def expected_results(inputs, lengths, causal, scale, window, softcap, sinks=None):
    q, k, v, dout, dlse = (x.double() for x in inputs)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = dense(*leaves, lengths, causal, window, softcap, None if sinks is None else sinks.double(), scale)
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [dout, dlse])


def check_ring(module, lengths, ranks, layout, padding=0, causal=True, window=(-1, -1), softcap=0.0, with_sinks=False):
    total = sum(lengths)
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    inputs = tensors(total)
    sinks = torch.tensor([0.3, 2.0], dtype=torch.float64) if with_sinks else None
    shards = shard_runs(lengths, ranks, layout, padding)
    actual = ring(module, shards, inputs, starts, (causal, 0.3, *window, softcap), sinks)
    expected = expected_results(inputs, lengths, causal, 0.3, window, softcap, sinks)
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        assert relative_error(a, e) < 1e-10, name


@pytest.mark.parametrize("module", [cpu, plain], ids=["cpu", "plain"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_hops_equal_one_dense_call(module, layout, ranks, causal):
    """A long document, a short one, one token, an empty one; padding rows full of NaN."""
    check_ring(module, [331, 9, 1, 0, 20], ranks, layout, padding=3, causal=causal)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 150), min_size=1, max_size=4).filter(sum), st.integers(1, 4), st.sampled_from(LAYOUTS),
    st.booleans(), st.tuples(st.integers(-1, 40), st.integers(-1, 40)), st.sampled_from([0.0, 2.0]), st.booleans(),
)  # fmt: skip
def test_any_features(lengths, ranks, layout, causal, window, softcap, with_sinks):
    check_ring(cpu, lengths, ranks, layout, 2, causal, window, softcap, with_sinks)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_plain_windows_softcap_and_sinks(layout):
    check_ring(plain, [70, 33], 3, layout, 1, True, (17, 0), 2.0, True)


def test_sinks_are_counted_once_and_never_alone():
    """Rows that have seen no key when the sinks come: 0 and -inf; the others: as with one more logit."""
    q, k, v, _, _ = tensors(4)
    runs_q, runs_k = torch.tensor([[0, 0, 4, 1]]), torch.tensor([[0, 2, 4, 1]])  # causal: rows 0 and 1 see nothing
    sinks = torch.tensor([1.0, -2.0], dtype=torch.float64)
    options = (True, 0.25, -1, -1, 0.0)
    for module in (cpu, plain):
        acc, lse = module.attention_state_forward(q, k, v, runs_q, runs_k, *options, sinks=sinks)
        assert not acc[:2].any()
        assert (lse[:, :2] == -math.inf).all()
        without_acc, without = module.attention_state_forward(q, k, v, runs_q, runs_k, *options)
        torch.testing.assert_close(lse[:, 2:], torch.logaddexp(without, sinks[:, None])[:, 2:], rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(
            acc[2:], without_acc[2:] * torch.exp(without - lse).T[2:, :, None], rtol=1e-13, atol=1e-13
        )


def test_state_is_continued_in_place_and_left_alone_where_nothing_is_seen():
    q, k, v, _, _ = tensors(300)
    here, later = torch.tensor([[0, 0, 300, 1]]), torch.tensor([[0, 300, 300, 1]])
    options = (True, 0.25, -1, -1, 0.0)
    state = cpu.attention_state_forward(q, k, v, here, here, *options)
    before = [x.clone() for x in state]
    assert cpu.attention_state_forward(q, k, v, here, later, *options, state=state) is state
    assert all(map(torch.equal, state, before))
    assert cpu.attention_state_forward(q, k, v, later, here, *options, state=state) is state
    assert not torch.equal(state[0], before[0])


@pytest.mark.parametrize("module", [cpu, plain], ids=["cpu", "plain"])
def test_gradients_are_added_and_only_those_asked_for(module):
    q, k, v, dout, dlse = tensors(200)
    runs, options = torch.tensor([[0, 0, 200, 1]]), (True, 0.25, -1, -1, 0.0)
    acc, lse = module.attention_state_forward(q, k, v, runs, runs, *options)
    delta = module.attention_delta(acc, dout, dlse)

    def gradients(filled: float, wanted: str):
        sums = [torch.full_like(x, filled) if name in wanted else None for name, x in (("q", q), ("k", k), ("v", v))]
        module.attention_state_backward(dout, q, k, v, lse, delta, runs, runs, *options, *sums)
        return sums

    all_three = gradients(0.0, "qkv")
    for wanted in ("q", "k", "v", "qk", "kv", "qv"):
        for name, alone, together in zip("qkv", gradients(0.0, wanted), all_three, strict=True):
            assert alone is None if name not in wanted else torch.equal(alone, together)
    for seven, zero in zip(gradients(7.0, "qkv"), all_three, strict=True):
        torch.testing.assert_close(seven, zero + 7.0, rtol=1e-14, atol=1e-14)


def test_buffers_of_any_strides():
    q, k, v, dout, _ = tensors(90)
    runs, options = torch.tensor([[0, 0, 90, 1]]), (True, 0.25, -1, -1, 0.0)
    acc, lse = cpu.attention_state_forward(q, k, v, runs, runs, *options)
    delta = cpu.attention_delta(acc, dout)
    plain_sums, strided_sums = (
        [torch.zeros(x.shape, dtype=torch.float64) for x in (q, k, v)],
        [torch.zeros(*reversed(x.shape), dtype=torch.float64).permute(2, 1, 0) for x in (q, k, v)],
    )
    for sums in (plain_sums, strided_sums):
        cpu.attention_state_backward(dout, q, k, v, lse, delta, runs, runs, *options, *sums)
    assert all(map(torch.equal, plain_sums, strided_sums))
    state = (acc.permute(2, 1, 0).contiguous().permute(2, 1, 0), lse.T.contiguous().T)
    expected = cpu.attention_state_forward(q, k, v, runs, runs, *options, state=(acc.clone(), lse.clone()))
    transposed = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    assert cpu.attention_state_forward(*transposed, runs, runs, *options, state=state) is state
    assert all(map(torch.equal, state, expected))


def bfloat16_errors(ranks: int):
    """Relative errors of (out, dq, dk, dv), rounded once at the end, S 2048."""
    inputs = tensors(2048, Nq=2, Nk=2, D=64, Dv=64, dtype=torch.bfloat16)
    options = (True, 0.125, -1, -1, 0.0)
    actual = ring(cpu, shard_runs([2048], ranks, ZIGZAG), inputs, [0], options)
    expected = expected_results(inputs, [2048], True, 0.125, (-1, -1), 0.0)
    return [relative_error(actual[i].bfloat16(), expected[i]) for i in (0, 2, 3, 4)]


def test_bfloat16_error_does_not_grow_with_hops():
    one, eight = bfloat16_errors(1), bfloat16_errors(8)
    assert eight[0] <= 2.2e-3
    assert max(eight[1:]) <= 2.4e-3
    assert all(e <= 1.1 * o for e, o in zip(eight, one, strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bits_for_any_number_of_threads(layout):
    lengths, starts = [500, 40], [0, 500]
    inputs = tensors(540, dtype=torch.float32)
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            shards = shard_runs(lengths, 2, layout, 1)
            results.append(ring(cpu, shards, inputs, starts, (True, 0.25, 100, -1, 0.0)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


def test_one_run_a_document_is_what_attention_computes():
    """Bit for bit, up to the one rounding, also where Sq != Sk."""
    cu_q, cu_k = torch.tensor([0, 30, 30, 200], dtype=torch.int32), torch.tensor([3, 90, 95, 150], dtype=torch.int32)
    runs_q, runs_k = rows_and_runs.cu_seqlens_runs(cu_q, cu_k)
    q, _, _, dout, _ = tensors(210, dtype=torch.float32)
    _, k, v, _, _ = tensors(160, dtype=torch.float32)
    out, lse = cpu.attention_forward(q, k, v, None, cu_q, cu_k, True, 0.25, -1, -1, 0.0)
    acc, state_lse = cpu.attention_state_forward(q, k, v, runs_q, runs_k, True, 0.25, -1, -1, 0.0)
    assert torch.equal(out, acc)
    assert torch.equal(lse, state_lse)
    grads = cpu.attention_backward(dout, None, q, k, v, out, lse, None, cu_q, cu_k, True, 0.25, -1, -1, 0.0)
    sums = [torch.zeros_like(x) for x in (q, k, v)]
    delta = cpu.attention_delta(out, dout)
    cpu.attention_state_backward(dout, q, k, v, lse, delta, runs_q, runs_k, True, 0.25, -1, -1, 0.0, *sums)
    assert all(map(torch.equal, grads, sums))


@pytest.mark.parametrize("isa", ["avx512bf16", "avx512", "avx2", "baseline"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("scale", "softcap"), [(0.25, 0.0), (-0.25, 3.0), (-0.3, 0.0), (0.0, 0.0)])
def test_every_instruction_set(isa, dtype, scale, softcap):
    """Odd sizes: pairs of bfloat16 that stick out of a row, a run or a window are nothing."""
    if isa not in cpu.available_isas():
        pytest.skip(f"{isa} was not built or this processor lacks it")
    lengths, starts, window = [301, 7, 1], [0, 301, 308], (101, 30)
    inputs = tensors(309, Nq=3, Nk=1, D=23, Dv=37, dtype=dtype)
    try:
        cpu.use_isa(isa)
        shards = shard_runs(lengths, 3, ZIGZAG, 1)
        actual = ring(cpu, shards, inputs, starts, (False, scale, *window, softcap))
    finally:
        cpu.use_isa(cpu.available_isas()[0])
    expected = expected_results(inputs, lengths, False, scale, window, softcap)
    for name, a, e in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        if scale == 0 and name in ("dq", "dk"):
            assert not a.any()
        else:
            assert relative_error(a, e) < (2e-6 if dtype == torch.float32 else 2.4e-3), name


@pytest.mark.parametrize("module", [cpu, plain])
def test_a_shard_without_any_run_sees_nothing_and_gives_nothing(module):
    """An empty table is no missing table: its rows belong to no document."""
    q, k, v, dout, _ = tensors(5)
    none, some = torch.zeros(0, 4, dtype=torch.int64), torch.tensor([[0, 0, 5, 1]])
    options = (False, 0.25, -1, -1, 0.0)
    for runs_q, runs_k in ((none, none), (none, some), (some, none)):
        acc, lse = module.attention_state_forward(q, k, v, runs_q, runs_k, *options)
        assert not acc.any() and (lse == -math.inf).all()
        sums = tuple(torch.full_like(x, 0.5) for x in (q, k, v))
        delta = module.attention_delta(acc, dout)
        module.attention_state_backward(dout, q, k, v, lse, delta, runs_q, runs_k, *options, *sums)
        assert all((x == 0.5).all() for x in sums)
