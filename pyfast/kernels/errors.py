"""Messages about values that only the kernel sees, the same from every backend."""

from __future__ import annotations


def position_error(position: int, rows: int) -> str:
    """A rotary position that is not a row of the tables."""
    return (
        f"positions holds {position}; the cos and sin tables have {rows} rows, so 0 to {rows - 1} are allowed: "
        "build longer tables (max_positions)"
    )


def expert_error(expert: int, token: int, slot: int, num_experts: int) -> str:
    """An expert id that does not exist."""
    return (
        f"experts holds {expert} for token {token}, slot {slot}; num_experts is {num_experts}, so 0 to "
        f"{num_experts - 1} are allowed, and -1 for a dropped slot"
    )


def map_error(name: str, entry: int, index: int, limit: int) -> str:
    """A row map that does not belong to the tensors it is used with."""
    return (
        f"row_map.{name}[{index}] is {entry}; allowed here are -1 and 0 to {limit - 1}: use the row_map that permute "
        "or row_map returned for these tokens"
    )


def tiles_error(bound: int) -> str:
    """More tiles than the host made room for."""
    return f"offsets need more than {bound} tiles: they must ascend, and not pass the rows that the bound was made for"
