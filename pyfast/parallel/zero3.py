"""ZeRO stage 3: parameters are shared out too, and whole only while the layer they belong to computes.

A *unit* is what is gathered at a time: each child of the outermost ModuleLists and Sequentials of the model (layers of
a transformer; of a ModuleList or ModuleDict among them each child), and the *root*, everything else (embedding, last
norm, head). Each unit has flat buckets of its own.

    forward     a unit's parameters are gathered before it runs and freed after it, the last one's kept for the
                backward that follows; meanwhile the next unit's are on their way
    backward    gathered again when the gradient of the unit's output is there, the unit before on its way; when the
                next unit's turn comes, gradients are reduced to shards and parameters freed
    root        gathered at the first call of any module, freed when the step's gradients are complete

Freed means that the flat buffer has no bytes; what autograd saved is right again once it is refilled. The parameter
keeps identity and shape and reads as NaN. Reading it outside the model's calls needs `whole_parameters()`.

Every rank must call the units alike, in the same order. A parameter that lies in several units belongs to the root.

Rajbhandari et al. 2020 (ZeRO-3); Zhao et al. 2023, "PyTorch FSDP" (units and prefetching).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from pyfast.comm import Work
from pyfast.nn.layout import get_layout, set_layout
from pyfast.parallel.buckets import Bucket
from pyfast.parallel.flat_part import FlatPart
from pyfast.parallel.mesh import ParallelMesh
from pyfast.parallel.zero import Zero2Buckets

# In the metadata of autograd's nodes: inputs and results of units that were called.
_KNOWN = "pyfast_known_to_units"
# (parameter name, tensor of its local shape to fill): the initial values of a parameter on the meta device.
Fill = Callable[[str, Tensor], None]


@dataclass(eq=False)
class Unit:
    """Modules whose parameters are gathered and freed together.

    Attributes:
        name: of the module; "" for the root.
        buckets: those that are shared out.
        whole: the parameters are there. gathers: or on their way.
        calls: forward calls whose turn in backward has not come.
    """

    name: str
    buckets: list[Bucket] = field(default_factory=list)
    whole: bool = False
    gathers: list[Work] = field(default_factory=list)
    calls: int = 0


@dataclass(eq=False)
class Call:
    """A forward call of a unit."""

    unit: Unit


class InOrder:
    """Work of collectives, completed in the order in which it was started, whatever is waited for first."""

    def __init__(self) -> None:
        self._open: deque[Work] = deque()

    def add(self, work: Work, result: Tensor) -> Work:
        """Work that waits for everything started before it."""
        self._open.append(work)

        def finish() -> None:
            while work in self._open:
                self._open.popleft().wait()

        return Work(finish, result)


class Zero3Buckets(Zero2Buckets):
    """Parameters, gradients and state of each bucket shared out over its data-parallel ranks.

    Arguments as `FlatBuckets` has them, and

    fill: called for every parameter on the meta device, with its name and a tensor to write its values to, one bucket
        after another: at no time are all parameters there. `device`: where those parameters shall live.
    """

    stage = 3

    def __init__(
        self,
        model: nn.Module,
        mesh: ParallelMesh,
        *,
        fill: Fill | None = None,
        device: torch.device | str = "cpu",
        **settings: Any,
    ) -> None:
        self._in_order = InOrder()
        self._fill = fill
        take_off_meta(model, device, fill)
        self._modules, self._unit_names = find_units(model)
        super().__init__(model, mesh, **settings)

    # Units.

    def _unit_of(self, parameter: Parameter) -> Hashable:
        return self._unit_names[parameter]

    def _arrange(self, partition: list[Any]) -> list[Any]:
        # Gradients of the root's first and last layers come at both ends of backward: its buckets are complete last.
        return sorted(partition, key=lambda entry: self._unit_names[entry[1][0][1]] == "")

    def _watch(self, model: nn.Module) -> None:
        self._units = {name: Unit(name) for name in ("", *self._modules.values())}
        for bucket in self.buckets:
            if bucket.shard_group is not None:
                self._units[self._unit_names[bucket.parameters[0]]].buckets.append(bucket)
                _free_parameters(bucket)
        self._root = self._units[""]
        self._entered: Unit | None = None  # the unit whose forward began last
        self._final: Unit | None = None  # whose forward was the last before a backward
        self._turn: Unit | None = None  # the unit whose backward began last
        self._after: dict[Unit, Unit] = {}  # which unit's forward followed whose, when last seen
        self._calls: list[Call] = []  # whose turn in backward has not come
        for name, module in model.named_modules():
            unit = self._modules.get(module)
            if unit is not None:
                self._watch_unit(module, self._units[unit])
            elif not _inside(name, self._modules.values()):
                self._hooks.append(module.register_forward_pre_hook(lambda *_: self._gather(self._root)))
            else:
                self._watch_inside(name, module)

    def _watch_inside(self, name: str, module: nn.Module) -> None:
        """Refuse a call of a part of a unit where the unit itself is not called."""
        own = {self._unit_names[p] for p in module.parameters(recurse=False) if p in self._slots} - {""}

        def check(*_: Any) -> None:
            for unit in own:
                if self._units[unit].buckets and not self._units[unit].whole:
                    raise RuntimeError(
                        f"module '{name}' was called outside a call of '{unit}', with which stage 3 gathers and frees "
                        f"its parameters; call '{unit}', or keep what calls its parts in one module with a forward"
                    )

        if own:
            self._hooks.append(module.register_forward_pre_hook(check))

    def _watch_unit(self, module: nn.Module, unit: Unit) -> None:
        enter = module.register_forward_pre_hook(
            lambda _, *inputs: self._enter(unit, inputs), prepend=True, with_kwargs=True
        )
        leave = module.register_forward_hook(lambda _, __, output: self._leave(unit, output), always_call=True)
        self._hooks += [enter, leave]

    # Forward.

    def _enter(self, unit: Unit, inputs: Any) -> None:
        self._gather(self._root)
        if _in_backward():  # recomputation; its turn begins with the gradient of its output
            self._gather(unit)
            return
        _mark_known(_computed(inputs))
        if self._entered is not None and self._entered is not unit:
            self._after[self._entered] = unit
        self._entered = unit
        self._gather(unit)
        if unit in self._after:
            self._start_gather(self._after[unit])

    def _leave(self, unit: Unit, output: Any) -> None:
        _check_no_parameter(unit, output)
        if _in_backward():
            for tensor in _computed(output):  # of a reentrant checkpoint, whose first forward recorded nothing
                tensor.register_hook(lambda _: self._begin_backward(unit))
            return
        if not torch.is_grad_enabled():
            self._free(unit)
            return
        # what is handed through was computed before this unit: its gradient comes after the unit's turn
        results = [tensor for tensor in _computed(output) if _KNOWN not in tensor.grad_fn.metadata]
        _mark_known(results)
        if not results:
            return  # nothing says when its backward begins, if there is one: kept until the micro-batch ends
        call = Call(unit)
        self._calls.append(call)
        unit.calls += 1
        for tensor in results:
            tensor.register_hook(lambda _: self._come_to(call))
        if unit is not self._final:  # whose backward comes next
            self._free(unit)

    # Backward.

    def _come_to(self, call: Call | None) -> None:
        """The turn of a call, or with None the end of backward: of the calls after it first. They had none if they got
        no gradient here; the other ranks, where they may have got one, gather and reduce at this point too."""
        if call is not None and torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True: not supported at stage 3, which frees parameters that such a graph still needs; "
                "use stage 2"
            )
        if call is not None and call not in self._calls:
            self._begin_backward(call.unit)  # another of its outputs, or passed over before
            return
        while self._calls:
            last = self._calls.pop()
            last.unit.calls -= 1
            self._begin_backward(last.unit)
            if last is call:
                break

    def _begin_backward(self, unit: Unit) -> None:
        if self._entered is not None:
            self._final, self._entered = self._entered, None
        before, self._turn = self._turn, unit
        if before is not None and before is not unit and before.calls == 0:
            # By now autograd has run all of that unit: its operations are younger than this one's output. On all ranks
            # alike, whichever of its parameters got a gradient.
            self._end_backward(before)
        self._gather(unit)
        if self._calls:
            self._start_gather(self._calls[-1].unit)

    def _end_backward(self, unit: Unit) -> None:
        self._launch_those_of(unit.buckets)
        self._free(unit)

    def _launch_complete(self) -> None:
        """Nothing: a bucket is reduced when its unit's turn is over, on all ranks at the same point."""

    def _launch_rest(self) -> None:
        self._launch_those_of(self.buckets)

    def _launch_those_of(self, buckets: list[Bucket]) -> None:
        if self._reducing:
            launched = {bucket for bucket, _ in self._launched}
            for bucket in buckets:
                if bucket not in launched:
                    self._launch(bucket)

    def end_micro_batch(self) -> None:
        if self._reducing:
            self._come_to(None)
        super().end_micro_batch()
        self._entered = self._turn = None
        self._free_layers()

    def finish(self) -> None:
        super().finish()
        self._free(self._root)

    def discard(self) -> None:
        super().discard()
        self._forget()

    def _reduce_scatter(self, bucket: Bucket, out: Tensor) -> Work:
        return self._in_order.add(super()._reduce_scatter(bucket, out), out)

    # Parameters.

    def _start_gather(self, unit: Unit) -> None:
        if unit.whole or unit.gathers:
            return
        for bucket in unit.buckets:
            _check_not_written(bucket)
        for bucket in unit.buckets:
            bucket.data.untyped_storage().resize_(bucket.numel * bucket.data.itemsize)
            for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
                parameter.data = bucket.data[slot.place].view(slot.shape)
            unit.gathers.append(self._in_order.add(self._gather_bucket(bucket), bucket.data))

    def _gather(self, unit: Unit) -> None:
        if not unit.whole:
            self._start_gather(unit)
            gathers, unit.gathers = unit.gathers, []
            for work in gathers:
                work.wait()
            unit.whole = True

    def _free(self, unit: Unit) -> None:
        if not unit.whole and not unit.gathers:
            return
        self._gather(unit)  # what was asked for and not needed after all
        for bucket in unit.buckets:
            _free_parameters(bucket)
        unit.whole = False

    def _free_layers(self) -> None:
        for unit in self._units.values():
            if unit is not self._root:
                self._free(unit)

    def _forget(self) -> None:
        self._entered = self._turn = None
        self._calls.clear()
        for unit in self._units.values():
            unit.calls = 0
            self._free(unit)

    def update_parameters(self) -> None:
        """The shards have changed: what was gathered is old."""
        self._forget()

    def wait_for_parameters(self) -> None:
        """Nothing to wait for: parameters are gathered when a module needs them; see `whole_parameters`."""

    @contextmanager
    def whole_parameters(self, *, write: bool = False) -> Iterator[None]:
        for unit in self._units.values():
            self._gather(unit)
        try:
            yield
            if write:
                for unit in self._units.values():
                    for bucket in unit.buckets:
                        bucket.data_shard.copy_(bucket.data[bucket.shard])
        finally:
            self._forget()

    def parameter_parts(self) -> dict[str, Tensor | FlatPart]:
        return {name: part for bucket in self.buckets for name, part in bucket.views(bucket.data_shard).items()}

    def close(self) -> None:
        """Give the model its parameters back, whole, and take the hooks off it. A collective."""
        for unit in self._units.values():
            self._gather(unit)
        super().close()


