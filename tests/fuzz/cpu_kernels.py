"""Random shapes, strides and options for every CPU kernel of attention and of mixtures of experts, against plain torch.

    python tests/fuzz/cpu_kernels.py                                    # a minute of each
    python tests/fuzz/cpu_kernels.py --seconds 600 --seed 7 moe_mlp     # one of them, for longer
    python tests/fuzz/cpu_kernels.py --seed 7 --only 41 moe_mlp         # one case again

A case is a function of (seed, number) alone and is named when it fails. `sanitized.py` runs the same under address and
undefined-behaviour sanitizer.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from pyfast import _C, kernels, ops
from pyfast.kernels import cpu, plain, reference, reference_moe

DTYPES = {torch.float32: 2e-5, torch.float64: 1e-11, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Draw:
    """What a case is made from."""

    def __init__(self, seed: int, case: int) -> None:
        self.random = random.Random(seed * 1_000_003 + case)
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(40))
        self.dtype = self.random.choice(list(DTYPES))

    def size(self, most: int, least: int = 0) -> int:
        """Often at the borders of tiles, else anything."""
        near = [n for n in (least, 1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, most) if least <= n <= most]
        return self.random.choice(near) if self.random.random() < 0.4 else self.random.randint(least, most)

    def yes(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def tensor(self, *shape: int, dtype: torch.dtype | None = None, scale: float = 1.0) -> Tensor:
        """Normal numbers, dense or as a view with other strides into memory that ends where the view ends."""
        dtype = dtype or self.dtype
        values = (torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale).to(dtype)
        kind = self.random.randrange(4)
        if kind == 1 and len(shape) > 1:  # a transposed copy
            order = self.random.sample(range(len(shape)), len(shape))
            values = values.permute(order).contiguous().permute([order.index(i) for i in range(len(shape))])
        elif kind == 2 and values.numel():  # every row a few elements further, nothing behind the last one
            gap = self.random.randint(1, 9)
            strides, step = [], 1
            for length in reversed(shape):
                strides.insert(0, step)
                step = step * length + (gap if len(strides) == 1 else 0)
            last = sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
            values = torch.full((last + 1,), math.nan, dtype=dtype).as_strided(shape, strides).copy_(values)
        elif kind == 3 and values.numel():  # begins anywhere
            offset = self.random.randint(1, 5)
            memory = torch.full((offset + values.numel(),), math.nan, dtype=dtype)
            memory[offset:] = values.reshape(-1)
            values = memory[offset:].view(shape)
        return values

    def cuts(self, total: int, count: int, first: int = 0) -> list[int]:
        """Ascending, from `first` or later to `total` or earlier."""
        return sorted(self.random.randint(first, total) for _ in range(count + 1))


def close(what: str, actual: Tensor, expected: Tensor, tolerance: float) -> None:
    expected = expected.double()
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}")
    actual, infinite = actual.double(), expected.isinf()
    if not torch.equal(actual[infinite], expected[infinite]) or not actual[~infinite].isfinite().all():
        raise AssertionError(f"{what}: not finite where it should be, or the reverse")
    difference = (actual - expected)[~infinite].norm()
    size = expected[~infinite].norm() + 1e-3 * math.sqrt(expected.numel())
    if difference > tolerance * size:
        raise AssertionError(f"{what}: differs by {difference / size:.1e} of its norm, allowed {tolerance:.0e}")


def gradients(results: list[Tensor], leaves: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(results, leaves, upstream, allow_unused=True)
    return [torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)]


def both(draw: Draw, ours: Callable, theirs: Callable, inputs: dict[str, Tensor], slack: float = 1.0) -> None:
    """Compare results and gradients: `ours` on `inputs`, `theirs` on the same values in float64."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    results, expected = ours(**leaves), theirs(**wide)
    upstream = [torch.randn(r.shape, generator=draw.generator, dtype=torch.float64).to(r.dtype) for r in results]
    tolerance = DTYPES[draw.dtype] * slack
    for index, (result, other) in enumerate(zip(results, expected, strict=True)):
        close(f"result {index}", result.detach(), other.detach(), tolerance)
    grads = gradients(results, list(leaves.values()), upstream)
    finite = [torch.where(e.isinf(), torch.zeros_like(e), e) for e in expected]
    others = gradients(finite, list(wide.values()), [u.double() for u in upstream])
    for name, grad, other in zip(leaves, grads, others, strict=True):
        close(f"gradient of {name}", grad, other, 3 * tolerance)


