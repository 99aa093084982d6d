"""What the losses over a linear layer's vocabulary share: chunks of tokens, the place in the vocabulary, the gradients.

Letters: T tokens, H width, V vocabulary (rows of w over the whole group), R rows of a chunk, P ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pyfast import kernels
from pyfast.comm import Group
from pyfast.kernels.dtypes import sum_dtype

WORKSPACE_BYTES = 16 << 20  # a chunk's logits; larger chunks read w, and read and write dw, less often
MIN_ROWS = 96  # fewer rows would spend more time packing w than multiplying


@dataclass(frozen=True)
class VocabularyProblem:
    """The rows that count, and everything else a chunk needs."""

    h: Tensor  # [T, H]
    w: Tensor  # [V_local, H]
    target: Tensor  # [rows that count] global ids
    rows: Tensor | None  # their indices in h; None: all of h
    start: int  # global id of w's first row
    softcap: float
    z_loss: float
    group: Group
    name: str

    @classmethod
    def create(
        cls, h: Tensor, w: Tensor, target: Tensor, ignore_index: int, softcap: float, z_loss: float, vocab: int | None,
        group_name: str, name: str,
    ) -> VocabularyProblem:  # fmt: skip
        h, target = h.reshape(target.numel(), h.shape[-1]), target.reshape(-1)
        valid = target != ignore_index
        rows = None if bool(valid.all()) else valid.nonzero().squeeze(1)
        target = (target if rows is None else target[rows]).contiguous()
        group = Group.named(group_name) if group_name else Group.single()
        start, vocab = _place_in_vocabulary(w.shape[0], vocab, group, w.device, name)
        if target.numel() and not (0 <= (low := int(target.min())) <= (high := int(target.max())) < vocab):
            raise ValueError(
                f"target holds {low if low < 0 else high}; allowed are 0 to {vocab - 1} (the vocabulary has {vocab} "
                f"rows) and ignore_index, which is {ignore_index}"
            )
        return cls(h, w, target, rows, start, softcap, z_loss, group, name)

    @property
    def chunk_rows(self) -> int:
        """Rows of a chunk: as many as the workspace holds, evenly spread over the chunks."""
        row_bytes = max(1, self.w.shape[0]) * sum_dtype(self.h.dtype).itemsize
        most = max(MIN_ROWS, WORKSPACE_BYTES // row_bytes)
        count = self.target.shape[0]
        return -(-count // max(1, -(-count // most)))

    def chunks(self) -> list[slice]:
        """The rows that count, in order."""
        count, step = self.target.shape[0], max(1, self.chunk_rows)
        return [slice(first, min(first + step, count)) for first in range(0, count, step)]

    def workspace(self) -> Tensor:
        """Room for the logits of any chunk."""
        return self.w.new_empty(self.chunk_rows * self.w.shape[0], dtype=sum_dtype(self.w.dtype))

    def hidden(self, chunk: slice) -> Tensor:
        """h's rows of a chunk [R, H]."""
        return self.h[chunk] if self.rows is None else self.h.index_select(0, self.rows[chunk])

    def logits(self, hidden: Tensor, workspace: Tensor) -> Tensor:
        """hidden @ w.T [R, V_local] in the workspace."""
        logits = workspace[: hidden.shape[0] * self.w.shape[0]].view(hidden.shape[0], self.w.shape[0])
        return kernels.for_device(hidden.device).gemm(hidden, self.w.t(), logits)

    def combine(self, lse: Tensor, picked: Tensor) -> tuple[Tensor, Tensor]:
        """lse and target logit [R] over the whole vocabulary from those over each rank's part, in rank order."""
        if self.group.size == 1:
            return lse, picked
        gathered = self.group.all_gather(torch.stack([lse, picked]), name=f"{self.name} logsumexp")
        lses, largest = gathered[:, 0], gathered[:, 0].amax(0)
        exponentials, picked = torch.zeros_like(lse), torch.zeros_like(picked)
        for rank in range(self.group.size):
            exponentials += torch.exp(lses[rank] - largest)
            picked += gathered[rank, 1]
        return largest + torch.log(exponentials), picked


def _place_in_vocabulary(
    local: int, vocab: int | None, group: Group, device: torch.device, name: str
) -> tuple[int, int]:
    """(global id of this rank's first row, rows of the whole vocabulary)."""
    if group.size == 1:
        if vocab is not None and vocab != local:
            raise ValueError(f"vocab is {vocab}, but w has {local} rows and there is no group that holds the others")
        return 0, local
    if vocab is None:
        sizes = group.all_gather(torch.tensor([local], device=device), name=f"{name} vocabulary").flatten().tolist()
        return sum(sizes[: group.rank]), sum(sizes)
    share, larger = divmod(vocab, group.size)
    if local != share + (group.rank < larger):
        raise ValueError(
            f"w has {local} rows; of a vocabulary of {vocab}, rank {group.rank} of {group.size} holds "
            f"{share + (group.rank < larger)}: as even as possible, larger parts first"
        )
    return share * group.rank + min(group.rank, larger), vocab


class VocabularyGradients:
    """dh [T, H] and dw [V_local, H] as the chunks come in; what is not needed is empty."""

    def __init__(self, problem: VocabularyProblem, need_dh: bool, need_dw: bool) -> None:
        self.problem = problem
        self.need_dh, self.need_dw = need_dh, need_dw
        h, w, wide = problem.h, problem.w, sum_dtype(problem.h.dtype)
        complete = problem.rows is None and h.shape[0] > 0  # every row of dh is written
        allocate = torch.empty if complete else torch.zeros
        self.dh = allocate(h.shape if need_dh else (0,), dtype=wide, device=h.device)
        allocate = torch.empty if problem.target.shape[0] else torch.zeros
        self.dw = allocate(w.shape if need_dw else (0,), dtype=wide, device=w.device)

    @property
    def needed(self) -> bool:
        return self.need_dh or self.need_dw

    def add(self, chunk: slice, hidden: Tensor, dlogits: Tensor) -> None:
        """Take in the gradient by a chunk's logits."""
        gemm, rows = kernels.for_device(hidden.device).gemm, self.problem.rows
        if self.need_dh:
            part = self.dh[chunk] if rows is None else self.dh.new_empty(hidden.shape)
            gemm(dlogits, self.problem.w, part, round_factors=True)
            if rows is not None:
                self.dh.index_copy_(0, rows[chunk], part)
        if self.need_dw:
            gemm(dlogits.t(), hidden, self.dw, accumulate=chunk.start > 0, round_factors=True)
