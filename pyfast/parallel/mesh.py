"""The mesh: ranks numbered along the dimensions of a layout, and the group of each rank along each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from pyfast.comm import Group
from pyfast.parallel.config import ParallelConfig

# Dimensions that reduce together: ranks that see different tokens.
_COMBINED = ("dp-cp",)


def rank_groups(
    order: str, sizes: Mapping[str, int], combined: Sequence[str] = _COMBINED
) -> dict[str, list[tuple[int, ...]]]:
    """The groups of every mesh dimension, as tuples of ascending ranks; a pure function.

    Args:
        order: dimensions joined by "-", fastest varying rank first ("tp-cp-pp-dp").
        sizes: size of each dimension in `order`; names that are absent have size 1.
        combined: joint dimensions to list as well, such as "dp-cp": ranks that differ only in these.

    Returns:
        {"tp": [(0, 1), (2, 3), ...], ..., "dp-cp": ..., "world": [(0, 1, ...)]}; each list is a partition of the world,
        ordered by first rank.

    Raises:
        ValueError: a name in `order` twice, a size < 1, or a name in `sizes` or `combined` that `order` lacks.
    """
    names = order.split("-")
    unknown = (set(sizes) | {name for joint in combined for name in joint.split("-")}) - set(names)
    if len(set(names)) < len(names) or unknown:
        raise ValueError(f"order: is {order!r}, must name each dimension once; not named: {sorted(unknown)}")
    lengths = [sizes.get(name, 1) for name in names]
    if min(lengths) < 1:
        raise ValueError(f"sizes: is {dict(sizes)}, must all be >= 1")
    strides = [math.prod(lengths[:index]) for index in range(len(lengths))]
    groups = {}
    for joint in [*names, *combined]:
        inside = [index for index, name in enumerate(names) if name in joint.split("-")]
        outside = [index for index in range(len(names)) if index not in inside]
        groups[joint] = sorted(
            tuple(sorted(base + offset for offset in _offsets(inside, lengths, strides)))
            for base in _offsets(outside, lengths, strides)
        )
    groups["world"] = [tuple(range(math.prod(lengths)))]
    return groups


def _divide(groups: list[tuple[int, ...]], size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Each group in pieces of `size` neighbours; and the ranks that have the same place in the pieces of a group."""
    if any(len(group) % size for group in groups):
        raise ValueError(f"zero_ranks: is {size}, must divide the {len(groups[0])} data-parallel ranks")
    inside = [group[i : i + size] for group in groups for i in range(0, len(group), size)]
    return inside, [group[i::size] for group in groups for i in range(size)]


def _offsets(dimensions: list[int], lengths: list[int], strides: list[int]) -> list[int]:
    """Ranks reached from rank 0 by moving along `dimensions` only."""
    steps = [range(0, lengths[d] * strides[d], strides[d]) for d in dimensions]
    return [sum(combination) for combination in itertools.product(*steps)]


class ParallelMesh:
    """This process's place in the layout of a job. A value that is passed, never a global: two can coexist.

    Make one with `ParallelMesh.create` (every rank of the job) or `ParallelMesh.single` (one process).
    """

    def __init__(self, order: str, sizes: Mapping[str, int], rank: int, groups: Mapping[str, Group]) -> None:
        self.order = order
        self.rank = rank
        self._groups = dict(groups)
        self._sizes = {name: sizes.get(name, 1) for name in order.split("-")}
        self._coordinates, rest = {}, rank
        for name, length in self._sizes.items():
            rest, self._coordinates[name] = divmod(rest, length)

    @classmethod
    def create(
        cls,
        config: ParallelConfig,
        *,
        rank: int,
        world_size: int,
        timeout_s: float | None = None,
        checked: bool = False,
        shared_memory: bool = True,
    ) -> ParallelMesh:
        """The mesh of `config` over the `world_size` ranks of the job, as seen by `rank`.

        Collective: every rank of the job calls it, with the same config. Call `comm.bootstrap.initialize` first, unless
        the world has one rank. `timeout_s`, `checked` and `shared_memory` are those of `Group.create`.

        Raises:
            ValueError: the layout does not fill the world, or `rank` is outside it.
        """
        config = config.resolve(world_size)
        return cls.from_sizes(
            config.order,
            config.sizes(),
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            checked=checked,
            shared_memory=shared_memory,
            zero_ranks=config.zero_ranks,
        )

    @classmethod
    def from_sizes(
        cls,
        order: str,
        sizes: Mapping[str, int],
        *,
        rank: int,
        world_size: int,
        timeout_s: float | None = None,
        checked: bool = False,
        shared_memory: bool = True,
        zero_ranks: int | None = None,
    ) -> ParallelMesh:
        """As `create`, from the sizes of the dimensions named in `order`, which may be any names.

        zero_ranks: divide each "dp-cp" group into groups "zero" of so many neighbours, and groups "zero-across" of
        those that have the same place in theirs.
        """
        combined = [joint for joint in _COMBINED if set(joint.split("-")) <= set(order.split("-"))]
        wanted = rank_groups(order, sizes, combined)
        if zero_ranks is not None:
            wanted["zero"], wanted["zero-across"] = _divide(wanted["dp-cp"], zero_ranks)
        if len(wanted["world"][0]) != world_size or not 0 <= rank < world_size:
            raise ValueError(
                f"sizes: {dict(sizes)} make {len(wanted['world'][0])} ranks; the job has {world_size}, "
                f"this is rank {rank}"
            )
        options = {"timeout_s": timeout_s, "checked": checked, "shared_memory": shared_memory}
        channels: dict[tuple[int, ...], Group | None] = {}
        mine: dict[str, Group] = {}
        for name, partition in wanted.items():
            for ranks in partition:
                # dimensions with the same ranks share one channel; every rank walks the same list, as new_group demands
                if ranks not in channels:
                    channels[ranks] = Group.create(name, ranks, rank=rank, **options)
                if rank in ranks:
                    # the first name keeps the group itself, which `Group.named` finds only while it lives
                    channel = channels[ranks]
                    mine[name] = channel if channel.name == name else channel.renamed(name)
        return cls(order, sizes, rank, mine)

    @classmethod
    def single(cls) -> ParallelMesh:
        """The mesh of one process: every dimension has size 1, and nothing is ever sent."""
        return cls.create(ParallelConfig(data=1), rank=0, world_size=1)

    @property
    def divides_data(self) -> bool:
        """Whether data-parallel ranks share out in groups, "zero", smaller than all of them."""
        return "zero" in self._groups and self.size("zero") < self.size("dp-cp")

    def group(self, name: str) -> Group:
        """This rank's group along `name`: a dimension of the order, "dp-cp", "world", and with `zero_ranks` "zero" and
        "zero-across"."""
        if name not in self._groups:
            raise ValueError(f"name: is {name!r}, must be one of {sorted(self._groups)}")
        return self._groups[name]

    def size(self, name: str) -> int:
        """Number of ranks along `name`."""
        return self.group(name).size

    def coordinate(self, name: str) -> int:
        """This rank's position along `name`, from 0."""
        return self._coordinates[name] if name in self._coordinates else self.group(name).rank

    def __repr__(self) -> str:
        place = ", ".join(f"{name} {self._coordinates[name]}/{size}" for name, size in self._sizes.items())
        return f"ParallelMesh(rank {self.rank}: {place})"
