"""How many ways each kind of parallelism splits the job."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

# The part of the table that works; keys outside it are refused until they do, never ignored.
_SUPPORTED = ("tensor", "data", "order", "zero", "zero_ranks", "compression")
# Stages of ZeRO that are built.
ZERO_STAGES = (0, 1, 2, 3)
# What may travel between data-parallel ranks for a float32 gradient.
COMPRESSIONS = ("none", "bf16", "fp16", "one_bit")
_DIMENSIONS = ("tp", "cp", "pp", "dp")


@dataclass(frozen=True)
class ParallelConfig:
    """The layout of a job over its ranks.

    Args:
        tensor: ranks that share each weight matrix; None: one (`pyfast train` takes two for its first run).
        context: ranks that share each sequence.
        pipeline: stages the layers are divided into.
        virtual_pipeline: pieces of each stage.
        data: ranks that see different data; None: all the ranks that are left.
        expert: ranks that share the experts.
        expert_tensor: ranks that share each expert.
        zero: ZeRO stage: 0, every data-parallel rank holds everything; 1, they share out the optimizer's state and the
            float32 masters; 2, the gradients too; 3, the parameters too.
        zero_ranks: how many neighbouring data-parallel ranks share something out among themselves, such as those of a
            node, while the groups of as many hold the same (hybrid sharding); None: all of them.
        compression: of gradients on their way between data-parallel ranks: "none", "bf16", "fp16" or "one_bit".
        sequence_parallel: spread activations between tensor-parallel blocks over the sequence.
        schedule: pipeline schedule.
        layers_per_stage: layers of each stage, when not even.
        order: mesh dimensions, fastest varying rank first; any permutation of "tp-cp-pp-dp".
        context_method: how context-parallel ranks exchange keys and values.
    """

    tensor: int | None = None
    context: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    data: int | None = None
    expert: int = 1
    expert_tensor: int = 1
    zero: int = 0
    zero_ranks: int | None = None
    compression: str = "none"
    sequence_parallel: bool | None = None
    schedule: str | None = None
    layers_per_stage: list[int] | None = None
    order: str = "tp-cp-pp-dp"
    context_method: str = "auto"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in _SUPPORTED and value != field.default:
                raise ValueError(
                    f"parallel.{field.name}: is {value!r}, not supported yet; leave it at {field.default!r}"
                )
        for name in ("tensor", "data"):
            value = 1 if getattr(self, name) is None else getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"parallel.{name}: is {value!r}, must be a whole number >= 1")
        if not isinstance(self.zero, int) or isinstance(self.zero, bool) or self.zero not in ZERO_STAGES:
            raise ValueError(f"parallel.zero: is {self.zero!r}, must be 0, 1, 2 or 3")
        self._check_zero_ranks()
        if self.compression not in COMPRESSIONS:
            raise ValueError(f"parallel.compression: is {self.compression!r}, must be one of {', '.join(COMPRESSIONS)}")
        if sorted(self.order.split("-")) != sorted(_DIMENSIONS):
            raise ValueError(
                f"parallel.order: is {self.order!r}, must name each of {', '.join(_DIMENSIONS)} once, joined by '-', "
                "fastest varying first"
            )

    def _check_zero_ranks(self) -> None:
        ranks = self.zero_ranks
        if ranks is None:
            return
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 2:
            raise ValueError(f"parallel.zero_ranks: is {ranks!r}, must be a whole number >= 2, or None for all ranks")
        if self.zero == 0:
            raise ValueError(f"parallel.zero_ranks: is {ranks}, but parallel.zero is 0: nothing is shared out")
        if self.compression != "none":
            raise ValueError(f"parallel.compression: is {self.compression!r}, not supported with parallel.zero_ranks")
        if self.data is not None and self.data * self.context % ranks:
            raise ValueError(
                f"parallel.zero_ranks: is {ranks}, must divide the {self.data * self.context} data-parallel ranks"
            )

    def resolve(self, world_size: int) -> ParallelConfig:
        """The same layout with `tensor` and `data` filled in for `world_size` ranks.

        Raises:
            ValueError: the product of the layout is not `world_size`.
        """
        if world_size < 1:
            raise ValueError(f"world_size: is {world_size}, must be >= 1")
        tensor = self.tensor or 1
        ranks_per_replica = tensor * self.context * self.pipeline
        layout = f"tensor {tensor} x context {self.context} x pipeline {self.pipeline}"
        if self.data is None:
            if world_size % ranks_per_replica:
                raise ValueError(
                    f"parallel: {layout} = {ranks_per_replica} ranks do not divide the {world_size} ranks of the job; "
                    "start a multiple of them or change the layout"
                )
            return replace(self, tensor=tensor, data=world_size // ranks_per_replica)
        if ranks_per_replica * self.data != world_size:
            raise ValueError(
                f"parallel: {layout} x data {self.data} = {ranks_per_replica * self.data} ranks, but the job has "
                f"{world_size}; start as many as the layout needs, or leave parallel.data out to use all"
            )
        return replace(self, tensor=tensor)

    def sizes(self) -> dict[str, int]:
        """Size of each mesh dimension; the layout must be resolved."""
        if self.data is None or self.tensor is None:
            raise ValueError("parallel: tensor or data is not resolved; call resolve(world_size) first")
        return {"tp": self.tensor, "cp": self.context, "pp": self.pipeline, "dp": self.data}
