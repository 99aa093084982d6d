"""ZeRO: data-parallel ranks share out what each of them would otherwise hold in full.

    stage   parameters   gradients   optimizer state     what travels, of a model of N parameters on P ranks
    0       all          all         all                 an all-reduce of the gradients: 2 N (P-1)/P a rank
    1       all          all         1/P                 a reduce-scatter of the gradients, an all-gather of the
                                                         parameters: N (P-1)/P each
    2       all          1/P         1/P                 the same, the reduce-scatter in every micro-batch
    3       1/P          1/P         1/P                 the all-gather twice, in forward and in backward, of every
                                                         micro-batch (pyfast.parallel.zero3)

Each flat bucket is cut into P equal stretches, whatever the shapes of the parameters in it. A rank's optimizer updates
its own stretch (`Bucket.data_shard` from `Bucket.grad_shard`), and `update_parameters` sends it to the other ranks.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from pyfast.comm import Group, Work
from pyfast.parallel.buckets import DEFAULT_BUCKET_BYTES, Bucket, FlatBuckets
from pyfast.parallel.mesh import ParallelMesh

# Reductions of stage 2 that may be under way at once: each keeps a whole bucket of gradients in memory.
_IN_FLIGHT = 2


def make_buckets(
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    stage: int,
    group_of: Callable[[str, Parameter], Hashable] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    fill: Callable[[str, Tensor], None] | None = None,
    device: torch.device | str = "cpu",
    compression: str = "none",
) -> FlatBuckets:
    """The parameters of `model` in flat buckets that `stage` of ZeRO shares out over the data-parallel ranks.

    Arguments as `FlatBuckets` has them. fill, device: at stage 3, what gives parameters on the meta device their
    values, as (name, tensor of the local shape to write), and where they shall live. Raises ValueError for a stage that
    there is not, and for parameters on the meta device without `fill` or at another stage.
    """
    on_meta = next((name for name, p in model.named_parameters() if p.is_meta), None)
    if on_meta is not None and stage != 3:
        raise ValueError(f"model: parameter '{on_meta}' is on the meta device, which stage 3 alone takes")
    settings = {"group_of": group_of, "bucket_bytes": bucket_bytes, "compression": compression}
    if stage == 0:
        return FlatBuckets(model.named_parameters(), mesh, **settings)
    if stage == 3:
        from pyfast.parallel.zero3 import Zero3Buckets  # which is built on this file

        return Zero3Buckets(model, mesh, **settings, fill=fill, device=device)
    kinds = {1: Zero1Buckets, 2: Zero2Buckets}
    if stage not in kinds:
        raise ValueError(f"stage: is {stage!r}, must be 0, 1, 2 or 3")
    return kinds[stage](model, mesh, **settings)


class Zero1Buckets(FlatBuckets):
    """Stage 1: each rank updates its stretch of every bucket; the others' parameters come by all-gather.

    A bucket's gradients are reduce-scattered as its last one arrives. The all-gathers start in `update_parameters` and
    are waited for in the next forward, each when the first module that holds one of its parameters is called. A
    parameter that modules read from one another (a head's weight that the loss takes) is waited for at the first call
    of any module, until its own module has been called once. `start_micro_batch` waits for what is left.
    """

    stage = 1

    def __init__(self, model: nn.Module, mesh: ParallelMesh, **settings: Any) -> None:
        """settings: as `FlatBuckets` has them."""
        super().__init__(model.named_parameters(), mesh, **settings)
        self._watch(model)

    def _watch(self, model: nn.Module) -> None:
        self._gathers: list[tuple[Bucket, Work]] = []
        self._needs: dict[nn.Module, set[int]] = {}
        number = {bucket: index for index, bucket in enumerate(self.buckets)}
        for module in model.modules():
            owned = {number[self._slots[p].bucket] for p in module.parameters(recurse=False) if p in self._slots}
            if owned:
                self._needs[module] = owned
            self._hooks.append(module.register_forward_pre_hook(self._before_forward))
        self._never_called = set(self._needs)

    def start_micro_batch(self, *, last: bool) -> None:
        # also so that the order of all collectives is the same on ranks whose modules are called in different orders
        self.wait_for_parameters()
        super().start_micro_batch(last=last)

    def update_parameters(self) -> None:
        """Start to collect every rank's stretch of the parameters, those first that forward needs first."""
        self.wait_for_parameters()
        for bucket in reversed(self.buckets):
            if bucket.shard_group is not None:
                self._gathers.append((bucket, self._gather_bucket(bucket)))

    def wait_for_parameters(self) -> None:
        self._wait_for_gathers(len(self._gathers))

    def _gather_bucket(self, bucket: Bucket) -> Work:
        name = f"parameters bucket {self.buckets.index(bucket)} ({bucket.names[0]} ..)"
        rows = bucket.data.view(bucket.shard_group.size, -1)
        return bucket.shard_group.all_gather(bucket.data_shard, name=name, async_op=True, out=rows)

    def _before_forward(self, module: nn.Module, arguments: tuple) -> None:
        self._never_called.discard(module)
        if self._gathers:
            needed = set(self._needs.get(module, ())).union(*(self._needs[other] for other in self._never_called))
            waiting = [self.buckets.index(bucket) for bucket, _ in self._gathers]
            self._wait_for_gathers(max((i + 1 for i, index in enumerate(waiting) if index in needed), default=0))

    def _wait_for_gathers(self, count: int) -> None:
        """Wait for the first `count` gathers, in the order in which they were started."""
        done, self._gathers = self._gathers[:count], self._gathers[count:]
        for _, work in done:
            work.wait()

    def _first_group(self, bucket: Bucket) -> Group | None:
        return bucket.shard_group or super()._first_group(bucket)

    def _reduce(self, bucket: Bucket) -> Work:
        if bucket.shard_group is None:
            return super()._reduce(bucket)
        # in place: this rank's stretch of main_grad becomes the sum, the rest of it is the rank's own and left over
        return self._reduce_scatter(bucket, bucket.grad_shard)

    def _reduce_scatter(self, bucket: Bucket, out: Tensor) -> Work:
        if self._compression is not None:
            return self._compression.reduce_scatter(bucket, out, self._label(bucket))
        rows = bucket.main_grad.view(bucket.shard_group.size, -1)
        return bucket.shard_group.reduce_scatter(rows, name=self._label(bucket), async_op=True, out=out)


class Zero2Buckets(Zero1Buckets):
    """Stage 2: a bucket's gradients are whole only while they come in; then their sums are added to the ranks' shards.

    This happens in every micro-batch: a bucket that is not complete when its backward ends is reduced with zeros in
    place of what is missing.
    """

    stage = 2
    _reduces_every_micro_batch = True

    def start_micro_batch(self, *, last: bool) -> None:
        if self._in_step and not self._last:
            self._finish_reductions()
        if not self._in_step:
            for bucket in self.buckets:
                bucket.grad_shard.zero_()
        super().start_micro_batch(last=last)

    def _take_gradient(self, parameter: Parameter) -> None:
        bucket = self._slots[parameter].bucket
        if self._in_step and bucket.main_grad is None:
            self._open(bucket)
        super()._take_gradient(parameter)

    def _target(self, parameter: Parameter) -> tuple[Tensor, bool] | None:
        bucket = self._slots[parameter].bucket
        if self._in_step and bucket.main_grad is None and not self._slots[parameter].arrived:
            self._open(bucket)
        return super()._target(parameter)

    def _open(self, bucket: Bucket) -> None:
        """A whole buffer of gradients, for one micro-batch."""
        bucket.main_grad = torch.empty(bucket.numel, dtype=bucket.grad_shard.dtype, device=bucket.grad_shard.device)
        end = 0
        for slot in bucket.slots:
            bucket.main_grad[end : slot.place.start].zero_()
            slot.grad = bucket.main_grad[slot.place].view(slot.shape)
            end = slot.place.stop
        bucket.main_grad[end:].zero_()

    def _first_group(self, bucket: Bucket) -> Group | None:
        return bucket.shard_group

    def _launch(self, bucket: Bucket) -> None:
        if bucket.main_grad is None:
            self._open(bucket)
        super()._launch(bucket)
        waiting = len(self._launched) - _IN_FLIGHT - 1
        if waiting >= 0:
            self._launched[waiting][1].wait()

    def _reduce(self, bucket: Bucket) -> Work:
        if bucket.shard_group is None:
            work = Work(None, bucket.main_grad)
        else:
            work = self._reduce_scatter(bucket, torch.empty_like(bucket.grad_shard))

        def add() -> None:
            bucket.grad_shard.add_(work.wait())
            bucket.main_grad = None
            for slot in bucket.slots:
                slot.grad = None

        return Work(add, bucket.grad_shard)
