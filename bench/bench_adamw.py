"""ops.adamw_ against torch.optim.AdamW(fused=True): one step over a flat parameter.

For bfloat16 torch's moments have the parameter's dtype and there is no master: it moves fewer bytes (14 against 28 a
value) and does less.
"""

from __future__ import annotations

import pytest
import torch
from support import dtype_name
from torch import Tensor

from pyfast import ops

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
