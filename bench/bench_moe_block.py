"""One Mixtral block of transformers with its experts run by transformers and by pyfast, forward + backward.

The router is the model's own in all of them. Operations counted: three products an expert row and pass, as many for
the gradient by the input and again by the weights.
"""

from __future__ import annotations

import pytest
import torch
from support import dtype_name
from torch import Tensor

pytest.importorskip("transformers.integrations.moe", reason="needs a transformers with an experts interface (5.0)")

from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from pyfast.integrations import transformers_experts

TOKENS, WIDTH, EXPERT_WIDTH, TOP_K = 512, 256, 512, 2
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def block_of(experts: int, dtype: torch.dtype) -> MixtralSparseMoeBlock:
    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=EXPERT_WIDTH, num_local_experts=experts, num_experts_per_tok=TOP_K
    )
    block = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return block.to(dtype)


@pytest.mark.benchmark(
    group="a Mixtral block of transformers, forward + backward, experts by pyfast and by transformers"
)
@pytest.mark.parametrize(
    "dtype,experts",
    [
        (torch.float32, 8),
        (torch.float32, 64),
        (torch.bfloat16, 8),
        pytest.param(torch.bfloat16, 64, marks=pytest.mark.full),
    ],
    ids=lambda value: dtype_name(value) if isinstance(value, torch.dtype) else None,
)
def bench_moe_block(race, dtype: torch.dtype, experts: int) -> None:
    """Experts; 512 tokens, width 256, expert width 512, top 2."""
    transformers_experts.register()
    block = block_of(experts, dtype)
    x = torch.randn(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    dy = torch.randn(1, TOKENS, WIDTH, dtype=dtype)
    inputs = (x, *block.parameters())

    def step(implementation: str) -> tuple[Tensor, ...]:
        block.experts.config._experts_implementation = implementation
        y = block(x)
        return (y, *torch.autograd.grad(y, inputs, dy))

    race(
        {
            "pyfast": lambda: step("pyfast"),
            "grouped_mm": lambda: step("grouped_mm"),
            "eager": lambda: step("eager"),
        },
        tolerance=TOLERANCE[dtype],
        flop=3 * 2.0 * TOKENS * TOP_K * 3 * WIDTH * EXPERT_WIDTH,
    )
