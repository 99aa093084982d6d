"""Maps and row movement of a mixture of experts, against what torch offers for each step.

Bytes moved: gathering reads x once for each slot and writes rows; summing reads rows and writes y; its backward reads
dy and rows once for each slot and writes drows.
"""

from __future__ import annotations

import pytest
import torch
from support import dtype_name
from torch import Tensor

from pyfast import ops
from pyfast.kernels import cpu

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2}
dtypes = pytest.mark.parametrize("dtype", TOLERANCE, ids=dtype_name)
CALLS = 20

# tokens, slots a token, experts, width
QUICK = [(2048, 2, 8, 512), (2048, 2, 64, 512)]
FULL = [(8192, 8, 128, 1024)]
shapes = pytest.mark.parametrize(
    "shape", [*QUICK, *(pytest.param(s, marks=pytest.mark.full) for s in FULL)], ids=lambda s: "T{}K{}E{}H{}".format(*s)
)


def experts_of(shape: tuple[int, int, int, int]) -> Tensor:
    """Different experts in each token, as a router gives them."""
    tokens, k, num_experts, _ = shape
    return torch.rand(tokens, num_experts).topk(k).indices


@pytest.mark.benchmark(group=f"row_map, {CALLS} calls, against a stable argsort and bincount")
@shapes
@pytest.mark.parametrize("ids", [torch.int32, torch.int64], ids=dtype_name)
def bench_row_map(race, shape: tuple[int, int, int, int], ids: torch.dtype) -> None:
    experts, num_experts, k = experts_of(shape).to(ids), shape[2], shape[1]

    def by_torch() -> tuple[Tensor, ...]:
        """What a mixture of experts in torch needs at least: order, tokens, counts (no inverse)."""
        flat = experts.flatten()
        order = flat.argsort(stable=True)
        return flat.bincount(minlength=num_experts).cumsum(0), order, order // k

    def ours() -> tuple[Tensor, ...]:
        offsets, gather, slot, _, _ = ops.row_map(experts, num_experts)
        return offsets[1:], slot, gather

    race({"pyfast": repeated(ours), "argsort": repeated(by_torch)}, tolerance=0.0)


def repeated(function):
    def run():
        for _ in range(CALLS):
            result = function()
        return [t.double() for t in result]

    return run


@pytest.mark.benchmark(group="gather into sorted order, against index_select")
@shapes
@dtypes
def bench_gather(race, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    tokens, k, num_experts, width = shape
    x, mapped = torch.randn(tokens, width).to(dtype), ops.row_map(experts_of(shape), num_experts)
    moved = 2 * tokens * k * width * x.element_size()
    race(
        {"pyfast": lambda: cpu.gather_rows(x, mapped.gather), "torch": lambda: x.index_select(0, mapped.gather)},
        tolerance=0.0, moved_bytes=moved,
    )  # fmt: skip


@pytest.mark.benchmark(group="unpermute with weights, forward + backward, against index_add / gathering and summing")
@shapes
@dtypes
def bench_unpermute(race, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """index_add is the usual way; unpermuting first and summing over k the better one in torch."""
    tokens, k, num_experts, width = shape
    mapped = ops.row_map(experts_of(shape), num_experts)
    gather, slot, inverse = mapped.gather.long(), mapped.slot.long(), mapped.inverse.long()
    rows = torch.randn(tokens * k, width).to(dtype).requires_grad_()
    weights, dy = torch.rand(tokens, k, requires_grad=True), torch.randn(tokens, width).to(dtype)

    def index_add(rows: Tensor, weights: Tensor) -> Tensor:
        scaled = rows.float() * weights.flatten()[slot][:, None]
        return torch.zeros(tokens, width).index_add(0, gather, scaled).to(dtype)

    def gather_and_sum(rows: Tensor, weights: Tensor) -> Tensor:
        return torch.einsum("tkh,tk->th", rows[inverse].view(tokens, k, width).float(), weights).to(dtype)

    def step(function):
        return lambda: (y := function(rows, weights), *torch.autograd.grad(y, (rows, weights), dy))

    race(
        {
            "pyfast": step(lambda rows, weights: ops.unpermute(rows, mapped, weights)),
            "index_add": step(index_add), "gather, sum": step(gather_and_sum),
        },
        tolerance=TOLERANCE[dtype], moved_bytes=(4 * k + 1) * tokens * width * rows.element_size(),
    )  # fmt: skip
