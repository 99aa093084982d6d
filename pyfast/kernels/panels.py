"""What a product over rows of several ranks waits for and raises; here no kernel is loaded by naming it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor


class Flags(NamedTuple):
    """What the product waits for and raises; addresses as `pyfast.comm.symmetric` gives them, 0: none."""

    epoch: int
    peers: Tensor  # int64 [P, 2]
    timeout_s: float
    arrives: Sequence[int]  # one for each rank
    leaves: Sequence[int]
