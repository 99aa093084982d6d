"""Attention on a GPU: every feature against float64, then TFLOP/s beside torch's flash, cuDNN and FlexAttention.

B batch, S sequence, T packed tokens, N heads (Nq, Nk), D head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from device import Check, guarded, relative_error
from torch import Tensor

from pyfast import kernels, ops
from pyfast.kernels import reference

# Relative to the norm: float32 sums; one rounding of inputs, weights and results.
ALLOWED = {torch.bfloat16: 4e-3, torch.float32: 1e-5, torch.float16: 5e-4}
TOKENS, WIDTH = 16384, 2048  # batch x sequence, heads x head size of every timed cell
NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")


def check(device: torch.device, length: int = 600, dtypes: tuple = tuple(ALLOWED)) -> Iterator[Check]:
    """Every feature, forward and backward, at sequences of `length`."""
    torch.manual_seed(0)
    for dtype in dtypes:
        for name, case in _cases(length).items():
            title = f"{name}, {str(dtype)[6:]}"
            yield from guarded(
                title, lambda t=title, d=dtype, c=case: [Check(t, _error(device, d, length, **c), ALLOWED[d])]
            )
    for name, shards in _shards(length // 10 * 10).items():
        title = f"state carried, {name}, float32"
        yield from guarded(title, lambda t=title, s=shards: [Check(t, _carried_error(device, s), 1e-5)])
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        for D, tiles in ((D, tiles) for D, several in _specialized().items() for tiles in several):
            title = f"specialized warps, head size {D}, keys by {tiles.block_k}, bfloat16"
            yield from guarded(title, lambda t=title, d=D, x=tiles: [Check(t, _specialized_error(device, d, x), 4e-3)])


def _cases(S: int) -> dict[str, dict]:
    cu = [0, 0, S // 3, S // 3 + 1, S]
    return {
        "full": {},
        "causal": {"causal": True},
        "causal, more keys": {"causal": True, "Sk": S + 77},
        "causal, more queries": {"causal": True, "Sk": S - 77 if S > 100 else S // 2},
        "window (100, 7)": {"window": (100, 7)},
        "window (30, 0), causal": {"window": (30, 0), "causal": True},
        "softcap": {"softcap": 5.0, "causal": True},
        "sinks": {"sinks": True, "causal": True},
        "grouped heads 8:2": {"N": 8, "Nk": 2, "causal": True},
        "one kv head": {"N": 4, "Nk": 1},
        "packed, a document of length 0": {"cu_q": cu, "cu_k": cu, "causal": True},
        "packed, lengths that differ": {"cu_q": cu, "cu_k": [0, 5, 5, S // 2, S], "causal": True},
        **{f"head sizes {d} and {e}": {"D": d, "Dv": e, "causal": True} for d, e in
           ((8, 8), (40, 40), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256))},
    }  # fmt: skip


def _error(
    device, dtype, S: int, *, Sk=None, N=4, Nk=2, D=128, Dv=128, causal=False, window=(-1, -1), softcap=0.0,
    sinks=False, cu_q=None, cu_k=None,
) -> float:  # fmt: skip
    """The largest relative error among out, lse and all gradients."""
    Sk = S if Sk is None else Sk
    batch = () if cu_q else (2,)
    q, k, v = (
        torch.randn(*batch, s, n, d, device=device).to(dtype) for s, n, d in ((S, N, D), (Sk, Nk, D), (Sk, Nk, Dv))
    )
    sink = torch.randn(N, device=device) if sinks else None
    cu_q, cu_k = (None if x is None else torch.tensor(x, dtype=torch.int32, device=device) for x in (cu_q, cu_k))
    options = (causal, D**-0.5, *window, softcap)
    chosen = kernels.for_device(device)
    out, lse = chosen.attention_forward(q, k, v, sink, cu_q, cu_k, *options)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    grads = chosen.attention_backward(dout, dlse, q, k, v, out, lse, sink, cu_q, cu_k, *options)
    wide = [x.double().requires_grad_() for x in (q, k, v, sink) if x is not None]
    want_out, want_lse = reference.attention(
        *wide[:3], causal=causal, scale=D**-0.5, window=window, softcap=softcap, sinks=wide[3] if sinks else None,
        cu_seqlens_q=cu_q, cu_seqlens_k=cu_k,
    )  # fmt: skip
    seen = want_lse.isfinite()
    loss = (want_out * dout.double()).sum() + (want_lse[seen] * dlse.double()[seen]).sum()
    wanted = torch.autograd.grad(loss, wide)
    pairs = zip((out, lse, *grads), (want_out, want_lse, *wanted), strict=False)
    return max(relative_error(actual, expected) for actual, expected in pairs)


def _shards(S: int) -> dict[str, list]:
    half, quarter = S // 2, S // 4
    return {
        "contiguous": [[[0, half, half, 1]], [[0, 0, half, 1]]],
        "zigzag": [
            [[0, 0, quarter, 1], [0, half + quarter, half - quarter, 1]],
            [[0, quarter, quarter, 1], [0, half, half - quarter, 1]],
        ],
        "striped": [[[0, 0, half, 2]], [[0, 1, half, 2]]],
    }


def _carried_error(device: torch.device, shards: list) -> float:
    """Shard 0's queries over every shard's keys, one call each, gradients added into buffers."""
    runs = [torch.tensor(shard) for shard in shards]
    rows = [int(x[:, 2].sum()) for x in runs]
    N, D, options = 4, 64, (True, 0.125, -1, -1, 0.0)
    q, dout = (torch.randn(rows[0], N, D, device=device) for _ in range(2))
    keys = [(torch.randn(n, 2, D, device=device), torch.randn(n, 2, D, device=device)) for n in rows]
    chosen, state = kernels.for_device(device), None
    for (k, v), shard in zip(keys, runs, strict=True):
        state = chosen.attention_state_forward(q, k, v, runs[0], shard, *options, None, state)
    acc, lse = state
    delta = chosen.attention_delta(acc, dout)
    dq = torch.zeros_like(q)
    grads = [(torch.zeros_like(k), torch.zeros_like(v)) for k, v in keys]
    for (k, v), (dk, dv), shard in zip(keys, grads, runs, strict=True):
        chosen.attention_state_backward(dout, q, k, v, lse, delta, runs[0], shard, *options, dq, dk, dv)
    joined = [torch.cat(x) for x in zip(*keys, strict=True)]
    wide = [x.double().requires_grad_() for x in (q, *joined)]
    want, want_lse = reference.attention_over_runs(*wide, runs[0], torch.cat(runs), causal=True, scale=0.125)
    wanted = torch.autograd.grad(want, wide, dout.double())
    results = (acc, lse, dq, *(torch.cat(x) for x in zip(*grads, strict=True)))
    pairs = zip(results, (want, want_lse, *wanted), strict=True)
    return max(relative_error(actual, expected) for actual, expected in pairs)


def _specialized() -> dict[int, list]:
    """head size -> tiles of the forward with specialized warps."""
    from pyfast.kernels.triton.attention_config import SPECIALIZED, Tiles

    return {D: [tiles, Tiles(128, 64, 64, 4, 3)] for D, tiles in SPECIALIZED.items()}


def _specialized_error(device: torch.device, D: int, tiles) -> float:
    """Full and causal, with a softcap and sinks; sequences that end within a tile of queries."""
    from pyfast.kernels.triton.attention_specialized import attention_forward_specialized

    q, k, v = (torch.randn(2, s, n, D, device=device).bfloat16() for s, n in ((600, 8), (640, 2), (640, 2)))
    sinks, worst = torch.randn(8, device=device), 0.0
    for causal in (False, True):
        results = attention_forward_specialized(q, k, v, sinks, causal, D**-0.5, 5.0, tiles=tiles)
        wanted = reference.attention(
            *(x.double() for x in (q, k, v)), causal=causal, scale=D**-0.5, softcap=5.0, sinks=sinks.double()
        )
        worst = max(worst, *map(relative_error, results, wanted))
    return worst


# ---------------------------------------------------------------------------------------------------------------------
# Speed
# ---------------------------------------------------------------------------------------------------------------------


def measure(device: torch.device, deadline: float) -> Iterator[str]:
    """TFLOP/s, medians, bfloat16; the backward counted as 2.5 forwards."""
    yield from _measure_tiles(device)
    yield f"\n## attention: TFLOP/s, bfloat16, {TOKENS} tokens, {WIDTH} wide, medians\n"
    candidates = {"pyfast": _pyfast, "flash": _sdpa("FLASH_ATTENTION"), "cuDNN": _sdpa("CUDNN_ATTENTION")}
    yield f"| D | S | mask | pass | {' | '.join([*candidates, 'Flex'])} | pyfast / best |"
    yield "|" + "---|" * (6 + len(candidates))
    for D in (128, 64):
        for S in (1024, 2048, 4096, 8192, 16384):
            for causal in (False, True):
                if time.monotonic() > deadline:
                    yield "\n(out of time: the rest was not measured)"
                    return
                flex = {"Flex": _flex} if S == 8192 and time.monotonic() < deadline - 60 else {}  # it compiles slowly
                yield from _cell(device, D, S, causal, {**candidates, **flex})


def _measure_tiles(device: torch.device, S: int = 8192) -> Iterator[str]:
    """What decides between entries of pyfast/kernels/triton/attention_config.py: those in use, and others."""
    from triton.testing import do_bench

    yield f"\n## attention: tiles, bfloat16, causal, {TOKENS} tokens, S {S}, medians\n"
    yield "| D | kernel | tiles (queries, keys, masked, warps, stages) | ms |\n|---|---|---|---|"
    for D in (64, 128):
        shape = (TOKENS // S, S, WIDTH // D, D)
        q, k, v, dout = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
        for kernel, tiles, run in _tile_candidates(q, k, v, dout):
            try:
                yield f"| {D} | {kernel} | {tuple(tiles)} | {do_bench(run, rep=60, return_mode='median'):.3f} |"
            except RuntimeError as error:
                yield f"<!-- {D} {kernel} {tuple(tiles)}: {str(error).splitlines()[0]} -->"


def _tile_candidates(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Iterator[tuple]:
    """(kernel, tiles, function that runs it)."""
    from pyfast.kernels.triton import attention
    from pyfast.kernels.triton.attention_config import Tiles, choose_tiles
    from pyfast.kernels.triton.attention_specialized import attention_forward_specialized, unsuitable
    from pyfast.kernels.triton.launch import architecture

    D, options = q.shape[-1], attention.Options(True, q.shape[-1] ** -0.5, -1, -1, 0.0)
    chosen = {kernel: choose_tiles(architecture(), kernel, 16, True, D) for kernel in ("forward", "keys", "queries")}
    yield (
        "forward", chosen["forward"],
        lambda: attention.attention_forward(q, k, v, None, None, None, *options, tiles=chosen["forward"]),
    )  # fmt: skip
    for tiles in _specialized()[D]:
        if unsuitable(q, k, v, True, tiles) is None:
            yield (
                "forward, specialized", tiles,
                lambda tiles=tiles: attention_forward_specialized(q, k, v, None, True, D**-0.5, 0.0, tiles=tiles),
            )  # fmt: skip
    out, lse = attention.attention_forward(q, k, v, None, None, None, *options)
    flat = [x.flatten(0, 1) for x in (dout, q, k, v)]
    constants = attention._pack_lse(lse), attention.attention_delta(out.flatten(0, 1), flat[0])
    targets = [torch.empty_like(x) for x in flat[1:]]
    # 64 x 128 should be the faster one, but triton 3.6 spills 16 bytes of it, outside the loops.
    keys = dict.fromkeys((chosen["keys"], Tiles(64, 128, 32, 8, 2)))  # once where they are the same
    for kernel, several in (("keys", keys), ("queries", [chosen["queries"]])):
        wanted = (None, *targets[1:]) if kernel == "keys" else (targets[0], None, None)
        for tiles in several:

            def plan(kind: str, tiles: Tiles) -> attention.Plan:
                return attention._plan_of_call(kind, q, k, None, None, options, tiles)

            yield (
                f"backward, {kernel}", tiles,
                lambda tiles=tiles, wanted=wanted: attention._backward(
                    *flat, *constants, plan, options, tiles, *wanted, add=False
                ),
            )  # fmt: skip


def _cell(device, D: int, S: int, causal: bool, candidates: dict[str, Callable]) -> Iterator[str]:
    from triton.testing import do_bench

    shape = (TOKENS // S, S, WIDTH // D, D)
    q, k, v = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn(shape, device=device, dtype=torch.bfloat16)
    flops = 4 * TOKENS * S * WIDTH * (0.5 if causal else 1.0)
    rates: dict[str, tuple[float, float]] = {}
    results: dict[str, Tensor] = {}
    for name, make in candidates.items():
        try:
            attend = make(causal)
            out = attend(q, k, v)
        except RuntimeError as error:  # this torch or this GPU lacks the backend
            yield f"<!-- {name}: {str(error).splitlines()[0]} -->"
            continue
        results[name] = out.detach()
        forward = do_bench(lambda attend=attend: attend(q, k, v), rep=60, return_mode="median")
        backward = do_bench(
            lambda out=out: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), rep=60, return_mode="median"
        )
        rates[name] = (flops / forward / 1e9, 2.5 * flops / backward / 1e9)
    for i, which in enumerate(("forward", "backward")):
        row = [f"{rates[name][i]:.0f}" if name in rates else "-" for name in ("pyfast", "flash", "cuDNN", "Flex")]
        others = [rate[i] for name, rate in rates.items() if name != "pyfast"]
        cell = (D, S, "causal" if causal else "full", which, *row, _ratio(rates, results, others, i))
        yield f"| {' | '.join(map(str, cell))} |"


def _ratio(rates, results, others, i: int) -> str:
    """pyfast over the best of the others, unless they disagree about the result."""
    if not others:
        return "-"
    worst = max(relative_error(results["pyfast"], x) for name, x in results.items() if name != "pyfast")
    return f"{rates['pyfast'][i] / max(others):.2f}" if worst < 8e-3 else f"results differ by {worst:.1e}"


def _pyfast(causal: bool) -> Callable:
    return lambda q, k, v: ops.attention(q, k, v, causal=causal)


def _sdpa(backend: str) -> Callable:
    def make(causal: bool) -> Callable:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def attend(q, k, v):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                heads_first = (x.transpose(1, 2) for x in (q, k, v))
                return F.scaled_dot_product_attention(*heads_first, is_causal=causal).transpose(1, 2)

        return attend

    return make


def _flex(causal: bool) -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    masks: dict[int, object] = {}

    def attend(q, k, v):
        S = q.shape[1]
        if causal and S not in masks:
            masks[S] = create_block_mask(lambda b, h, i, j: i >= j, None, None, S, S, device=q.device)
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return compiled(*heads_first, block_mask=masks.get(S)).transpose(1, 2)

    return attend
