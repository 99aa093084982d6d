"""Experts forward + backward against a loop over unbound experts, F.grouped_mm and transformers' own loop.

Gradients go where training puts them: ours into main_grad buffers, torch into an existing .grad. The ratio to beat is
the one to the faster of torch (two ways). `--threads 2` for two threads; torch held to AVX2, where it has no bfloat16
instructions: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 pytest bench/bench_moe.py --sizes full
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support import copy_of
from torch import Tensor

from pyfast import ops

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}
TOKENS, TOP_K, WIDTH, FFN = 2048, 2, 512, 1024
pytestmark = pytest.mark.benchmark(group="experts T2048 H512 F1024 top-2, forward + backward, against torch")


@functools.cache
def mixtral_experts(experts: int) -> torch.nn.Module:
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(hidden_size=WIDTH, intermediate_size=FFN, num_local_experts=experts)
    config._experts_implementation = "eager"
    with torch.device("meta"):
        return mixtral.MixtralExperts(config)


class Problem:
    """One mixture: its inputs, and what each candidate does with them."""

    def __init__(self, experts: int, dtype: torch.dtype, skewed: bool = False) -> None:
        logits = torch.randn(TOKENS, experts) - (torch.arange(experts) * 4 / experts if skewed else 0)
        weights, self.experts = logits.softmax(-1).topk(TOP_K)
        self.x = torch.randn(TOKENS, WIDTH, dtype=dtype)
        self.weights = weights / weights.sum(-1, keepdim=True)
        self.w_gate_up = (torch.randn(experts, 2 * FFN, WIDTH) * WIDTH**-0.5).to(dtype)
        self.w_down = (torch.randn(experts, WIDTH, FFN) * FFN**-0.5).to(dtype)
        self.dy = torch.randn(TOKENS, WIDTH, dtype=dtype)

    def step(self, forward: Callable, *, main_grads: bool) -> Callable[[], list[Tensor]]:
        """forward(leaves) and backward; the results are y and the gradients that one step adds."""
        leaves = [t.detach().requires_grad_() for t in (self.x, self.weights, self.w_gate_up, self.w_down)]
        buffers = [torch.zeros(w.shape, dtype=torch.float32) if main_grads else torch.zeros_like(w) for w in leaves[2:]]
        if not main_grads:
            leaves[2].grad, leaves[3].grad = buffers
        calls = [0]

        def run() -> list[Tensor]:
            calls[0] += 1
            leaves[0].grad = leaves[1].grad = None
            y = forward(*leaves, *([tuple(buffers)] if main_grads else []))
            y.backward(self.dy)
            if calls[0] == 1:  # the agreement is checked on the first call: afterwards the buffers hold sums
                return [y, leaves[0].grad, leaves[1].grad, *buffers]
            return [y]

        return run

    def pyfast(self, x, weights, w_gate_up, w_down, main_grads) -> Tensor:
        return ops.moe_mlp(x, self.experts, weights, w_gate_up, w_down, main_grads=main_grads)

    def loop(self, x, weights, w_gate_up, w_down) -> Tensor:
        y = torch.zeros_like(x)
        for e, (up, down) in enumerate(zip(w_gate_up.unbind(), w_down.unbind(), strict=True)):
            token, slot = torch.where(self.experts == e)
            y = y.index_add(0, token, self._expert(x[token], up, down) * weights[token, slot, None].to(x.dtype))
        return y

    def stacked(self, x, weights, w_gate_up, w_down) -> Tensor:
        """As transformers' eager experts: the stacked weights are indexed once an expert."""
        y = torch.zeros_like(x)
        for e in range(w_gate_up.shape[0]):
            token, slot = torch.where(self.experts == e)
            row = self._expert(x[token], w_gate_up[e], w_down[e]) * weights[token, slot, None].to(x.dtype)
            y = y.index_add(0, token, row)
        return y

    def transformers(self, x, weights, w_gate_up, w_down) -> Tensor:
        """transformers' own eager experts, of Mixtral."""
        parameters = {"gate_up_proj": w_gate_up, "down_proj": w_down}
        return torch.func.functional_call(mixtral_experts(len(w_gate_up)), parameters, (x, self.experts, weights))

    @staticmethod
    def _expert(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        gate, up = F.linear(x, up).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    def grouped(self, x, weights, w_gate_up, w_down) -> Tensor:
        order = self.experts.flatten().argsort(stable=True)
        ends = torch.bincount(self.experts.flatten(), minlength=w_gate_up.shape[0]).cumsum(0).int()
        gate, up = F.grouped_mm(x[order // TOP_K], w_gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
        row = F.grouped_mm(F.silu(gate) * up, w_down.transpose(1, 2), offs=ends)
        row = row * weights.flatten()[order, None].to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // TOP_K, row)


def saved_bytes(run: Callable, parameters: list[int]) -> int:
    """What autograd keeps of one forward, each storage once, without the parameters."""
    kept = {}

    def note(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        run()
    return sum(storage.nbytes() for address, storage in kept.items() if address not in parameters)


def saved_share(problem: Problem) -> dict[str, str]:
    leaves = [t.detach().requires_grad_() for t in (problem.x, problem.weights, problem.w_gate_up, problem.w_down)]
    parameters = [w.untyped_storage().data_ptr() for w in leaves[2:]]
    ours = saved_bytes(lambda: problem.pyfast(*leaves, None), parameters)
    theirs = min(saved_bytes(lambda f=f: f(*leaves), parameters) for f in (problem.loop, problem.grouped))
    return {"kept for backward": f"{ours / 2**20:.1f} of {theirs / 2**20:.1f} MiB ({100 * ours / theirs:.0f} %)"}


def memory_time(traffic: float) -> str:
    """How long a copy takes that moves as many bytes as the weights (read twice) and their sums (read and written)."""
    copy_once, times = copy_of(traffic), []
    for _ in range(4):
        start = time.perf_counter()
        copy_once()
        times.append(time.perf_counter() - start)
    return f"{min(times[1:]) * 1e3:.0f} ms"


CASES = (
    pytest.param(8, torch.float32, False, id="E8-float32"),
    pytest.param(64, torch.float32, False, id="E64-float32", marks=pytest.mark.full),
    pytest.param(64, torch.float32, True, id="E64-skewed-float32", marks=pytest.mark.full),
    pytest.param(8, torch.bfloat16, False, id="E8-bfloat16", marks=pytest.mark.full),
    pytest.param(64, torch.bfloat16, False, id="E64-bfloat16", marks=pytest.mark.full),
)


@pytest.mark.parametrize(("experts", "dtype", "skewed"), CASES)
@pytest.mark.parametrize("peer", ["loop", "grouped"])
def bench_moe_mlp(race, peer: str, experts: int, dtype: torch.dtype, skewed: bool) -> None:
    problem = Problem(experts, dtype, skewed)
    candidates = {
        "pyfast": problem.step(problem.pyfast, main_grads=True),
        f"torch {peer}": problem.step(getattr(problem, peer), main_grads=False),
    }
    weights = problem.w_gate_up.numel() + problem.w_down.numel()
    traffic = weights * (2 * problem.x.element_size() + 8)  # read in both directions; float32 sums read and written
    race(
        candidates, tolerance=TOLERANCE[dtype], flop=18 * TOKENS * TOP_K * WIDTH * FFN,
        notes=lambda: saved_share(problem) | {"memory alone": memory_time(traffic)},
    )  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("experts", [8, 64])
def bench_stacked_loop(race, experts: int) -> None:
    problem = Problem(experts, torch.float32)
    candidates = {
        "pyfast": problem.step(problem.pyfast, main_grads=True),
        "torch stacked": problem.step(problem.stacked, main_grads=False),
        "transformers": problem.step(problem.transformers, main_grads=False),
    }
    race(candidates, tolerance=TOLERANCE[torch.float32], flop=18 * TOKENS * TOP_K * WIDTH * FFN)


@pytest.mark.full
def bench_bfloat16_error() -> None:
    """No race: fails unless our error against float64 is at most torch's, in y and in every gradient."""
    problem = Problem(8, torch.bfloat16)
    exact = copy.copy(problem)
    for name in ("x", "weights", "w_gate_up", "w_down", "dy"):
        setattr(exact, name, getattr(problem, name).double())
    truth = exact.step(exact.loop, main_grads=False)()
    ours = problem.step(problem.pyfast, main_grads=True)()
    theirs = problem.step(problem.loop, main_grads=False)()
    errors = [
        [((t.double() - want).norm() / want.norm()).item() for t, want in zip(results, truth, strict=True)]
        for results in (ours, theirs)
    ]
    print("\nerror in y, dx, dweights, dw_gate_up, dw_down:")
    for name, values in zip(("pyfast", "torch"), errors, strict=True):
        print(f"  {name:8}", *(f"{value:.1e}" for value in values))
    assert all(a <= b for a, b in zip(*errors, strict=True))