# ---- attention -------------------------------------------------------------------------------------------------------


def attention_options(draw: Draw) -> dict:
    window = tuple(draw.random.choice([-1, 0, draw.random.randint(0, 70)]) for _ in range(2))
    return {
        "causal": draw.yes(),
        "window": window if draw.yes(0.4) else (-1, -1),
        "softcap": draw.random.choice([0.0, 0.0, 3.0]),
        "scale": draw.random.choice([None, 0.3]),
    }


def attention(draw: Draw) -> None:
    heads_k, group = draw.size(3, 1), draw.size(4, 1)
    D, Dv = draw.size(72, 1), draw.size(72, 1)
    if draw.yes(0.1):
        D = draw.size(256, 1)
    options = attention_options(draw)
    if draw.yes():
        shape_q, shape_k = (draw.size(2, 1), draw.size(100)), draw.size(130)
        shapes = [(*shape_q, heads_k * group, D), (shape_q[0], shape_k, heads_k, D), (shape_q[0], shape_k, heads_k, Dv)]
    else:
        documents, rows_q, rows_k = draw.size(5, 1), draw.size(120), draw.size(130)
        options["cu_seqlens_q"] = torch.tensor(draw.cuts(rows_q, documents), dtype=torch.int32)
        options["cu_seqlens_k"] = torch.tensor(draw.cuts(rows_k, documents), dtype=torch.int32)
        shapes = [(rows_q, heads_k * group, D), (rows_k, heads_k, D), (rows_k, heads_k, Dv)]
    inputs = {name: draw.tensor(*shape) for name, shape in zip("qkv", shapes, strict=True)}
    if draw.yes(0.3):
        inputs["sinks"] = draw.tensor(heads_k * group)
    both(
        draw,
        lambda **x: ops.attention(**x, **options, return_lse=True),
        lambda **x: reference.attention(**x, **options),
        inputs,
    )


def random_runs(draw: Draw, rows: int) -> Tensor:
    """Runs of at most `rows` rows: documents, padding, strides, empty ones, rows left over."""
    table, left = [], rows
    used: dict[int, int] = {}
    while left > 0 and draw.yes(0.85):
        length = min(left, draw.size(50))
        document, stride = draw.random.choice([-1, 0, 0, 1, 2]), draw.random.choice([1, 1, 2, 3])
        start = used.get(document, draw.random.randint(0, 20)) + draw.random.randint(0, 9)
        used[document] = start + length * stride
        table.append([document, start, length, stride])
        left -= length
    return torch.tensor(table, dtype=torch.int64).view(-1, 4)


