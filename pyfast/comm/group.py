"""Groups: an ordered set of ranks that exchange tensors. Every collective of the package goes through one.

A group of one rank needs no torch.distributed and sends nothing. CPU tensors travel by this package's own transports,
others by the process group's backend. The result has the same bits on every rank; CPU sums run in rank order.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pyfast.comm.bootstrap import world_store
from pyfast.comm.exchange import Exchange
from pyfast.comm.failure import Place, describe_absent
from pyfast.comm.native import Native
from pyfast.comm.record import Event, emit, recording
from pyfast.comm.shared_memory import SharedMemory
from pyfast.comm.symmetric import SymmetricMemory

_REDUCTIONS = ("sum", "max")
_SIGNATURE_BYTES = 512
# Process group names, unique in a process as torch's own registry of them is, to the groups alive.
_NAMED: weakref.WeakValueDictionary[str, Group] = weakref.WeakValueDictionary()


class Work:
    """A collective in flight. `wait()` completes it and returns its result; further calls return it again.

    Operations of one group must be waited for in the order in which they were started, alike on every rank.
    """

    def __init__(self, finish: Callable[[], None] | None, result: Tensor) -> None:
        self._finish = finish
        self._result = result

    def wait(self) -> Tensor:
        """Block until the result is complete."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        return self._result


class _Lane:
    """What groups over the same ranks and process group share: their transports and the count of collectives."""

    def __init__(
        self, process_group: dist.ProcessGroup, ranks: tuple[int, ...], rank: int, timeout_s: float, shared: bool
    ) -> None:
        self._place = (process_group, ranks, rank, timeout_s)
        self._try_shared = shared
        self._cpu: Exchange | SharedMemory | None = None
        self._native = Native(process_group)
        self._symmetric: SymmetricMemory | None = None
        self._tried_symmetric = not shared
        self.sequence = 0

    def transport(self, tensor: Tensor) -> Exchange | SharedMemory | Native:
        """The way `tensor` travels. The first call for a CPU tensor is collective: the ranks look for shared memory."""
        if tensor.device.type != "cpu":
            return self._native
        if self._cpu is None:
            process_group, ranks, rank, timeout_s = self._place
            shared = SharedMemory.connect(process_group, ranks, rank, timeout_s) if self._try_shared else None
            self._cpu = shared or Exchange(process_group, rank, len(ranks), timeout_s)
        return self._cpu

    def symmetric(self) -> SymmetricMemory | None:
        """Memory that all ranks map, if they are on one host; the first call is collective."""
        if not self._tried_symmetric:
            self._symmetric = SymmetricMemory.connect(*self._place)
            self._tried_symmetric = True
        return self._symmetric

    def abandon(self) -> None:
        """After a failure: let waiting peers fail too."""
        if self._symmetric is not None:
            self._symmetric.abandon()
        if isinstance(self._cpu, SharedMemory):
            self._cpu.abandon()