def _free_parameters(bucket: Bucket) -> None:
    for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
        # read by mistake it is NaN; to copy into it is an error, as its elements share one place
        parameter.data = bucket.data_shard.new_full((), torch.nan).expand(slot.shape)
    bucket.data.untyped_storage().resize_(0)


def _check_no_parameter(unit: Unit, output: Any) -> None:
    buffers = {bucket.data.untyped_storage().data_ptr() for bucket in unit.buckets if bucket.numel}
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.layout is torch.strided and tensor.numel():
            if tensor.untyped_storage().data_ptr() in buffers:
                raise RuntimeError(
                    f"output of '{unit.name}': is one of its parameters or a view of one, shape {tuple(tensor.shape)}, "
                    "which stage 3 frees when the call ends; return a copy (`.clone()`)"
                )


def _check_not_written(bucket: Bucket) -> None:
    for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
        if (
            parameter.device.type == "cpu"
            and parameter.numel()
            and not parameter.detach()[(0,) * parameter.dim()].isnan()
        ):
            raise RuntimeError(f"parameter '{slot.name}' was written while freed; use whole_parameters(write=True)")


def _computed(values: Any) -> list[Tensor]:
    """The tensors in `values` that backward goes through."""
    return [t for t in tree_leaves(values) if isinstance(t, Tensor) and t.grad_fn is not None]


