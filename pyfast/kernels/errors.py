"""Messages about values that only the kernel sees, the same from every backend."""

from __future__ import annotations


def position_error(position: int, rows: int) -> str:
    """A rotary position that is not a row of the tables."""
    return (
        f"positions holds {position}; the cos and sin tables have {rows} rows, so 0 to {rows - 1} are allowed: "
        "build longer tables (max_positions)"
    )
