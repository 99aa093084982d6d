"""What `ZeroOptimizer` checks of a model and of the ranks before anything is moved, and of its parameters later on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from pyfast.parallel.buckets import FlatBuckets
from pyfast.parallel.mesh import ParallelMesh


def check_model(model: nn.Module) -> None:
    """ValueError for trained parameters that are complex, or that share memory without being one Parameter."""
    ends: list[tuple[int, int, str]] = []
    for name, p in model.named_parameters():
        if p.requires_grad and p.is_complex():
            raise ValueError(f"model: parameter '{name}' is {p.dtype}; gradients are summed as real numbers only")
        if p.numel() and not p.is_meta:
            last = sum((size - 1) * stride for size, stride in zip(p.shape, p.stride(), strict=True))
            if p.untyped_storage().nbytes():
                ends.append((p.data_ptr(), p.data_ptr() + (last + 1) * p.itemsize, name))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    ends.sort()
    for (_, end, name), (start, _, other) in zip(ends, ends[1:], strict=False):
        if start < end and trained & {name, other}:
            raise ValueError(
                f"model: parameters '{name}' and '{other}' share memory but are two Parameters, which moving them into "
                "buckets would part; tie them by assigning the same Parameter, or give one its own memory (`.clone()`)"
            )


def check_same_on_all_ranks(settings: Mapping[str, Any], model: nn.Module, mesh: ParallelMesh) -> None:
    """RuntimeError, alike on every rank, if ranks were given other settings, or data-parallel ranks other parameters.

    A collective over the mesh.
    """
    data = mesh.group("dp").ranks
    parameters = [(name, str(p.dtype), p.requires_grad) for name, p in model.named_parameters()]
    everyone = mesh.group("world").all_gather_object((dict(settings), data, parameters), name="check settings")
    by_rank = dict(zip(mesh.group("world").ranks, everyone, strict=True))
    first = mesh.group("world").ranks[0]
    for rank, (theirs, group, entries) in by_rank.items():
        for key, value in by_rank[first][0].items():
            if theirs[key] != value:
                raise RuntimeError(
                    f"{key}: is {theirs[key]!r} on rank {rank}, {value!r} on rank {first}; must be equal"
                )
        expected = by_rank[group[0]][2]
        if entries != expected:
            odd = sorted(set(entries) ^ set(expected))[:3]
            raise RuntimeError(
                f"model: parameters of rank {rank} differ from those of rank {group[0]} in (name, dtype, "
                f"requires_grad): {odd or 'their order'}; all data-parallel ranks need the same model"
            )


def check_still_bound(buckets: FlatBuckets) -> None:
    """RuntimeError if a parameter lies elsewhere than in its bucket, as after `model.to(...)`; not for freed ones."""
    for bucket in buckets.buckets:
        if bucket.data.untyped_storage().nbytes():
            start, size = bucket.data.data_ptr(), bucket.data.itemsize
            for parameter, slot in zip(bucket.parameters, bucket.slots, strict=True):
                if parameter.data_ptr() != start + slot.place.start * size and parameter.numel():
                    raise RuntimeError(
                        f"parameter '{slot.name}': its data was replaced after the optimizer was made (model.to, half, "
                        "`.data = ...`), so it would no longer be trained; cast and move before, write with copy_"
                    )


def check_no_gradient_left(model: nn.Module) -> None:
    """RuntimeError for a parameter that got a gradient but is in no bucket: replaced or unfrozen later on."""
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            raise RuntimeError(
                f"parameter '{name}': has a gradient but is not trained by this optimizer: it was replaced "
                "(load_state_dict(assign=True)) or unfrozen after the optimizer was made; make the optimizer afterwards"
            )
