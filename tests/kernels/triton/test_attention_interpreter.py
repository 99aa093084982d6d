"""The Triton attention kernels in the interpreter, against dense maths in float64; forward, backward, carried state.

Memory accesses, races between programs and their order are checked as well (support/triton_interpreter.py).
"""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")
from support.triton_interpreter import shuffled_programs  # noqa: E402

from pyfast.kernels import reference  # noqa: E402
from pyfast.kernels.runs import cu_seqlens_runs  # noqa: E402
from pyfast.kernels.triton import attention as kernels  # noqa: E402
from pyfast.kernels.triton.attention_config import Tiles  # noqa: E402

pytestmark = pytest.mark.triton_interpreter

TILES = Tiles(block_q=64, block_k=32, block_masked=32, num_warps=4, num_stages=2)
# Of the norm: float32 sums, and one rounding of weights and results to 16 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def close(actual, expected, tolerance):
    actual, expected = actual.double(), expected.double()
    assert torch.equal(actual.isfinite(), expected.isfinite())
    actual, expected = (x.masked_fill(~x.isfinite(), 0) for x in (actual, expected))
    error, size = (actual - expected).norm().item(), expected.norm().item()
    assert error <= tolerance * size + 1e-12 * math.sqrt(expected.numel()), f"{error / max(size, 1e-30):.2e}"


def inputs(dtype, *, lengths=None, batch=1, Sq=70, Sk=70, N=2, Nk=1, D=32, Dv=32, sinks=False):
    shape = (batch, Sq), (batch, Sk)
    if lengths is not None:
        shape = (lengths[0],), (lengths[1],)
    q, k, v = (torch.randn(*s, n, d) for s, n, d in zip((shape[0], shape[1], shape[1]), (N, Nk, Nk), (D, D, Dv)))  # noqa: B905
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.randn(N) if sinks else None


