"""Collectives of the process group's own backend, for tensors that are not on the CPU (NCCL)."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

Finish = Callable[[], None]

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
# torch 2.13 renamed these two; the old names warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Native:
    """The backend's transport of one process group; the same methods as `Exchange`."""

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        self._process_group = process_group

    def all_reduce(self, tensor: Tensor, out: Tensor, op: str) -> Finish:
        if out.data_ptr() != tensor.data_ptr():
            out.copy_(tensor)
        work = dist.all_reduce(out, op=_OPERATIONS[op], group=self._process_group, async_op=True)
        return _finish(work)

    def all_gather(self, tensor: Tensor, out: Tensor) -> Finish:
        # flat on both sides: the backend checks the first dimension only when the ranks are stacked in it
        return _finish(_all_gather(out.view(-1), tensor.view(-1), group=self._process_group, async_op=True))

    def reduce_scatter(self, tensor: Tensor, out: Tensor) -> Finish:
        return _finish(_reduce_scatter(out.view(-1), tensor.view(-1), group=self._process_group, async_op=True))

    def all_to_all(self, tensor: Tensor, out: Tensor) -> Finish:
        rows = out.shape[0]  # equal blocks; 2-d, since the backend cuts the first dimension
        source, target = tensor.view(rows, -1), out.view(rows, -1)
        return _finish(dist.all_to_all_single(target, source, group=self._process_group, async_op=True))

    def broadcast(self, tensor: Tensor, src: int) -> Finish:
        return _finish(dist.broadcast(tensor, group_src=src, group=self._process_group, async_op=True))


def _finish(work: dist.Work) -> Finish:
    def finish() -> None:
        work.wait()

    return finish