class Group:
    """An ordered set of ranks that exchange tensors.

    Make one with `Group.single`, `Group.create` or `Group.wrap`; a `ParallelMesh` makes those of its dimensions.
    Every collective takes a `name` that says what it is for ("layer 3 attention.output").

    Attributes:
        name: what the group is ("tp").
        ranks: global ranks in group order.
        rank: this process's index in `ranks`.
        size: number of ranks.
        process_group: the torch process group; None when `size` is 1.
    """

    def __init__(
        self,
        name: str,
        ranks: Sequence[int],
        rank: int,
        process_group: dist.ProcessGroup | None,
        *,
        timeout_s: float = 600.0,
        checked: bool = False,
        shared_memory: bool = True,
    ) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self.rank = rank
        self.size = len(self.ranks)
        self.process_group = process_group
        self.timeout_s = timeout_s
        self.checked = checked
        if self.size > 1 and process_group is None:
            raise ValueError(f"process_group: is None for group '{name}' of {self.size} ranks")
        self._lane = None
        if process_group is not None:
            self._lane = _Lane(process_group, self.ranks, rank, timeout_s, shared_memory)
            _NAMED[process_group.group_name] = self

    @classmethod
    def single(cls, name: str = "single", *, rank: int = 0) -> Group:
        """The group of this process alone (global rank `rank`): every collective is a no-op or a copy."""
        return cls(name, (rank,), 0, None)

    @classmethod
    def create(
        cls,
        name: str,
        ranks: Sequence[int],
        *,
        rank: int,
        timeout_s: float | None = None,
        checked: bool = False,
        shared_memory: bool = True,
    ) -> Group | None:
        """A new group over the global `ranks`, None on ranks outside it.

        Collective over *all* ranks of the job, which must create the same groups in the same order; only a group of
        one rank needs no partner.

        Args:
            rank: this process's global rank.
            timeout_s: seconds a collective may wait; None: as given to `bootstrap.initialize`.
            checked: exchange a signature before every collective, so that ranks that disagree on operation, name,
                shape or dtype raise the same ValueError instead of corrupting each other (a round trip per collective:
                for tests and debugging).
            shared_memory: exchange CPU tensors through shared memory when all ranks are on one host.
        """
        ranks = tuple(ranks)
        if len(set(ranks)) < len(ranks) or not ranks:
            raise ValueError(f"ranks: is {ranks}, must be one or more different ranks")
        if len(ranks) == 1:
            return cls.single(name, rank=rank) if ranks[0] == rank else None
        if not dist.is_initialized():
            raise RuntimeError(
                f"group '{name}' of ranks {ranks} needs torch.distributed: call pyfast.comm.bootstrap.initialize first"
            )
        timeout_s = _world_timeout() if timeout_s is None else timeout_s
        process_group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), group_desc=name)
        if rank not in ranks:
            return None
        # new_group sorts the ranks; the order of a group is the order of its process group
        return cls(
            name,
            sorted(ranks),
            sorted(ranks).index(rank),
            process_group,
            timeout_s=timeout_s,
            checked=checked,
            shared_memory=shared_memory,
        )

    @classmethod
    def wrap(cls, group: Group | dist.ProcessGroup | None, name: str = "group") -> Group:
        """A Group from what an op accepts: a Group (returned as it is), a torch process group, or None (one rank).

        A torch process group becomes the Group made from it, while that lives, else a new one. New ones of a process
        group in use must not have collectives in flight at the same time.
        """
        if isinstance(group, Group):
            return group
        if group is None:
            return cls.single(name)
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group: is a {type(group).__name__}, must be a pyfast Group, a torch ProcessGroup or None")
        known = _NAMED.get(group.group_name)
        # names come again after the job's groups were destroyed and made anew
        if known is not None and known.process_group is group:
            return known
        ranks = dist.get_process_group_ranks(group)
        rank = dist.get_rank(group)
        if len(ranks) == 1:
            return cls.single(name, rank=ranks[0])
        # perhaps wrapped anew for every call: not worth looking for shared memory each time
        return cls(name, ranks, rank, group, timeout_s=_world_timeout(group), shared_memory=False)

    @classmethod
    def named(cls, process_group_name: str) -> Group:
        """The group whose process group has this name (`process_group.group_name`): how the schema of an op holds one.

        The Group made last for that process group, while it lives, so that both use one channel; else a new wrap.
        """
        return cls.wrap(dist.distributed_c10d._resolve_process_group(process_group_name))

    def renamed(self, name: str) -> Group:
        """The same ranks and the same channel under another name (the mesh dimension "dp-cp" when cp is 1)."""
        other = object.__new__(Group)
        other.__dict__.update(self.__dict__, name=name)
        return other

    def __repr__(self) -> str:
        return f"Group({self.name!r}, ranks={self.ranks}, rank={self.rank})"

    # --- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(
        self, tensor: Tensor, *, name: str, op: str = "sum", async_op: bool = False, out: Tensor | None = None
    ) -> Work | None:
        """Sum (op="sum") or maximum (op="max") of `tensor` over the ranks, in place unless `out` is given.

        Sums run in rank order, half precision in float32; the result has the same bits on every rank.

        Args:
            tensor: any shape, equal on all ranks. With `async_op` it must not change until `wait()`.
            out: contiguous tensor like `tensor` that receives the result; `tensor` is then left alone.

        Returns:
            None, or with `async_op` a Work whose `wait()` completes the result.
        """
        if op not in _REDUCTIONS:
            raise ValueError(f"op: is {op!r}, must be one of {_REDUCTIONS}")
        tensor, target = tensor.detach(), tensor if out is None else out
        target = target.detach()
        _check_out("out", target, tuple(tensor.shape), tensor, contiguous=out is not None)
        if self.size == 1:
            return _done(_copy_into(target, tensor), async_op)
        # a transport wants contiguous memory; a strided tensor goes through a copy and back
        source = tensor.contiguous()
        result = target if target.is_contiguous() else source
        finish = self._start("all_reduce", name, source, lambda way: way.all_reduce(source, result, op), detail=op)
        if result is target:
            return self._complete(finish, target, async_op)
        return self._complete(_then(finish, lambda: target.copy_(result)), target, async_op)

    def all_gather(
        self, tensor: Tensor, *, name: str, async_op: bool = False, out: Tensor | None = None
    ) -> Tensor | Work:
        """Every rank's `tensor` (equal shapes) stacked in group order: [P, *shape], into `out` when given.

        With `async_op` a Work whose `wait()` returns the result.
        """
        source = tensor.detach().contiguous()
        shape = (self.size, *tensor.shape)
        if out is None:
            out = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        target = out.detach()
        _check_out("out", target, shape, tensor, contiguous=True)
        if self.size == 1:
            target[0].copy_(source)
            return _done(out, async_op) or out
        finish = self._start("all_gather", name, source, lambda way: way.all_gather(source, target))
        return self._complete(finish, out, async_op) or out

    def reduce_scatter(
        self, tensor: Tensor, *, name: str, async_op: bool = False, out: Tensor | None = None
    ) -> Tensor | Work:
        """Sum over the ranks of their `tensor` [P, *shape], of which this rank keeps block `rank`: [*shape].

        Summed in rank order, half precision in float32. With `async_op` a Work whose `wait()` returns the result.
        """
        self._check_blocks(tensor)
        source = tensor.detach().contiguous()
        if out is None:
            out = torch.empty(tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
        target = out.detach()
        _check_out("out", target, tuple(tensor.shape[1:]), tensor, contiguous=True)
        if self.size == 1:
            target.copy_(source[0])
            return _done(out, async_op) or out
        finish = self._start("reduce_scatter", name, source, lambda way: way.reduce_scatter(source, target))
        return self._complete(finish, out, async_op) or out

    def all_to_all(
        self, tensor: Tensor, *, name: str, async_op: bool = False, out: Tensor | None = None
    ) -> Tensor | Work:
        """Block p of `tensor` [P, *shape] goes to rank p; the result [P, *shape] has rank p's block for this one at p.

        With `async_op` a Work whose `wait()` returns the result.
        """
        self._check_blocks(tensor)
        source = tensor.detach().contiguous()
        if out is None:
            out = torch.empty_like(source)
        target = out.detach()
        _check_out("out", target, tuple(tensor.shape), tensor, contiguous=True)
        if self.size == 1:
            target.copy_(source)
            return _done(out, async_op) or out
        finish = self._start("all_to_all", name, source, lambda way: way.all_to_all(source, target))
        return self._complete(finish, out, async_op) or out

    def _check_blocks(self, tensor: Tensor) -> None:
        if tensor.dim() == 0 or tensor.shape[0] != self.size:
            raise ValueError(
                f"tensor: has shape {tuple(tensor.shape)}, its first dimension must be the {self.size} ranks of group "
                f"'{self.name}'"
            )

    def broadcast(self, tensor: Tensor, *, src: int, name: str) -> None:
        """Overwrite `tensor` with that of the rank at index `src` of the group."""
        if not 0 <= src < self.size:
            raise ValueError(f"src: is {src}, must be an index of group '{self.name}', 0..{self.size - 1}")
        if self.size == 1:
            return
        target = tensor.detach()
        buffer = target.contiguous()
        self._start("broadcast", name, buffer, lambda way: way.broadcast(buffer, src), detail=f"src {src}")()
        if buffer.data_ptr() != target.data_ptr():
            target.copy_(buffer)

    def barrier(self, *, name: str) -> None:
        """Return once every rank of the group has called it."""
        if self.size == 1:
            return
        token = torch.zeros(1, dtype=torch.uint8, device=self._device())
        gathered = torch.zeros(self.size, 1, dtype=torch.uint8, device=token.device)
        self._start("barrier", name, token, lambda way: way.all_gather(token, gathered), payload=False)()

    def all_gather_object(self, obj: Any, *, name: str) -> list[Any]:
        """Every rank's `obj` (picklable, small), in group order."""
        if self.size == 1:
            return [obj]
        gathered: list[Any] = [None] * self.size

        def start(_: Any) -> Callable[[], None]:
            return lambda: dist.all_gather_object(gathered, obj, group=self.process_group)

        self._start("all_gather_object", name, torch.empty(0, device=self._device()), start, payload=False)()
        return gathered

    # --- operations that move data themselves ------------------------------------------------------------------------

    def symmetric(self) -> SymmetricMemory | None:
        """Memory that every rank of the group reads in place; None if they are not all on one host, or on GPUs.

        The first call is collective.
        """
        return None if self._lane is None else self._lane.symmetric()

    def announce(self, operation: str, name: str, tensor: Tensor) -> Place:
        """Count and record an operation that moves `tensor` through symmetric memory; its steps go through `guard`."""
        self._lane.sequence += 1
        if recording():
            dtype = str(tensor.dtype).removeprefix("torch.")
            emit(Event(operation, name, self.name, tensor.nbytes, dtype, tuple(tensor.shape)))
        return Place(operation, name, self.name, self.ranks, self._lane.sequence)

    def guard(self, place: Place, step: Callable[[], Any]) -> Any:
        """Run a step of an announced operation: its failure names operation, group and the ranks that are missing."""
        return self._run(step, place)

    # --- one collective, from its name to its failure ----------------------------------------------------------------

    def _start(
        self,
        operation: str,
        name: str,
        tensor: Tensor,
        start: Callable[[Any], Callable[[], None]],
        detail: str = "",
        payload: bool = True,
    ) -> Callable[[], None]:
        """Begin a collective on the transport for `tensor`; the returned function completes it or raises by name."""
        lane = self._lane
        lane.sequence += 1
        place = Place(operation, name, self.name, self.ranks, lane.sequence)
        if recording():
            shape, size = (tuple(tensor.shape), tensor.nbytes) if payload else ((), 0)
            emit(Event(operation, name, self.name, size, str(tensor.dtype).removeprefix("torch."), shape))
        if self.checked:
            self._run(lambda: self._compare_signatures(place, tensor, detail), place)
        finish = self._run(lambda: start(lane.transport(tensor)), place)
        return lambda: self._run(finish, place)

    def _complete(self, finish: Callable[[], None], result: Tensor, async_op: bool) -> Work | None:
        if async_op:
            return Work(finish, result)
        finish()
        return None

    def _run(self, step: Callable[[], Any], place: Place) -> Any:
        """Run one step of a collective; its failure names operation, group and the ranks that are missing."""
        try:
            return step()
        except RuntimeError as error:
            self._lane.abandon()
            absent = describe_absent(world_store(), self.ranks[self.rank], place)
            raise RuntimeError(
                f"{place.operation} '{place.name}' of group '{self.name}' (ranks {list(self.ranks)}) failed on rank "
                f"{self.ranks[self.rank]}, timeout {self.timeout_s:g} s. {absent} Cause: {error} "
                "The group cannot be used any more: end this process and resume from the last checkpoint."
            ) from error

    def _compare_signatures(self, place: Place, tensor: Tensor, detail: str) -> None:
        text = " ".join(
            [place.operation, f"'{place.name}'", detail, str(tensor.dtype), str(list(tensor.shape)), tensor.device.type]
        )
        encoded = text.encode()
        if len(encoded) > _SIGNATURE_BYTES:
            digest = hashlib.sha256(encoded).hexdigest().encode()
            encoded = encoded[: _SIGNATURE_BYTES - len(digest)] + digest
        # spaces, not uninitialised bytes, after the text
        token = torch.frombuffer(bytearray(encoded.ljust(_SIGNATURE_BYTES)), dtype=torch.uint8).to(self._device())
        gathered = torch.zeros(self.size, _SIGNATURE_BYTES, dtype=torch.uint8, device=token.device)
        self._lane.transport(token).all_gather(token, gathered)()
        if (gathered == gathered[0]).all():
            return
        texts = [bytes(row.tolist()).decode(errors="replace").rstrip() for row in gathered.cpu()]
        calls = "; ".join(f"rank {rank}: {call}" for rank, call in zip(self.ranks, texts, strict=True))
        raise ValueError(f"the ranks of group '{self.name}' disagree on a collective. {calls}")

    def _device(self) -> torch.device:
        """A device on which the process group can exchange small tensors."""
        kinds = {device.type for device in self.process_group._device_types}
        return torch.device("cpu") if "cpu" in kinds else torch.device("cuda", torch.cuda.current_device())


def _copy_into(target: Tensor, source: Tensor) -> Tensor:
    # in place there is nothing to do, and a copy onto itself costs time
    return target if target.data_ptr() == source.data_ptr() else target.copy_(source)


def _done(result: Tensor, async_op: bool) -> Work | None:
    return Work(None, result) if async_op else None


def _then(finish: Callable[[], None], after: Callable[[], Any]) -> Callable[[], None]:
    def both() -> None:
        finish()
        after()

    return both


def _check_out(argument: str, out: Tensor, shape: tuple[int, ...], like: Tensor, contiguous: bool) -> None:
    if tuple(out.shape) != shape or out.dtype != like.dtype or out.device != like.device:
        raise ValueError(
            f"{argument}: is {out.dtype} {tuple(out.shape)} on {out.device}, must be {like.dtype} {shape} on "
            f"{like.device}"
        )
    if contiguous and not out.is_contiguous():
        raise ValueError(f"{argument}: has strides {out.stride()}, must be contiguous")


def _world_timeout(group: dist.ProcessGroup | None = None) -> float:
    """The timeout in seconds of `group`, of the default group when None."""
    group = dist.group.WORLD if group is None else group
    return group._get_backend(group._device_types[0]).options._timeout.total_seconds()
