"""Tile sizes of the attention kernels, one for each architecture, kernel and head size; nothing is tuned at run time.

tests/kernels/triton/test_attention_compile.py compiles them: no spilled registers, shared memory within
limits, tensor-core instructions. docs/kernels.md has what they need.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """Queries and keys of a block, of the side that is walked over where it is masked, warps, and blocks in flight."""

    block_q: int
    block_k: int
    block_masked: int
    num_warps: int
    num_stages: int


# Operands in three tf32 parts live in registers: small tiles; and see attention_tiles.products.
_FLOAT32 = {
    "forward": {64: Tiles(32, 32, 16, 4, 2), 128: Tiles(16, 32, 16, 8, 1), 256: Tiles(16, 32, 16, 8, 1)},
    "keys": {64: Tiles(32, 32, 16, 4, 2), 128: Tiles(16, 16, 16, 8, 1), 256: Tiles(16, 16, 16, 8, 1)},
    "queries": {64: Tiles(32, 16, 16, 4, 2), 128: Tiles(16, 16, 16, 8, 1), 256: Tiles(16, 16, 16, 8, 1)},
}

# bits of the dtype -> architecture -> kernel -> {largest padded head size: tiles}
TILES = {
    16: {
        80: {
            "forward": {64: Tiles(128, 64, 32, 8, 3), 128: Tiles(128, 64, 16, 8, 2), 256: Tiles(64, 32, 16, 8, 2)},
            "keys": {64: Tiles(64, 64, 32, 8, 2), 128: Tiles(32, 64, 16, 8, 2), 256: Tiles(16, 32, 16, 8, 2)},
            "queries": {64: Tiles(64, 64, 32, 4, 2), 128: Tiles(64, 32, 16, 8, 2), 256: Tiles(32, 32, 16, 8, 1)},
        },
        90: {
            "forward": {64: Tiles(128, 128, 64, 8, 3), 128: Tiles(128, 128, 64, 8, 2), 256: Tiles(64, 64, 32, 8, 2)},
            "keys": {64: Tiles(64, 128, 32, 8, 2), 128: Tiles(32, 128, 16, 8, 2), 256: Tiles(32, 64, 16, 8, 2)},
            "queries": {64: Tiles(128, 128, 32, 8, 2), 128: Tiles(128, 64, 32, 8, 2), 256: Tiles(64, 32, 16, 8, 2)},
        },
        100: {
            "forward": {64: Tiles(128, 128, 64, 8, 2), 128: Tiles(128, 128, 32, 8, 2), 256: Tiles(64, 32, 16, 8, 2)},
            "keys": {64: Tiles(64, 64, 32, 4, 2), 128: Tiles(32, 64, 16, 8, 2), 256: Tiles(32, 32, 16, 8, 1)},
            "queries": {64: Tiles(64, 64, 32, 8, 2), 128: Tiles(128, 32, 16, 8, 2), 256: Tiles(32, 32, 16, 8, 2)},
        },
    },
    32: dict.fromkeys((80, 90, 100), _FLOAT32),
}

# head size -> tiles of the forward with specialized warps (attention_specialized.py), for sm_90 in 16 bits. Nothing
# chooses it yet: bench/device.py measures it beside the above.
SPECIALIZED = {64: Tiles(128, 128, 128, 4, 2), 128: Tiles(128, 128, 128, 4, 2)}


def choose_tiles(arch: int, kernel: str, bits: int, descriptors: bool, width: int) -> Tiles:
    """The tiles of `kernel` ("forward", "keys", "queries") for head sizes padded to `width`.

    An architecture without a row of its own takes that of the one before it. Without descriptors the addresses of the
    blocks need registers of their own: then the smaller tiles of sm_80 are taken.
    """
    known = 80 if not descriptors else max(x for x in TILES[bits] if x <= max(arch, 80))
    table = TILES[bits][known][kernel]
    return table[min(size for size in table if size >= width)]
