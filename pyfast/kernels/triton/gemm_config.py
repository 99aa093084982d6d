"""Tile sizes of the grouped GEMM kernels: one table, no tuning at run time.

A table instead of triton's autotuner: tuning keyed by shapes runs again for every new shape, allocates beside a
training step, and picks differently on every rank. Each entry is compiled for its architecture in
tests/kernels/triton/test_moe_compile.py: no spills, shared memory within limits, tensor cores
used.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GemmConfig:
    """block_m rows, block_n columns, block_k steps of the sum a turn; `stages` turns are loaded ahead; `resident`
    persistent programs share a multiprocessor."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    resident: int = 1


# With fewer rows an expert than this a tile of 128 rows is mostly padding.
FEW_ROWS = 192

# Exact float32 products run outside the tensor cores, in registers: small tiles.
FLOAT32 = GemmConfig(64, 32, 16, 8, 2, resident=2)

# Operands that cannot be copied in pieces of 16 bytes go through registers, an element at a time.
UNALIGNED = GemmConfig(64, 64, 32, 8, 2, resident=2)
UNALIGNED_SM_100 = GemmConfig(64, 64, 32, 4, 2, resident=2)  # of 8 warps the compiler gave each thread 64 registers
FLOAT32_UNALIGNED = GemmConfig(32, 32, 16, 8, 2, resident=4)

# (architecture, kernel) -> (config for many rows an expert, config for few). In `wgrad`, block_m and block_n cut the
# weight [N, K] and block_k is the step along the rows; `up` has two accumulators of block_n columns each.
TABLE: dict[tuple[str, str], tuple[GemmConfig, GemmConfig]] = {
    ("sm_90", "gemm"): (GemmConfig(128, 256, 64, 8, 3), GemmConfig(64, 256, 64, 4, 3)),
    ("sm_90", "up"): (GemmConfig(128, 128, 64, 8, 4), GemmConfig(64, 128, 64, 4, 4)),
    ("sm_90", "down_dgrad"): (GemmConfig(128, 128, 64, 8, 4), GemmConfig(64, 128, 64, 4, 4)),
    ("sm_90", "wgrad"): (GemmConfig(128, 256, 64, 8, 4), GemmConfig(128, 128, 64, 8, 4)),
    ("sm_100", "gemm"): (GemmConfig(128, 256, 64, 8, 3), GemmConfig(64, 128, 64, 4, 4)),
    ("sm_100", "up"): (GemmConfig(128, 128, 64, 8, 4), GemmConfig(64, 128, 64, 8, 4)),
    ("sm_100", "down_dgrad"): (GemmConfig(128, 128, 64, 8, 4), GemmConfig(64, 64, 64, 4, 4)),
    ("sm_100", "wgrad"): (GemmConfig(128, 256, 64, 8, 4), GemmConfig(128, 128, 64, 8, 4)),
    ("sm_80", "gemm"): (GemmConfig(128, 128, 32, 8, 4), GemmConfig(64, 128, 32, 4, 4, resident=2)),
    ("sm_80", "up"): (GemmConfig(128, 64, 32, 8, 4), GemmConfig(64, 64, 32, 4, 4, resident=2)),
    ("sm_80", "down_dgrad"): (GemmConfig(128, 64, 32, 8, 4), GemmConfig(64, 64, 32, 4, 4, resident=2)),
    ("sm_80", "wgrad"): (GemmConfig(128, 128, 32, 8, 4), GemmConfig(128, 64, 32, 8, 4)),
}


def architecture(capability: tuple[int, int]) -> str:
    """The column of the table for a compute capability: Hopper, data-centre Blackwell, and everything else."""
    return {9: "sm_90", 10: "sm_100"}.get(capability[0], "sm_80")


def gemm_config(
    kernel: str, dtype: torch.dtype, rows: int, experts: int, capability: tuple[int, int], aligned: bool
) -> GemmConfig:
    """The tile sizes of `kernel` for `rows` sorted rows of `experts` experts in `dtype`; aligned: see UNALIGNED."""
    if dtype == torch.float32:
        return FLOAT32 if aligned else FLOAT32_UNALIGNED
    if not aligned:
        return UNALIGNED_SM_100 if architecture(capability) == "sm_100" else UNALIGNED
    many, few = TABLE[architecture(capability), kernel]
    return many if rows >= FEW_ROWS * max(experts, 1) else few
