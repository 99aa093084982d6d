"""Flat buckets: parameters and their gradients in a few long buffers, reduced over the ranks while backward still runs.

Parameters that share dtype, device, reduction and optimizer group lie one after the other in one flat buffer, and so
do their gradients, in float32 (float64 for float64) whatever the parameters' dtype. A reduction, an optimizer or a
shard of either is then one call over one buffer. The order is that of backward (last parameter first), so that the
first bucket is full early.

Gradients are summed, never averaged: the loss is divided by the global token count before backward.
The scheme is that of PyTorch DDP's buckets and Megatron-Core's main_grad. This is stage 0 of ZeRO, every rank holds
everything; `pyfast.parallel.zero` has the stages that share it out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from pyfast import kernels
from pyfast.comm import Group, Work
from pyfast.nn.gradient_sink import set_sink
from pyfast.nn.layout import Layout, get_layout, set_layout
from pyfast.parallel.compression import COMPRESSIONS, Compression
from pyfast.parallel.flat_part import FlatPart
from pyfast.parallel.mesh import ParallelMesh

# Parameters start on 64-byte boundaries of the gradient buffer, and a bucket divides evenly over its ranks likewise.
_ALIGNMENT = 16
DEFAULT_BUCKET_BYTES = 16 << 20


@dataclass(eq=False)
class Bucket:
    """One flat stretch of parameters and their gradients.

    Attributes:
        names: parameter names, in the order in which they lie in the buffers.
        parameters: the parameters; each one's data is a view into `data`.
        offsets: where each parameter starts. Between parameters lie zeros, in every buffer, and zeros they stay under
            any optimizer that maps zero parameter, gradient and state to zero.
        numel: length of the buffers.
        data: [numel] in the parameters' dtype; its storage has no bytes while parameters are freed (stage 3).
        main_grad: [numel] float32, float64 for float64 parameters; None while there is none, at stages that keep only
            the shard of it.
        key: what `group_of` returned for these parameters.
        groups: the groups over which the gradient is summed, in this order; those of one rank left out.
        data_group: the one of `groups` whose ranks see different data; None if they are one rank.
        shard_group: the one of `groups` whose ranks share the buffers out, each taking an equal stretch; None: not
            sharded, and the stretch is all of it.
        shard: the stretch that this rank's optimizer updates.
        data_shard, grad_shard: that stretch of the parameters and of their gradient.
        share: (index, count) of the part of the shard that this rank contributes to a global sum.
    """

    names: list[str]
    parameters: list[Parameter]
    offsets: list[int]
    numel: int
    data: Tensor
    main_grad: Tensor | None
    key: Hashable
    groups: list[Group]
    data_group: Group | None
    shard_group: Group | None
    shard: slice
    data_shard: Tensor
    grad_shard: Tensor
    share: tuple[int, int]
    missing: int = 0
    slots: list[_Slot] = field(default_factory=list)

    def views(self, flat: Tensor) -> dict[str, Tensor | FlatPart]:
        """`flat`, a tensor like `data_shard`, by parameter name: views shaped like the parameters; what there is of
        each where the bucket is sharded."""
        if self.shard_group is None:
            return {slot.name: flat[slot.place].view(slot.shape) for slot in self.slots}
        return {slot.name: self._part(flat, slot) for slot in self.slots}

    def mine(self, slot: _Slot) -> slice:
        """The stretch of a parameter's place that lies in this rank's shard; empty if none does."""
        return slice(*_overlap(slot.place, self.shard))

    def gather_shards(self, flat: Tensor) -> Tensor:
        """`flat`, a tensor like `data_shard`, of all ranks: [numel]. Collective where the bucket is sharded."""
        if self.shard_group is None:
            return flat
        return self.shard_group.all_gather(flat, name=f"gather bucket ({self.names[0]} ..)").view(-1)

    def _part(self, flat: Tensor, slot: _Slot) -> FlatPart:
        mine = self.mine(slot)
        inside = (
            flat[mine.start - self.shard.start : mine.stop - self.shard.start] if mine.stop > mine.start else flat[:0]
        )
        return FlatPart(inside, mine.start - slot.place.start, tuple(slot.shape), slot.layout)


@dataclass(eq=False)
class _Slot:
    """A parameter's gradient in its bucket during one step."""

    name: str
    bucket: Bucket
    place: slice  # of the parameter in the buffers
    shape: torch.Size
    layout: Layout
    grad: Tensor | None  # the parameter's view of main_grad
    filled: bool = False  # written in this step; before that the buffer holds the last step's gradient
    arrived: bool = False  # written in the last micro-batch