def _mark_known(tensors: list[Tensor]) -> None:
    for tensor in tensors:
        tensor.grad_fn.metadata[_KNOWN] = True


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def find_units(model: nn.Module) -> tuple[dict[nn.Module, str], dict[Parameter, str]]:
    """(module of a unit -> its name, parameter -> the name of its unit, "" for the root), in order of definition."""
    modules: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.Sequential) and not _inside(name, modules.values()):
            for key, child in _called_children(module):
                if next(child.parameters(), None) is not None:
                    modules.setdefault(child, f"{name}.{key}" if name else key)
    units: dict[Parameter, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        unit = next((unit for unit in modules.values() if name.startswith(f"{unit}.")), "")
        units[parameter] = unit if units.get(parameter, unit) == unit else ""
    return modules, units


def _called_children(container: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Its children; those that nobody can call, as they are containers without a forward, by theirs."""
    for key, child in container.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            for inner, module in _called_children(child):
                yield f"{key}.{inner}", module
        elif not isinstance(child, nn.ParameterList | nn.ParameterDict):
            yield key, child


def _inside(name: str, units: Any) -> bool:
    return any(name == unit or name.startswith(f"{unit}.") for unit in units)


def take_off_meta(model: nn.Module, device: torch.device | str, fill: Fill | None) -> None:
    """Replace parameters on the meta device by ones on `device`, without memory if trained, filled if frozen.

    Raises ValueError for parameters without `fill`, and for buffers on the meta device, which nobody fills.
    """
    on_meta = [name for name, p in model.named_parameters() if p.is_meta]
    buffers = [name for name, b in model.named_buffers() if b.is_meta]
    if on_meta and fill is None:
        raise ValueError(f"fill: is None, but {on_meta[:3]} .. are on the meta device; give a function that fills them")
    if buffers:
        raise ValueError(f"model: buffers {buffers[:3]} are on the meta device; make them anew on {device} first")
    new: dict[Parameter, Parameter] = {}
    for path, module in model.named_modules():
        for key, old in list(module._parameters.items()):
            if old is not None and old.is_meta:
                if old not in new:
                    new[old] = _on_device(old, device)
                    if not old.requires_grad:
                        fill(f"{path}.{key}" if path else key, new[old].data)
                module.register_parameter(key, new[old])


def _on_device(like: Parameter, device: torch.device | str) -> Parameter:
    data = torch.empty(like.shape, dtype=like.dtype, device=device)
    if like.requires_grad:
        data.untyped_storage().resize_(0)
    parameter = Parameter(data, requires_grad=like.requires_grad)
    set_layout(parameter, get_layout(like))
    return parameter
