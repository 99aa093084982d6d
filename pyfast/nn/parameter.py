"""How every module makes its parameters: a Layout first, then this rank's part of the values."""

from __future__ import annotations

import math

import torch
from torch import nn

from pyfast.comm.group import Group
from pyfast.nn.layout import Layout, get_layout, has_layout, set_layout


class LayoutModule(nn.Module):
    """A module whose parameters keep their Layout when torch puts new ones in their place.

    `copy.deepcopy`, `to_empty` and `load_state_dict(assign=True)` make new parameters without the attributes of the old
    ones; one without a Layout would pass for replicated, and its gradient and norm would be summed wrongly.
    """

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if param is None:
            return
        layouts = self.__dict__.setdefault("_layouts", {})
        if has_layout(param):
            layouts[name] = get_layout(param)
        elif name in layouts:
            set_layout(param, layouts[name])

    def _restore_layouts(self) -> None:
        for name, layout in self.__dict__.get("_layouts", {}).items():
            param = self._parameters.get(name)
            if param is not None and not has_layout(param):
                set_layout(param, layout)

    def _apply(self, fn, recurse: bool = True):
        result = super()._apply(fn, recurse)
        self._restore_layouts()
        return result

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._restore_layouts()


def active_group(group: object | None) -> Group | None:
    """The group as a `Group`, or None when there is nobody to talk to: modules then run no collective code at all."""
    if group is None:
        return None
    group = Group.wrap(group)
    return group if group.size > 1 else None


def new_parameter(
    layout: Layout,
    group: Group | None,
    mesh_dim: str,
    *,
    bound: float = 0.0,
    fill: float = 0.0,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> nn.Parameter:
    """A parameter of `layout` on this rank: uniform in [-bound, bound], or `fill` everywhere when bound is 0.

    The unsharded tensor is drawn and then cut, so ranks that share a random state get different parts of one tensor,
    not the same numbers twice.
    """
    if bound == 0.0 or group is None:
        shape = layout.shape if group is None else layout.local_shape({mesh_dim: group.size}, {mesh_dim: group.rank})
        local = torch.full(shape, fill, dtype=dtype, device=device)
        if bound:
            local.uniform_(-bound, bound)
    else:
        sizes, coords = {mesh_dim: group.size}, {mesh_dim: group.rank}
        full = torch.empty(layout.shape, dtype=dtype, device=device).uniform_(-bound, bound)
        local = torch.empty(layout.local_shape(sizes, coords), dtype=dtype, device=device)
        for here, there in layout.slices(sizes, coords):
            local[here] = full[there]
    parameter = nn.Parameter(local)
    set_layout(parameter, layout)
    return parameter


def linear_bound(in_features: int) -> float:
    """The bound of `torch.nn.Linear`'s initial weights."""
    return 1 / math.sqrt(in_features) if in_features else 0.0


def check_divisible(group: Group | None, **sizes: int) -> None:
    """Raise ValueError naming every size (and the group) when one does not divide evenly over the group's ranks."""
    ranks = 1 if group is None else group.size
    if any(size % ranks for size in sizes.values()):
        named = " and ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(
            f"{named} must each be a multiple of the {ranks} tensor-parallel ranks of group {group.name!r}: "
            f"each rank holds whole heads. Use fewer ranks or another number of heads."
        )


def check_enough(group: Group | None, name: str, size: int) -> None:
    """Raise ValueError when there are fewer rows than ranks: a rank would hold nothing."""
    if group is not None and size < group.size:
        raise ValueError(f"{name}={size} is less than the {group.size} ranks of group {group.name!r}: use fewer ranks")