class _Sink:
    """The `GradientSink` of one parameter."""

    def __init__(self, buckets: FlatBuckets, parameter: Parameter) -> None:
        self.target = partial(buckets._target, parameter)
        self.nothing = partial(buckets._nothing, parameter)


class FlatBuckets:
    """The parameters of a model in flat buckets, and the reduction of their gradients.

    A step is

        for index, batch in enumerate(micro_batches):
            buckets.start_micro_batch(last=index == len(micro_batches) - 1)
            loss(batch).backward()
            buckets.end_micro_batch()
        buckets.finish()                   # every bucket's main_grad is now the global sum
        norm = buckets.grad_norm()

    During backward each parameter's gradient is added into its bucket as it arrives (copied the first time, so nothing
    is zeroed) and `p.grad` is dropped. In the last micro-batch a bucket's all-reduce starts once it is complete, in the
    same order on every rank. Parameters that got no gradient in a step count as zero.

    The parameters' data is moved into the buckets: load values with `copy_`, and do not cast or move the model later.

    Args:
        named_parameters: (name, parameter) pairs; a parameter under two names (tied) counts once, frozen ones are left
            out.
        mesh: whose groups the gradients are summed over, by each parameter's `Layout`.
        group_of: (name, parameter) -> key of its optimizer group (weight decay or not); a bucket has one key.
        bucket_bytes: a bucket is closed when its gradients reach this many bytes.
        compression: "none", "bf16", "fp16" or "one_bit": what travels between data-parallel ranks for each float32
            value (`pyfast.parallel.compression`).
    """

    stage = 0  # of ZeRO
    _fill: Callable[[str, Tensor], None] | None = None  # gives parameters without memory their values
    _reduces_every_micro_batch = False

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        mesh: ParallelMesh,
        *,
        group_of: Callable[[str, Parameter], Hashable] | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        compression: str = "none",
    ) -> None:
        if bucket_bytes < 1:
            raise ValueError(f"bucket_bytes: is {bucket_bytes}, must be >= 1")
        if compression != "none" and mesh.divides_data:
            raise ValueError(f"compression: is {compression!r}, not supported on a mesh with zero_ranks; use 'none'")
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression: is {compression!r}, must be one of {', '.join(COMPRESSIONS)}")
        self._mesh = mesh
        self.buckets = [
            _make_bucket(members, mesh, key, self.stage, self._fill)
            for key, members in self._arrange(_partition(named_parameters, mesh, group_of, bucket_bytes, self._unit_of))
        ]
        self._compression = None if compression == "none" else Compression(compression)
        if self._compression is not None:
            for bucket in self.buckets:
                self._compression.prepare(bucket)
        self._slots: dict[Parameter, _Slot] = {}
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._hooks = []
        for bucket in self.buckets:
            for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
                self._slots[parameter] = slot
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))
                set_sink(parameter, _Sink(self, parameter))
        self._in_step = self._last = self._reducing = False
        self._launched: list[tuple[Bucket, Work]] = []

    def _unit_of(self, parameter: Parameter) -> Hashable:
        """Parameters of different units do not share a bucket."""
        return None

    def _arrange(self, partition: list[_Members]) -> list[_Members]:
        """The order of the buckets."""
        return partition

    @property
    def mesh(self) -> ParallelMesh:
        """The mesh that was given."""
        return self._mesh

    def start_micro_batch(self, *, last: bool) -> None:
        """Call before each backward; `last` says that gradients are complete after it."""
        if self._last:
            raise RuntimeError("start_micro_batch: the last micro-batch of this step has begun; call finish() first")
        self._in_step, self._last = True, last
        self._reducing = last or self._reduces_every_micro_batch
        if self._reducing:
            for bucket in self.buckets:
                bucket.missing = len(bucket.slots)

    def end_micro_batch(self) -> None:
        """Call after each backward: start the reductions that wait for gradients which will not come.

        The next call of another method does it too; but between backward and this call no other collective may run
        over the same ranks, of which some may still have reductions to start.
        """
        self._launch_rest()

    def _launch_rest(self) -> None:
        if self._reducing:
            for bucket in self.buckets[len(self._launched) :]:
                self._launch(bucket)

    def finish(self) -> None:
        """Start what is left of the reductions and wait for all; the gradients are then the global sums."""
        if not self._last:
            raise RuntimeError("finish: no micro-batch was started with last=True")
        self._finish_reductions()
        for bucket in self.buckets:
            for group in bucket.groups:
                if group is not self._first_group(bucket):
                    group.all_reduce(bucket.grad_shard, name=self._label(bucket))
        self._end_step()

    def discard(self) -> None:
        """Forget the gradients of a step that was begun and will not be finished. Alike on every rank."""
        if self._in_step:
            if self._reducing:
                self._finish_reductions()
            self._end_step()

    def _finish_reductions(self) -> None:
        self._launch_rest()
        for _, work in self._launched:
            work.wait()
        self._launched = []
        for slot in self._slots.values():
            slot.filled = slot.arrived = False

    def _end_step(self) -> None:
        self._in_step = self._last = self._reducing = False
        for slot in self._slots.values():
            slot.filled = slot.arrived = False

    def main_grad(self, parameter: Parameter) -> Tensor:
        """The gradient of `parameter`, shaped like it: a view into its bucket. Valid from `finish` to the next step.

        Only where gradients are not sharded (stage 0).
        """
        slot = self._slots[parameter]
        if slot.bucket.shard_group is not None:
            raise RuntimeError(f"main_grad of '{slot.name}': this rank has a part of it only; see gradient_parts")
        return slot.grad

    def gradient_parts(self) -> dict[str, Tensor | FlatPart]:
        """Parameter name -> this rank's part of the summed gradient: a tensor like the parameter where the bucket is
        not sharded. Valid from `finish` to the next step."""
        return {name: part for bucket in self.buckets for name, part in bucket.views(bucket.grad_shard).items()}

    def gather(self, name: str, part: Tensor | FlatPart) -> Tensor:
        """The whole tensor (as one tensor-parallel rank has it) from every rank's `part` of a tensor that lies in
        the bucket of parameter `name`, such as its gradient or its optimizer state. Collective where sharded."""
        if not isinstance(part, FlatPart):
            return part
        slot = next(slot for slot in self._slots.values() if slot.name == name)
        group, length = slot.bucket.shard_group, slot.bucket.numel // slot.bucket.shard_group.size
        places = [_overlap(slot.place, slice(rank * length, (rank + 1) * length)) for rank in range(group.size)]
        padded = part.tensor.new_zeros(max(end - begin for begin, end in places))
        padded[: part.tensor.numel()] = part.tensor
        pieces = group.all_gather(padded, name=f"gather {name}")
        return torch.cat([piece[: end - begin] for piece, (begin, end) in zip(pieces, places, strict=True)]).view(
            part.shape
        )

    def residuals(self) -> dict[str, dict[str, Tensor]]:
        """Kind -> parameter name -> what compression has not sent yet of this rank's gradients, shaped like the
        parameter: to be saved with the optimizer's state. Empty where nothing is left out."""
        return {} if self._compression is None else self._compression.residuals()

    def update_parameters(self) -> None:
        """Call after the shards of the parameters were changed, as an optimizer does: the other ranks get them."""

    def wait_for_parameters(self) -> None:
        """Return once every parameter has its new value: what to call before reading parameters outside a forward."""

    @contextmanager
    def whole_parameters(self, *, write: bool = False) -> Iterator[None]:
        """Within it every parameter can be read on every rank, as a collective; at stage 3 they take the memory of the
        whole model then. write: keep what is written to them, alike on all ranks; masters need `reset_masters` then."""
        self.wait_for_parameters()
        yield

    def parameter_parts(self) -> dict[str, Tensor | FlatPart]:
        """Parameter name -> what this rank keeps of it: the parameter, or its part where parameters are sharded."""
        self.wait_for_parameters()
        return {slot.name: parameter for parameter, slot in self._slots.items()}

    def named_whole(self, named_parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The parameters with their values, one after the other: a collective where they are sharded."""
        parts = self.parameter_parts()
        for name, parameter in named_parameters:
            part = parts.get(name, parameter)
            if isinstance(part, FlatPart):
                whole = self.gather(name, part)
                set_layout(whole, part.layout)
                yield name, whole
            else:
                yield name, parameter

    def grad_norm(self) -> float:
        """Euclidean norm of the whole model's gradient, each element counted once, the same number on every rank.

        A collective over the mesh; summed in float64. Ranks that hold the same gradients each sum a part of them.
        """
        total = torch.zeros((), dtype=torch.float64)
        for bucket in self.buckets:
            index, count = bucket.share
            part = torch.tensor_split(bucket.grad_shard, count)[index]
            total += kernels.for_device(part.device).sum_of_squares(part).cpu()
        world = self._mesh.group("world")
        if world.size > 1:
            device = self.buckets[0].grad_shard.device if self.buckets else torch.device("cpu")
            total = total.to(device)
            world.all_reduce(total, name="gradient norm")
        return math.sqrt(total.item())

    def close(self) -> None:
        """Take the hooks off the parameters, which stay views of their buckets."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        for parameter in self._slots:
            set_sink(parameter, None)

    def _take_gradient(self, parameter: Parameter) -> None:
        """The hot path, once per parameter and backward: one copy or add, nothing else."""
        slot = self._slots[parameter]
        grad, parameter.grad = parameter.grad, None
        if grad.is_sparse:
            grad = grad.to_dense()
        if not self._in_step or slot.arrived:
            raise RuntimeError(
                f"gradient of '{slot.name}': "
                + ("came a second time in one micro-batch" if slot.arrived else "came outside a step")
                + "; call start_micro_batch before every backward"
            )
        if slot.filled:
            if not self._is_nothing(grad):
                slot.grad.add_(grad)
        else:
            slot.grad.copy_(grad)
            slot.filled = True
        if self._reducing:
            slot.arrived = True
            slot.bucket.missing -= 1
            if slot.bucket.missing == 0:
                self._launch_complete()

    def _target(self, parameter: Parameter) -> tuple[Tensor, bool] | None:
        """See `GradientSink.target`. Outside a step the usual way leads to the error that says so."""
        slot = self._slots[parameter]
        if not self._in_step or slot.arrived:
            return None
        accumulate, slot.filled = slot.filled, True
        return slot.grad, accumulate

    def _nothing(self, parameter: Parameter) -> Tensor:
        """A view of zeros that all parameters of a dtype share; autograd keeps it as their gradient, without a copy."""
        kind, shape = (parameter.dtype, parameter.device), self._slots[parameter].shape
        if kind not in self._zeros:
            sizes = [slot.shape.numel() for p, slot in self._slots.items() if (p.dtype, p.device) == kind]
            self._zeros[kind] = torch.zeros(max(sizes), dtype=parameter.dtype, device=parameter.device)
        return self._zeros[kind][: shape.numel()].view(shape)

    def _is_nothing(self, grad: Tensor) -> bool:
        zeros = self._zeros.get((grad.dtype, grad.device))
        return zeros is not None and grad.data_ptr() == zeros.data_ptr()

    def _launch_complete(self) -> None:
        # strictly in order: ranks whose gradients arrive in different orders must still meet in the same collective
        while len(self._launched) < len(self.buckets) and self.buckets[len(self._launched)].missing == 0:
            self._launch(self.buckets[len(self._launched)])

    def _launch(self, bucket: Bucket) -> None:
        for slot in bucket.slots:
            slot.arrived = True
            if not slot.filled:
                slot.grad.zero_()
        self._launched.append((bucket, self._reduce(bucket)))

    def _first_group(self, bucket: Bucket) -> Group | None:
        """The group over which the bucket's gradient is summed while backward runs."""
        if self._compression is not None and bucket.data_group is not None:
            return bucket.data_group
        return bucket.groups[0] if bucket.groups else None

    def _reduce(self, bucket: Bucket) -> Work:
        """Start the sum over that group."""
        group = self._first_group(bucket)
        if group is None:
            return Work(None, bucket.main_grad)
        if self._compression is not None and group is bucket.data_group:
            return self._compression.all_reduce(bucket, self._label(bucket))
        return group.all_reduce(bucket.main_grad, name=self._label(bucket), async_op=True)

    def _label(self, bucket: Bucket) -> str:
        return f"gradients bucket {self.buckets.index(bucket)} ({bucket.names[0]} ..)"


def clip_coefficient(norm: float, max_norm: float) -> float:
    """The factor that brings a gradient of norm `norm` to at most `max_norm`: fold it into the optimizer step."""
    if not max_norm > 0:
        raise ValueError(f"max_norm: is {max_norm}, must be > 0")
    return max_norm / norm if norm > max_norm else 1.0


_Member = tuple[str, Parameter]
_Members = tuple[Hashable, list[_Member]]


def _partition(
    named_parameters: Iterable[_Member],
    mesh: ParallelMesh,
    group_of: Callable[[str, Parameter], Hashable] | None,
    bucket_bytes: int,
    unit_of: Callable[[Parameter], Hashable],
) -> list[_Members]:
    """Parameters that may share a bucket, in backward order, cut at `bucket_bytes`: the same names on every rank."""
    unique = {id(parameter): (name, parameter) for name, parameter in reversed(list(named_parameters))}
    open_buckets: dict[Hashable, list[_Member]] = {}
    sizes: dict[Hashable, int] = {}
    closed = []
    for name, parameter in unique.values():
        if not parameter.requires_grad:
            continue
        layout = get_layout(parameter)
        key = None if group_of is None else group_of(name, parameter)
        # by mesh dimensions, not by this rank's coordinates, which would cut buckets differently on different ranks
        spread = tuple(_split_over(mesh, names) for names in (layout.partial, layout.reduce, layout.replicated_over()))
        kind = (parameter.dtype, parameter.device, spread, unit_of(parameter), key)
        open_buckets.setdefault(kind, []).append((name, parameter))
        largest_local = layout.local_shape({shard.mesh_dim: mesh.size(shard.mesh_dim) for shard in layout.shards}, {})
        sizes[kind] = sizes.get(kind, 0) + math.prod(largest_local) * _grad_dtype(parameter).itemsize
        if sizes[kind] >= bucket_bytes:
            closed.append((key, open_buckets.pop(kind)))
            del sizes[kind]
    return closed + [(kind[-1], members) for kind, members in open_buckets.items()]


def _make_bucket(
    members: list[_Member],
    mesh: ParallelMesh,
    key: Hashable,
    stage: int,
    fill: Callable[[str, Tensor], None] | None,
) -> Bucket:
    """Move the parameters of `members` into one flat buffer; at stage 3 only this rank's shard of it stays."""
    first = members[0][1]
    layout = get_layout(first)
    groups = _reduction_groups(mesh, layout.partial, layout.reduce)
    data_group = groups[-1] if _shard_dimensions(mesh, layout.reduce) else None
    shared_out_over = _shard_dimensions(mesh, layout.reduce) if stage else ()
    shard_group = data_group if stage else None
    replicated = [name for name in layout.replicated_over() if name not in shared_out_over]
    if shard_group is not None and mesh.divides_data and set(layout.reduce) == {"dp", "cp"}:
        shard_group = mesh.group("zero")
        groups = [*groups[:-1], mesh.group("zero-across"), shard_group]
        replicated.append("zero-across")
    offsets, end = [], 0
    for _, parameter in members:
        offsets.append(end)
        end += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    unit = _ALIGNMENT * math.prod(group.size for group in groups)
    numel = -(-end // unit) * unit
    shard = _stretch(numel, shard_group)
    # zeros, not empty: the gaps between parameters are reduced and stepped with the rest
    data = torch.zeros(numel, dtype=first.dtype, device=first.device)
    kept = slice(0, numel) if stage < 2 else shard
    grad = torch.zeros(kept.stop - kept.start, dtype=_grad_dtype(first), device=first.device)
    bucket = Bucket(
        names=[name for name, _ in members],
        parameters=[parameter for _, parameter in members],
        offsets=offsets,
        numel=numel,
        data=data,
        main_grad=grad if stage < 2 else None,
        key=key,
        groups=groups,
        data_group=data_group,
        shard_group=shard_group,
        shard=shard,
        data_shard=data[shard],
        grad_shard=grad[shard] if stage < 2 else grad,
        share=_share(mesh, replicated),
    )
    for (name, parameter), offset in zip(members, offsets, strict=True):
        place = slice(offset, offset + parameter.numel())
        values = data[place].view(parameter.shape)
        if fill is not None and parameter.numel() and parameter.untyped_storage().nbytes() == 0:
            fill(name, values)
        else:
            values.copy_(parameter.detach())
        parameter.data = values
        slot = _Slot(name, bucket, place, parameter.shape, get_layout(parameter), None)
        if bucket.main_grad is not None:
            slot.grad = bucket.main_grad[place].view(parameter.shape)
        bucket.slots.append(slot)
    if stage == 3 and shard_group is not None:
        bucket.data_shard = data[shard].clone()
        data.untyped_storage().resize_(0)  # Zero3Buckets puts something in the parameters' place
    return bucket


def _overlap(place: slice, stretch: slice) -> tuple[int, int]:
    """Begin and end of the part of `place` that lies in `stretch`; equal, and within `place`, where none does."""
    begin = min(max(stretch.start, place.start), place.stop)
    return begin, max(min(stretch.stop, place.stop), begin)


def _stretch(numel: int, group: Group | None) -> slice:
    """This rank's part of a buffer that the ranks of `group` share out."""
    if group is None:
        return slice(0, numel)
    length = numel // group.size
    return slice(group.rank * length, (group.rank + 1) * length)


def _grad_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _split_over(mesh: ParallelMesh, names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` along which the mesh has more than one rank."""
    return tuple(name for name in names if mesh.size(name) > 1)


def _reduction_groups(mesh: ParallelMesh, partial: tuple[str, ...], reduce: tuple[str, ...]) -> list[Group]:
    joint = ("dp-cp",) if set(reduce) == {"dp", "cp"} else reduce
    return [mesh.group(name) for name in (*partial, *joint) if mesh.size(name) > 1]


def _shard_dimensions(mesh: ParallelMesh, reduce: tuple[str, ...]) -> tuple[str, ...]:
    """The mesh dimensions of the last group in `reduce`, whose ranks share a bucket out; none if they are one rank."""
    split = _split_over(mesh, reduce)
    return split if set(reduce) == {"dp", "cp"} else split[-1:]


def _share(mesh: ParallelMesh, names: Iterable[str]) -> tuple[int, int]:
    """This rank's index among the ranks with equal copies, and their number."""
    index, count = 0, 1
    for name in names:
        index, count = index * mesh.size(name) + mesh.coordinate(name), count * mesh.size(name)
    return index, count