def attention_state(draw: Draw) -> None:
    """Two shards of keys, one after the other, and the backward of each into buffers that hold something."""
    heads_k, group, D, Dv = draw.size(2, 1), draw.size(3, 1), draw.size(40, 1), draw.size(40, 1)
    rows_q, rows = draw.size(90), [draw.size(100), draw.size(100)]
    runs_q, runs = random_runs(draw, rows_q), [random_runs(draw, n) for n in rows]
    q, dout = draw.tensor(rows_q, heads_k * group, D), draw.tensor(rows_q, heads_k * group, Dv)
    keys, values = [draw.tensor(n, heads_k, D) for n in rows], [draw.tensor(n, heads_k, Dv) for n in rows]
    sinks = draw.tensor(heads_k * group) if draw.yes(0.3) else None
    causal, window, softcap = draw.yes(), (-1, -1), draw.random.choice([0.0, 2.0])
    if draw.yes(0.4):
        window = (draw.random.choice([-1, 0, 30]), draw.random.choice([-1, 0, 30]))
    options = (causal, 0.4, *window, softcap)
    answers = []
    for module, wide in ((cpu, False), (plain, True)):
        cast = (lambda x: x.double()) if wide else (lambda x: x)
        state = None
        for i in range(2):
            sink = None if sinks is None or i == 0 else cast(sinks)
            state = module.attention_state_forward(
                cast(q), cast(keys[i]), cast(values[i]), runs_q, runs[i], *options, sinks=sink, state=state
            )
        acc, lse = state
        delta = module.attention_delta(acc if wide else acc.to(q.dtype), cast(dout))
        sum_dtype = acc.dtype
        dq = torch.full(q.shape, 0.5, dtype=sum_dtype)
        results = [acc, lse, dq]
        for i in range(2):
            dk, dv = (torch.full(x.shape, 0.25, dtype=sum_dtype) for x in (keys[i], values[i]))
            wanted = (dq, dk if i or draw.dtype != torch.float32 else None, dv)
            tensors = (cast(dout), cast(q), cast(keys[i]), cast(values[i]))
            module.attention_state_backward(*tensors, lse, delta, runs_q, runs[i], *options, *wanted)
            results += [x for x in wanted[1:] if x is not None]
        answers.append(results)
    tolerance = DTYPES[draw.dtype]
    for index, (ours, theirs) in enumerate(zip(*answers, strict=True)):
        close(f"result {index}", ours, theirs, 3 * tolerance)


# ---- mixtures of experts ---------------------------------------------------------------------------------------------