def check(
    q, k, v, sinks=None, *, cu_q=None, cu_k=None, causal=True, window=(-1, -1), softcap=0.0, scale=None, tiles=TILES
):
    """The kernels' out, lse and all gradients (also through lse) equal those of dense maths."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    options = (causal, scale, *window, softcap)
    out, lse = kernels.attention_forward(q, k, v, sinks, cu_q, cu_k, *options, tiles=tiles)
    wide = [x.double().requires_grad_() for x in (q, k, v, sinks) if x is not None]
    want_out, want_lse = reference.attention(
        *wide[:3], causal=causal, scale=scale, window=window, softcap=softcap,
        sinks=wide[3] if sinks is not None else None, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
    )  # fmt: skip
    assert out.dtype == q.dtype and lse.dtype == torch.float32
    assert out.shape == want_out.shape and lse.shape == want_lse.shape and lse.is_contiguous()
    dout, dlse = torch.randn(out.shape).to(out.dtype), torch.randn(lse.shape)
    seen = want_lse.isfinite()
    wanted = torch.autograd.grad(
        (want_out * dout.double()).sum() + (want_lse[seen] * dlse.double()[seen]).sum(), wide
    )  # fmt: skip
    grads = kernels.attention_backward(
        dout, dlse, q, k, v, out, lse, sinks, cu_q, cu_k, *options, tiles=tiles
    )  # fmt: skip
    tolerance = TOLERANCE[q.dtype]
    close(out, want_out, tolerance)
    close(lse, want_lse, 1e-6)
    for actual, expected in zip(grads, wanted, strict=sinks is not None):
        close(actual, expected, tolerance)
    return out, lse, grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_causal_with_grouped_heads(dtype):
    check(*inputs(dtype, N=4, Nk=2, D=64, Dv=64))


@pytest.mark.parametrize("Sq, Sk, causal", [(70, 40, True), (40, 70, True), (33, 65, False), (1, 70, True)])
def test_lengths_that_differ(Sq, Sk, causal):
    """More queries than keys: the first see nothing, out is exactly 0 and lse -inf."""
    out, lse, grads = check(*inputs(torch.float32, batch=2, Sq=Sq, Sk=Sk), causal=causal)
    if causal and Sq > Sk:
        blind = Sq - Sk
        assert (out[:, :blind] == 0).all() and (lse[..., :blind] == -math.inf).all()
        assert (grads[0][:, :blind] == 0).all()


@pytest.mark.parametrize("window, causal", [((20, 0), True), ((0, 0), False), ((5, 40), False), ((-1, 3), False)])
def test_windows(window, causal):
    check(*inputs(torch.float32, Sq=100, Sk=100), window=window, causal=causal)


def test_a_window_wider_than_the_sequence_changes_no_bit():
    q, k, v, _ = inputs(torch.float32)
    plain, wide = (
        kernels.attention_forward(q, k, v, None, None, None, True, 0.2, left, -1, 0.0, tiles=TILES)
        for left in (-1, 1 << 40)
    )
    assert all(map(torch.equal, plain, wide))


def test_softcap_and_sinks():
    check(*inputs(torch.float32, N=4, Nk=2, sinks=True), softcap=3.0)
    check(*inputs(torch.bfloat16, sinks=True), softcap=20.0)


def test_a_sink_joins_the_maximum():
    q, k, v, _ = inputs(torch.float32)
    _, lse, _ = check(q, k, v, torch.tensor([100.0, -100.0]))
    torch.testing.assert_close(lse[:, 0], torch.full_like(lse[:, 0], 100.0))


@pytest.mark.parametrize("D, Dv", [(256, 256), (200, 136), (40, 192)])
def test_wide_heads_in_float32(D, Dv):
    """Products of rows wider than 128 are summed from four parts."""
    check(*inputs(torch.float32, N=2, Nk=1, D=D, Dv=Dv, Sq=40, Sk=40), softcap=3.0)


@pytest.mark.parametrize("D, Dv", [(8, 8), (40, 24), (80, 80), (96, 128), (192, 128), (20, 33), (1, 1), (100, 12)])
def test_head_sizes(D, Dv):
    # Of one number a row, the rounding of out and dout alone may take bfloat16 gradients past their bound.
    dtype = torch.bfloat16 if D > 1 else torch.float32
    _, _, grads = check(*inputs(dtype, D=D, Dv=Dv, Sq=40, Sk=40))
    assert all(x.is_contiguous() for x in grads[:3])


@pytest.mark.parametrize("group", [3, 8])
def test_query_heads_that_share_a_kv_head(group):
    check(*inputs(torch.float32, N=2 * group, Nk=2, D=16, Dv=8, Sq=20, Sk=40, sinks=True), window=(12, 0))


def test_sinks_of_any_stride():
    q, k, v, _ = inputs(torch.float32, N=4, Nk=2, Sq=20, Sk=20)
    check(q, k, v, torch.randn(4, 3)[:, 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_documents_some_empty(dtype):
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 0, 45, 45, 80], [0, 14, 59, 62, 62]))
    _, _, (_, dk, dv, _) = check(*inputs(dtype, lengths=(80, 62)), cu_q=cu_q, cu_k=cu_k)
    for rows in (slice(0, 14), slice(59, 62)):
        assert (dk[rows] == 0).all() and (dv[rows] == 0).all()


def test_more_queries_than_keys_in_every_document():
    cu_q = torch.tensor([0, 76, 110, 140], dtype=torch.int32)
    check(*(None if x is None else 3 * x for x in inputs(torch.float32, lengths=(140, 3))),
          cu_q=cu_q, cu_k=torch.tensor([0, 1, 2, 3], dtype=torch.int32))  # fmt: skip


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # that numpy meets them is the point
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_rows_outside_documents_never_leak(poison):
    cu = torch.tensor([5, 40, 70], dtype=torch.int32)
    q, k, v, _ = inputs(torch.float32, lengths=(90, 90))
    options = (cu, cu, True, 0.2, -1, -1, 0.0)
    clean = kernels.attention_forward(q, k, v, None, *options, tiles=TILES)
    dout = torch.randn_like(clean[0])
    clean_grads = kernels.attention_backward(dout, None, q, k, v, *clean, None, *options, tiles=TILES)
    for x in (q, k, v, dout):
        x[:5] = x[70:] = poison
    dirty = kernels.attention_forward(q, k, v, None, *options, tiles=TILES)
    dirty_grads = kernels.attention_backward(dout, None, q, k, v, *dirty, None, *options, tiles=TILES)
    assert all(map(torch.equal, clean, dirty)) and all(map(torch.equal, clean_grads[:3], dirty_grads[:3]))
    assert (dirty[0][70:] == 0).all() and all((x[:5] == 0).all() for x in dirty_grads[:3])


def test_strides():
    """[B, H, S, D] transposed, slices of a packed tensor, an expanded gradient, a last dimension that is strided."""
    q = torch.randn(2, 2, 40, 32).transpose(1, 2)
    k, v = torch.randn(2, 40, 2, 3, 32)[..., 1:, :].unbind(3)
    backwards = torch.randn(2, 40, 32, 2).transpose(2, 3)
    for query in (q, backwards):
        options = (None, None, True, 0.2, -1, -1, 0.0)
        out, lse = kernels.attention_forward(query, k, v, None, *options, tiles=TILES)
        dense = kernels.attention_forward(*(x.contiguous() for x in (query, k, v)), None, *options, tiles=TILES)
        assert torch.equal(out, dense[0]) and torch.equal(lse, dense[1])
        dout = torch.ones(1).expand(out.shape)
        rest = (out, lse, None, *options)
        grads = kernels.attention_backward(dout, None, query, k, v, *rest, tiles=TILES)
        wanted = kernels.attention_backward(
            dout.contiguous(), None, *(x.contiguous() for x in (query, k, v)), *rest, tiles=TILES
        )
        assert all(map(torch.equal, grads, wanted))


def test_any_order_of_programs_gives_the_same_bits():
    q, k, v, _ = inputs(torch.float32, N=4, Nk=2)
    plain = check(q, k, v)
    for seed in range(2):
        torch.manual_seed(0)
        with shuffled_programs(seed):
            out, lse = kernels.attention_forward(
                q, k, v, None, None, None, True, q.shape[-1] ** -0.5, -1, -1, 0.0, tiles=TILES
            )
        assert torch.equal(out, plain[0]) and torch.equal(lse, plain[1])


def test_nothing_to_do():
    for Sq, Sk in ((0, 5), (5, 0), (0, 0)):
        q, k, v, _ = inputs(torch.float32, Sq=Sq, Sk=Sk)
        out, lse, grads = check(q, k, v, causal=False)
        assert (out == 0).all() and (lse == -math.inf).all() and all((x == 0).all() for x in grads[:3])


def test_the_shipped_configuration():
    check(*inputs(torch.bfloat16, Sq=300, Sk=300, D=128, Dv=128), tiles=None)


def test_float64_takes_plain_torch():
    q, k, v, _ = inputs(torch.float64)
    out, _ = kernels.attention_forward(q, k, v, None, None, None, True, 0.2, -1, -1, 0.0)
    want, _ = reference.attention(q, k, v, causal=True, scale=0.2)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Carried state between shards
# ---------------------------------------------------------------------------------------------------------------------

ZIGZAG = [[[0, 0, 20, 1], [0, 60, 20, 1]], [[0, 20, 20, 1], [0, 40, 20, 1]]]
STRIPED = [[[0, 0, 40, 2]], [[0, 1, 40, 2]]]
PACKED = [[[0, 0, 13, 1], [-1, 0, 7, 1], [2, 5, 20, 1]], [[2, 0, 5, 1], [1, 0, 25, 1], [0, 13, 3, 3]]]


def over_shards(q, k, v, shards, dout, *, causal=True, window=(-1, -1), softcap=0.0, sinks=None):
    """out, lse and gradients of shard 0's queries over all shards' keys, hop by hop, in fp32 buffers that hold 1."""
    options = (causal, 0.2, *window, softcap)
    runs = [torch.tensor(shard) for shard in shards]
    rows = q.shape[0]
    state = None
    for hop, shard in enumerate(runs):
        last = hop == len(runs) - 1
        state = kernels.attention_state_forward(
            q, k[hop], v[hop], runs[0], shard, *options, sinks if last else None, state, tiles=TILES
        )
    acc, lse = state
    dlse = torch.zeros_like(lse)
    delta = kernels.attention_delta(acc.to(q.dtype), dout, dlse)
    assert delta.shape == (q.shape[1], rows)
    dq = torch.ones(q.shape)
    dk, dv = ([torch.ones(x.shape) for x in y] for y in (k, v))
    for hop, shard in enumerate(runs):
        kernels.attention_state_backward(
            dout, q, k[hop], v[hop], lse, delta, runs[0], shard, *options, dq, dk[hop], dv[hop], tiles=TILES
        )
    return acc, lse, dq, torch.cat(dk), torch.cat(dv)


@pytest.mark.parametrize("shards", [ZIGZAG, STRIPED, PACKED], ids=["zigzag", "striped", "packed"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": False, "window": (9, 4)}, {"softcap": 2.0, "sinks": True}],
    ids=["causal", "window", "softcap-sinks"],
)
def test_state_is_carried_from_shard_to_shard(shards, options):
    N, Nk, D, rows = 2, 1, 32, 40
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(N)
    q, dout = torch.randn(rows, N, D), torch.randn(rows, N, D)
    k, v = ([torch.randn(rows, Nk, D) for _ in shards] for _ in range(2))
    results = over_shards(q, k, v, shards, dout, **options)
    wide = [x.double().requires_grad_() for x in (q, torch.cat(k), torch.cat(v))]
    lengths = [sum(run[2] for run in shard) for shard in shards]
    joined = [run for shard, length in zip(shards, lengths, strict=True) for run in (*shard, [-1, 0, rows - length, 1])]
    out, lse = reference.attention_over_runs(
        *wide, torch.tensor(shards[0]), torch.tensor(joined), scale=0.2, **{"causal": True, **options}
    )
    grads = torch.autograd.grad(out, wide, dout.double())
    for actual, expected in zip(results, (out, lse, *(1 + grad for grad in grads)), strict=True):
        close(actual, expected, 2e-6)


def test_state_is_continued_in_place_and_rows_without_keys_keep_it():
    runs = torch.tensor([[0, 0, 40, 1]])
    q, k, v, _ = (None if x is None else x[0] for x in inputs(torch.float32, Sq=40, Sk=40))
    first = kernels.attention_state_forward(q, k, v, runs, runs, True, 0.2, -1, -1, 0.0, tiles=TILES)
    kept = [x.clone() for x in first]
    later = torch.tensor([[0, 20, 40, 1]])  # only the queries from 20 on see any of these
    second = kernels.attention_state_forward(q, k, v, runs, later, True, 0.2, -1, -1, 0.0, None, first, tiles=TILES)
    assert second[0] is first[0] and second[1] is first[1]
    assert torch.equal(second[0][:20], kept[0][:20]) and not torch.equal(second[0][20:], kept[0][20:])


def test_state_and_buffers_of_any_head_size_and_strides():
    """Head sizes that kernels pad, and targets that are views: columns between others, rows that lie apart."""
    N, D, Dv, rows = 3, 20, 33, 40
    q, k, v = torch.randn(rows, N, D), torch.randn(rows, 1, D), torch.randn(rows, 1, Dv)
    options = (True, 0.2, -1, -1, 0.0)
    halves = [torch.tensor([[0, 0, 20, 1]]), torch.tensor([[0, 20, 20, 1]])]
    runs = torch.tensor([[0, 0, rows, 1]])
    acc, lse = torch.full((rows, N, Dv, 2), 7.0), torch.full((N, rows, 2), 7.0)
    first = kernels.attention_state_forward(q, k[:20], v[:20], runs, halves[0], *options, tiles=TILES)
    acc[..., 0], lse[..., 0] = first
    state = (acc[..., 0], lse[..., 0])
    kernels.attention_state_forward(q, k[20:], v[20:], runs, halves[1], *options, None, state, tiles=TILES)
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    out, want_lse = reference.attention(*wide, causal=True, scale=0.2, **dict.fromkeys(
        ("cu_seqlens_q", "cu_seqlens_k"), torch.tensor([0, rows], dtype=torch.int32)))  # fmt: skip
    close(state[0], out, 2e-6)
    close(state[1], want_lse, 1e-6)
    assert (acc[..., 1] == 7).all() and (lse[..., 1] == 7).all()

    dout = torch.randn(rows, N, Dv)
    dlse = torch.ones(1).expand(lse.shape[:2])
    grads = torch.autograd.grad((out * dout.double()).sum() + want_lse.sum(), wide)
    delta = kernels.attention_delta(state[0], dout, dlse)
    buffers = [torch.full((*x.shape, 2), 1.0) for x in (q, k, v)]
    views = [x[..., 0] for x in buffers]
    kernels.attention_state_backward(
        dout, q, k, v, state[1], delta, runs, runs, *options, *views, tiles=TILES
    )  # fmt: skip
    for buffer, expected in zip(buffers, grads, strict=True):
        close(buffer[..., 0], 1 + expected, 2e-6)
        assert (buffer[..., 1] == 1).all()


def test_gradients_that_are_not_wanted_are_not_computed():
    cu = torch.tensor([0, 40], dtype=torch.int32)
    runs, _ = cu_seqlens_runs(cu, cu)
    q, k, v, _ = inputs(torch.float32, lengths=(40, 40))
    out, lse = kernels.attention_state_forward(q, k, v, runs, runs, True, 0.2, -1, -1, 0.0, tiles=TILES)
    dout = torch.randn_like(out)
    delta = kernels.attention_delta(out, dout)
    full = [torch.zeros(x.shape) for x in (q, k, v)]
    parts = (dout, q, k, v, lse, delta, runs, runs, True, 0.2, -1, -1, 0.0)
    kernels.attention_state_backward(*parts, *full, tiles=TILES)
    for wanted in range(3):
        buffers = [torch.zeros(x.shape) if i == wanted else None for i, x in enumerate((q, k, v))]
        kernels.attention_state_backward(*parts, *buffers, tiles=TILES)
        assert torch.equal(buffers[wanted], full[wanted])
