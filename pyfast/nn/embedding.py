"""Token embedding with the vocabulary cut over a tensor-parallel group."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pyfast.nn.layout import Layout, Shard, split_bounds
from pyfast.nn.parameter import LayoutModule, active_group, check_enough, new_parameter
from pyfast.ops.collective import reduce_from_group


class VocabParallelEmbedding(LayoutModule):
    """Rows of a table [num_embeddings, width] by token id: ids int [...] -> [..., width], the same on every rank.

    Each rank holds a run of rows (as even as possible, longer runs first, so any vocabulary size works), looks up the
    ids it has, gives 0 for the others, and the group sums. Raises ValueError for an id outside the table (ids on a
    CPU; on a GPU the device asserts) and for fewer rows than ranks.
    """

    def __init__(
        self,
        num_embeddings: int,
        width: int,
        *,
        group: object | None = None,
        mesh_dim: str = "tp",
        name: str = "embedding",
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.width, self.name = num_embeddings, width, name
        self.group = active_group(group)
        check_enough(self.group, "num_embeddings", num_embeddings)
        layout = Layout((num_embeddings, width), (Shard(mesh_dim, 0, (num_embeddings,)),))
        self.weight = new_parameter(layout, self.group, mesh_dim, bound=1.0, dtype=dtype, device=device)
        self.start = 0
        if self.group is not None:
            self.start, _ = split_bounds(num_embeddings, self.group.size, self.group.rank)

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.num_embeddings)
        if self.group is None:
            return F.embedding(ids, self.weight)
        local = ids - self.start
        elsewhere = (local < 0) | (local >= self.weight.shape[0])
        rows = F.embedding(local.masked_fill(elsewhere, 0), self.weight)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return reduce_from_group(rows, self.group, self.name, in_place=True)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.width}"


def check_ids(ids: Tensor, vocab: int) -> None:
    """Raise ValueError for ids outside [0, vocab). On a GPU, where looking would wait for it, the device asserts."""
    if torch.compiler.is_compiling() or ids.numel() == 0:
        return
    if ids.device.type == "cpu":
        low, high = (int(x) for x in torch.aminmax(ids))
        if low < 0 or high >= vocab:
            raise ValueError(f"ids range from {low} to {high}, the vocabulary holds 0 to {vocab - 1}")
    elif ids.device.type == "cuda":
        torch._assert_async(((ids >= 0) & (ids < vocab)).all())
