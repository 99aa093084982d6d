"""Which sorted row stands for which slot of which token in a mixture of experts.

T tokens, K slots a token (slot t * K + k is token t's k-th expert), E experts, R = T * K sorted rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.ops.dispatch import Op


class RowMap(NamedTuple):
    """The slots of a batch sorted by (expert, slot), as int32 tensors that never leave the device.

    Expert e has the rows offsets[e] up to offsets[e + 1]. Rows from offsets[E] on belong to nobody: there are as many
    as there are dropped slots, so that shapes depend on T and K alone.
    """

    offsets: Tensor  # [E+1] first row of each expert, then the number of rows in use
    gather: Tensor  # [R] row -> token, -1 from offsets[E] on
    slot: Tensor  # [R] row -> slot, -1 from offsets[E] on
    inverse: Tensor  # [T*K] slot -> row, -1 for a dropped slot
    k: int | None = None  # slots a token, K


def row_map(experts: Tensor, num_experts: int) -> RowMap:
    """Sort the slots of `experts` by expert, slots of one expert in their order: a stable counting sort.

    The result is unique, so it is the same bytes on every device and for any number of threads.

    Args:
        experts: [T, K] int32 or int64, any strides: each token's experts, -1 for a dropped slot. An expert that stands
            in one token twice has two rows.
        num_experts: E, at least 1.

    Returns:
        RowMap of int32 tensors on the device of `experts`.

    Raises:
        TypeError, ValueError: naming the argument that does not fit; an id outside [-1, num_experts) among them (on a
            CUDA device nothing is read back: there such an id fails a device-side assertion).
    """
    check_experts(experts, num_experts)
    return RowMap(*_op(experts, num_experts), experts.shape[1])


def check_experts(experts: Tensor, num_experts: int) -> None:
    """Raise TypeError / ValueError unless `experts` is [T, K] of ids and its slots can be counted in int32."""
    if not isinstance(experts, Tensor) or experts.dtype not in (torch.int32, torch.int64):
        kind = experts.dtype if isinstance(experts, Tensor) else type(experts).__name__
        raise TypeError(f"experts is {kind}; an int32 or int64 tensor [tokens, experts a token] is needed")
    if experts.dim() != 2 or experts.shape[1] == 0:
        raise ValueError(
            f"experts has shape {tuple(experts.shape)}; it must be [tokens, experts a token], with at least one expert "
            "a token"
        )
    if isinstance(num_experts, bool) or not isinstance(num_experts, (int, torch.SymInt)):
        raise TypeError(f"num_experts is {num_experts!r}; an int is needed")
    if not 1 <= num_experts < 2**31 - 1:
        raise ValueError(f"num_experts is {num_experts}; allowed are 1 to {2**31 - 2}")
    if experts.shape[0] * experts.shape[1] >= 2**31:
        raise ValueError(
            f"experts has shape {tuple(experts.shape)}; rows are counted in int32, so fewer than 2^31 slots are "
            "allowed: split the batch"
        )


def _row_map(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return kernels.for_device(experts.device).row_map(experts, num_experts)


def _fake(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slots = experts.shape[0] * experts.shape[1]
    return tuple(experts.new_empty(size, dtype=torch.int32) for size in (num_experts + 1, slots, slots, slots))


_op = Op("row_map", "(Tensor experts, SymInt num_experts) -> (Tensor, Tensor, Tensor, Tensor)", _row_map, _fake)