def chosen_experts(draw: Draw, tokens: int, k: int, experts: int) -> Tensor:
    """Different experts a token, some dropped, some never chosen."""
    scores = torch.rand(tokens, experts, generator=draw.generator)
    if draw.yes(0.3):
        scores[:, experts // 2 + 1 :] -= 2  # crowded
    chosen = scores.topk(k, -1).indices.to(draw.random.choice([torch.int32, torch.int64]))
    dropped = torch.rand(tokens, k, generator=draw.generator) < draw.random.choice([0.0, 0.0, 0.3, 1.0])
    return chosen.masked_fill(dropped, -1)


def permutation(draw: Draw) -> None:
    tokens, experts, width = draw.size(300), draw.size(130, 1), draw.size(70, 1)
    k = draw.random.randint(1, min(8, experts))
    chosen = chosen_experts(draw, tokens, k, experts)
    ours, theirs = ops.row_map(chosen, experts), plain.row_map(chosen, experts)
    for name, a, b in zip(("offsets", "gather", "slot", "inverse"), ours, theirs, strict=False):
        if not torch.equal(a, b):
            raise AssertionError(f"row map: {name} differs")
    x, weights = draw.tensor(tokens, width), draw.tensor(tokens, k, dtype=torch.float32)
    weights = weights.double() if draw.dtype == torch.float64 else weights

    def run(x: Tensor, weights: Tensor) -> list[Tensor]:
        rows, row_map = ops.permute(x, chosen, experts)
        return [ops.unpermute(rows, row_map, weights)]

    kept = (chosen >= 0).unsqueeze(-1)
    both(draw, run, lambda x, weights: [(x.unsqueeze(1) * weights.unsqueeze(-1) * kept).sum(1)],
         {"x": x, "weights": weights})  # fmt: skip


def grouped_gemm(draw: Draw) -> None:
    rows, experts, K, N = draw.size(150), draw.size(9, 1), draw.size(80, 1), draw.size(80, 1)
    offsets = torch.tensor(draw.cuts(rows, experts), dtype=draw.random.choice([torch.int32, torch.int64]))
    transpose = draw.yes(0.4)
    x, w = draw.tensor(rows, N if transpose else K), draw.tensor(experts, N, K, scale=K**-0.5)
    inputs = {"x": x, "w": w}
    if draw.yes(0.4):
        inputs["bias"] = draw.tensor(experts, K if transpose else N)
    both(
        draw,
        lambda **t: [ops.grouped_gemm(t["x"], t["w"], offsets, transpose=transpose, bias=t.get("bias"))],
        lambda **t: [reference_moe.grouped_gemm(t["x"], t["w"], offsets, transpose=transpose, bias=t.get("bias"))],
        inputs,
    )


def moe_mlp(draw: Draw) -> None:
    tokens, experts, H, F = draw.size(90), draw.size(130, 1), draw.size(70, 1), draw.size(50, 1)
    k = draw.random.randint(1, min(8, experts))
    chosen = chosen_experts(draw, tokens, k, experts)
    wide = torch.float64 if draw.dtype == torch.float64 else torch.float32
    inputs = {
        "x": draw.tensor(tokens, H),
        "weights": draw.tensor(tokens, k, dtype=wide),
        "w_gate_up": draw.tensor(experts, 2 * F, H, scale=H**-0.5),
        "w_down": draw.tensor(experts, H, F, scale=F**-0.5),
    }
    recompute = draw.yes(0.3)
    both(
        draw,
        lambda x, weights, w_gate_up, w_down: [ops.moe_mlp(x, chosen, weights, w_gate_up, w_down, recompute=recompute)],
        lambda x, weights, w_gate_up, w_down: [reference_moe.moe_mlp(x, chosen, weights, w_gate_up, w_down)],
        inputs,
        slack=2.0,
    )
    main_gradients(draw, chosen, inputs)


def main_gradients(draw: Draw, chosen: Tensor, inputs: dict[str, Tensor]) -> None:
    """Added into buffers, now or by the deferred closure, is what autograd would have got."""
    leaves = {name: t.detach().requires_grad_() for name, t in inputs.items()}
    y = ops.moe_mlp(leaves["x"], chosen, *(leaves[n] for n in ("weights", "w_gate_up", "w_down")))
    upstream = torch.randn(y.shape, generator=draw.generator, dtype=torch.float64).to(y.dtype)
    expected = gradients([y], [leaves["w_gate_up"], leaves["w_down"]], [upstream])
    wide = torch.float64 if draw.dtype == torch.float64 else torch.float32
    buffers = tuple(torch.full(inputs[n].shape, 0.5, dtype=wide) for n in ("w_gate_up", "w_down"))
    later: list[Callable[[], None]] = []
    y = ops.moe_mlp(
        leaves["x"], chosen, *(leaves[n] for n in ("weights", "w_gate_up", "w_down")),
        main_grads=buffers, defer=later.append if draw.yes() else None,
    )  # fmt: skip
    y.backward(upstream)
    for run in later:
        run()
    for buffer, value in zip(buffers, expected, strict=True):
        close("main_grad", buffer - 0.5, value, 3 * DTYPES[draw.dtype])


def route(draw: Draw) -> None:
    tokens, groups = draw.size(200), draw.random.choice([1, 1, 2, 4])
    experts = groups * draw.random.choice([2, 3, 4, 8, 17, 32])
    topk_groups = draw.random.randint(1, groups)
    k = draw.random.randint(1, min(8, experts // groups * topk_groups))
    options: dict = {
        "score": draw.random.choice(["softmax", "sigmoid"]),
        "normalize": draw.yes(),
        "scale": draw.random.choice([1.0, 2.5]),
        "num_groups": groups,
        "topk_groups": topk_groups,
        "group_score": draw.random.choice(["top2", "max"]) if experts // groups >= 2 else "max",
        "z_loss": draw.yes(0.3),
        "valid": draw.random.choice([None, draw.random.randint(0, tokens)]),
    }
    if draw.yes(0.2) and options["score"] == "softmax":
        options["softmax_over"] = "chosen"
    if draw.yes(0.3):
        options["bias"] = draw.tensor(experts, dtype=torch.float32, scale=0.1).contiguous()
    if draw.yes(0.2):
        options.update(jitter=0.1, seed=draw.random.getrandbits(60), step=3)
    if draw.yes(0.3):
        options.update(
            capacity_factor=draw.random.choice([0.5, 1.0, 1.5]), drop=draw.random.choice(["position", "probability"])
        )
    if draw.yes(0.3):
        options["balance"] = "micro_batch"
    if groups == 1 and draw.yes(0.15):
        options.update(choice="expert_choice", softmax_over="all")
        for name in ("drop", "bias", "balance"):
            options.pop(name, None)
        options.setdefault("capacity_factor", 1.0)
    logits = draw.tensor(tokens, experts, scale=2.0)
    answers = []
    for module in (cpu, plain):
        with mock.patch.object(kernels, "for_device", lambda device, module=module: module):
            leaf = logits.detach().requires_grad_()
            routing = ops.route(leaf, k, **options)
            losses = [loss for loss in (routing.balance_loss, routing.z_loss) if loss is not None]
            total = (routing.weights * torch.linspace(-1, 1, max(1, routing.weights.numel())).view_as(routing.weights)
                     ).sum() if tokens else routing.weights.sum()  # fmt: skip
            (grad,) = gradients([total + sum(losses)], [leaf], [torch.ones_like(total)])
            answers.append((routing, losses, grad))
    (ours, our_losses, our_grad), (theirs, their_losses, their_grad) = answers
    for name in ("experts", "counts", "dropped", "load"):
        if not torch.equal(getattr(ours, name), getattr(theirs, name)):
            raise AssertionError(f"{name} differs")
    close("weights", ours.weights.detach(), theirs.weights.detach(), 1e-5)
    for a, b in zip(our_losses, their_losses, strict=True):
        close("a loss", a.detach(), b.detach(), 1e-5)
    close("gradient", our_grad, their_grad, DTYPES[draw.dtype])


CASES = {f.__name__: f for f in (attention, attention_state, permutation, grouped_gemm, moe_mlp, route)}


def run(name: str, seed: int, case: int) -> None:
    """One case; an error says which."""
    torch.set_num_threads(1 + case % 2)
    try:
        CASES[name](Draw(seed, case))
    except Exception as error:
        raise RuntimeError(f"{name}: --seed {seed} --only {case} {name}: {error}") from error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="for each kernel (default: 60)")
    parser.add_argument("--rounds", type=int, help="cases of each kernel, instead of --seconds")
    parser.add_argument("--seed", type=int, default=0, help="which cases (default: 0)")
    parser.add_argument("--only", type=int, help="this case alone")
    parser.add_argument("--library", help="kernels to load instead of the installed ones (see sanitized.py)")
    parser.add_argument("--widen", action="store_true", help="bfloat16 without the processor's dot product of it")
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(CASES)} (default: all)")
    arguments = parser.parse_args()
    unknown = set(arguments.kernels) - set(CASES)
    if unknown:
        parser.error(f"kernels: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if arguments.library is not None:
        pairs = "avx512bf16" in _C.supported_isas() and not arguments.widen
        _C.load(arguments.library, cpu._torch_library(), pairs)
    elif arguments.widen and "avx512" in cpu.available_isas():
        cpu.use_isa("avx512")
    for name in arguments.kernels or CASES:
        if arguments.only is not None:
            run(name, arguments.seed, arguments.only)
            continue
        case, end = 0, time.monotonic() + arguments.seconds
        while case < arguments.rounds if arguments.rounds is not None else time.monotonic() < end:
            run(name, arguments.seed, case)
            case += 1
        print(f"{name}: {case} cases", flush=True)


if __name__ == "__main__":
    sys.exit(main())
