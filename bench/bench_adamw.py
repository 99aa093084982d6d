"""ops.adamw_ against torch.optim.AdamW(fused=True): one step over a flat parameter, and the whole step of a training
in bfloat16 with float32 masters.

For bfloat16 torch's moments have the parameter's dtype and there is no master: it moves fewer bytes (14 against 28 a
value) and does less. In `bench_training_step` it has float32 masters, and casts gradients to them and masters to
parameters, as it must.
"""

from __future__ import annotations

import pytest
import torch
from support import dtype_name
from torch import Tensor

from pyfast import ops
from pyfast.parallel import FlatBuckets, ParallelMesh, clip_coefficient
from pyfast.train.config import OptimizerConfig
from pyfast.train.optimizer import make_optimizer
from pyfast.train.parameter_groups import parameter_group

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# So high that a wrong update shows in the parameters, whose relative difference is checked.
LEARNING_RATE = 0.1
OPTIONS = {"betas": (0.9, 0.95), "weight_decay": 0.1}
FIRST_STEPS = 3  # at the first step AdamW's update is the gradient's sign: too little to compare
pytestmark = pytest.mark.benchmark(group="adamw_ against torch.optim.AdamW(fused=True)")


def ours(start: Tensor, grad: Tensor):
    """(a step, the bytes it must read and write)"""
    param, *moments = start.clone(), torch.zeros(start.shape), torch.zeros(start.shape)
    master = start.float() if start.dtype != torch.float32 else None
    steps = iter(range(1, 10**9))

    def step() -> list[Tensor]:
        ops.adamw_(param, grad, *moments, step=next(steps), learning_rate=LEARNING_RATE, master=master, **OPTIONS)
        return [param, *moments]

    state = moments + [param if master is None else master]
    written_only = 0 if master is None else param.nbytes
    return step, 2 * sum(t.nbytes for t in state) + grad.nbytes + written_only


def theirs(start: Tensor, grad: Tensor):
    parameter = torch.nn.Parameter(start.clone())
    parameter.grad = grad
    optimizer = torch.optim.AdamW([parameter], lr=LEARNING_RATE, fused=True, **OPTIONS)
    state = optimizer.state[parameter]

    def step() -> list[Tensor]:
        optimizer.step()
        return [parameter, state["exp_avg"], state["exp_avg_sq"]]

    return step


@pytest.mark.parametrize(
    "millions", [pytest.param(4, id="4Mi"), pytest.param(32, id="32Mi", marks=pytest.mark.full)]
)  # fmt: skip
@pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
def bench_adamw(race, dtype: torch.dtype, millions: int) -> None:
    start, grad = torch.randn(2, millions * 2**20).to(dtype)
    step, moved = ours(start, grad)
    candidates = {"pyfast": step, "torch": theirs(start, grad)}
    for function in candidates.values():
        for _ in range(FIRST_STEPS):
            function()
    race(candidates, tolerance=TOLERANCE[dtype], moved_bytes=moved, in_place=True)


CLIP = 1.0
WIDTH = 1024
# bytes that a step of ours must move for a value, by the dtype of the moments: gradient, moments, master, parameter
BYTES = {"float32": 4 + 16 + 8 + 2, "bfloat16": 4 + 8 + 8 + 2}


class Matrices(torch.nn.Module):
    """bfloat16 matrices, of `millions` x 2^20 values in all."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(WIDTH, WIDTH).bfloat16() for _ in range(millions))


def our_training_step(model: Matrices, grads: list[Tensor], moments: str, clip: bool):
    """Gradients lie in the buckets, in float32, as backward leaves them there."""
    config = OptimizerConfig(weight_decay=OPTIONS["weight_decay"], moments_dtype=moments)
    group_of = lambda name, p: parameter_group(name, p, config)  # noqa: E731
    buckets = FlatBuckets(model.named_parameters(), ParallelMesh.single(), group_of=group_of)
    for parameter, grad in zip(model.weights, grads, strict=True):
        buckets.main_grad(parameter).copy_(grad)
    optimizer = make_optimizer(buckets, config)

    def step() -> list[Tensor]:
        optimizer.step(LEARNING_RATE, clip_coefficient(buckets.grad_norm(), CLIP) if clip else 1.0)
        return list(model.weights)

    return step


def their_training_step(model: Matrices, grads: list[Tensor], clip: bool):
    """Gradients come in the parameters' bfloat16."""
    masters = [torch.nn.Parameter(p.detach().float()) for p in model.weights]
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, lr=LEARNING_RATE, fused=True, **OPTIONS)
    parameters, wide = [p.detach() for p in model.weights], [master.grad for master in masters]

    def step() -> list[Tensor]:
        torch._foreach_copy_(wide, grads)
        if clip:
            torch.nn.utils.clip_grad_norm_(masters, CLIP, foreach=True)
        optimizer.step()
        torch._foreach_copy_(parameters, [master.detach() for master in masters])
        return parameters

    return step


@pytest.mark.benchmark(group="a training step's optimizer, bfloat16 with float32 masters, against torch with its casts")
@pytest.mark.parametrize("millions", [pytest.param(16, id="16Mi"), pytest.param(64, id="64Mi", marks=pytest.mark.full)])
@pytest.mark.parametrize("clip", [False, True], ids=["", "clipped"])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"], ids=["moments float32", "moments bfloat16"])
def bench_training_step(race, moments: str, clip: bool, millions: int) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(WIDTH, WIDTH, generator=generator).bfloat16() for _ in range(millions)]
    torch.manual_seed(1)
    model = Matrices(millions)
    torch.manual_seed(1)
    theirs = their_training_step(Matrices(millions), grads, clip)
    candidates = {"pyfast": our_training_step(model, grads, moments, clip), "torch": theirs}
    for function in candidates.values():
        for _ in range(FIRST_STEPS):
            function()
    moved = (BYTES[moments] + 4 * clip) * millions * 2**20  # clipping reads the gradients once more
    race(candidates, tolerance=5e-3 if moments == "float32" else 2e-2, moved_bytes=moved)
