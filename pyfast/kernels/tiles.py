"""How many tiles a grouped product over sorted rows can need, known on the host without looking at the counts."""

from __future__ import annotations


def tile_bound(slots: int, num_experts: int, block: int) -> int:
    """The most tiles of `block` rows that `slots` sorted rows of `num_experts` experts can need.

    Every expert has at most one tile that is not full, and no expert without rows has a tile: at most
    slots // block full tiles, and min(num_experts, slots) others.
    """
    return slots // block + min(num_experts, slots)
