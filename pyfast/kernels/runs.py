"""Where the rows of a shard stand: runs of documents, and the tiles of queries and keys that see each other.

A *run* is (document, start, length, stride): `length` consecutive rows of the shard that are the tokens start,
start + stride, start + 2 stride, ... of that document. `runs` is an int64 CPU tensor [n, 4], the rows of the shard run
after run. Document -1 is padding; it and the rows after the last run belong to no document. A query row sees a key row
if both are of one document and

    key - query <= right  and  query - key <= left          (positions; causal: right = 0; -1: unbounded)

so contiguous, zigzag (two runs a document), striped (stride = ranks), windowed and packed shards are one case. That the
last query meets the last key (bottom-right alignment) is said by the queries' start, len_k - len_q, which may be
negative.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

UNBOUNDED = 1 << 40  # a window as wide as any sequence; positions plus this stay far from 2^63


def batch_runs(batch: int, rows_q: int, rows_k: int) -> tuple[Tensor, Tensor]:
    """(runs_q, runs_k) of `batch` sequences of equal lengths, one document each, bottom-right aligned."""
    documents = torch.arange(batch)
    return _runs(documents, rows_k - rows_q, rows_q), _runs(documents, 0, rows_k)


def cu_seqlens_runs(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> tuple[Tensor, Tensor]:
    """(runs_q, runs_k) of packed documents [cu[i], cu[i + 1]), bottom-right aligned; cu_seqlens int [documents + 1]."""
    cu_q, cu_k = cu_seqlens_q.cpu().long(), cu_seqlens_k.cpu().long()
    lengths_q, lengths_k = cu_q.diff(), cu_k.diff()
    documents = torch.arange(len(lengths_q))

    def after(padding: Tensor, runs: Tensor) -> Tensor:
        return torch.cat([torch.tensor([[-1, 0, int(padding), 1]]), runs]) if padding > 0 else runs

    return (
        after(cu_q[0], _runs(documents, lengths_k - lengths_q, lengths_q)),
        after(cu_k[0], _runs(documents, 0, lengths_k)),
    )


def _runs(documents: Tensor, start: Tensor | int, length: Tensor | int) -> Tensor:
    columns = (x.expand(documents.shape) for x in map(torch.as_tensor, (documents, start, length, 1)))
    return torch.stack(list(columns), 1)


def check_runs(name: str, runs: Tensor, rows: int) -> None:
    """Raise unless `runs` can describe a shard of `rows` rows."""
    if not isinstance(runs, Tensor) or runs.dtype != torch.int64:
        what = runs.dtype if isinstance(runs, Tensor) else type(runs).__name__
        raise TypeError(f"{name} is {what}; an int64 tensor [runs, 4] is needed")
    if runs.dim() != 2 or runs.shape[1] != 4:
        raise ValueError(f"{name} has shape {tuple(runs.shape)}; [runs, 4] is needed: document, start, length, stride")
    if runs.device.type != "cpu":
        raise ValueError(f"{name} is on {runs.device}; runs are read by the host, keep them on the CPU")
    document, _, length, stride = runs.unbind(1)
    for what, bad, allowed in (
        ("document", document < -1, ">= 0, or -1 for padding"),
        ("length", length < 0, ">= 0"),
        ("stride", stride < 1, ">= 1"),
    ):
        if bad.any():
            run = int(bad.nonzero()[0])
            raise ValueError(f"run {run} of {name} is {runs[run].tolist()}; its {what} must be {allowed}")
    if (total := int(length.sum())) > rows:
        raise ValueError(f"{name} has {total} rows; the shard has only {rows}")


def rows_of_runs(runs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """(document, position) of each row, int64 [rows]: document -1 and position 0 where a row belongs to none."""
    document, start, length, stride = runs.unbind(1)
    first = length.cumsum(0) - length
    within = torch.arange(int(length.sum())) - first.repeat_interleave(length)
    documents, positions = torch.full((rows,), -1), torch.zeros(rows, dtype=torch.int64)
    documents[: len(within)] = document.repeat_interleave(length)
    positions[: len(within)] = start.repeat_interleave(length) + within * stride.repeat_interleave(length)
    return documents, positions.masked_fill(documents < 0, 0)


class TilePlan(NamedTuple):
    """What a kernel that holds a tile of rows and walks over the other side has to do; int64 CPU tensors.

    Tile t holds the rows [row, row + count) of its side, all of one run: row + i stands at position + i * stride. It
    meets the ranges starts[t] to starts[t + 1] of the other side, described alike. A range that is not masked consists
    of whole blocks, each of whose rows sees each row of the tile: it needs no comparison and no bound. A masked range
    is walked in blocks too, the last of which may be short; each holds a visible pair (unless the window is narrower
    than a stride, and looks between rows), and the mask is the comparison of positions alone: documents are sorted out
    already. Every row of the side lies in exactly one tile, rows of no document too: their tiles meet no range.

    tiles [tiles, 4]     row, count, position, stride: descending by the number of rows they meet
    starts [tiles + 1]   tile t meets ranges[starts[t] : starts[t + 1]]
    ranges [ranges, 5]   row, count, position, stride, masked (0 or 1)
    """

    tiles: Tensor
    starts: Tensor
    ranges: Tensor


def plan_query_tiles(
    runs_q: Tensor, runs_k: Tensor, rows_q: int, causal: bool, window: tuple[int, int], block_q: int, block_k: int
) -> TilePlan:
    """Tiles of at most block_q queries, and for each the ranges of keys it sees, in blocks of block_k."""
    left, right = _widths(causal, window)
    return _plan(runs_q, runs_k, rows_q, left, right, block_q, block_k)


def plan_key_tiles(
    runs_q: Tensor, runs_k: Tensor, rows_k: int, causal: bool, window: tuple[int, int], block_q: int, block_k: int
) -> TilePlan:
    """Tiles of at most block_k keys, and for each the ranges of queries that see it, in blocks of block_q."""
    left, right = _widths(causal, window)
    return _plan(runs_k, runs_q, rows_k, right, left, block_k, block_q)  # seen from the keys, left and right swap


def _widths(causal: bool, window: tuple[int, int]) -> tuple[int, int]:
    """How far a query sees to each side."""
    left, right = (UNBOUNDED if side < 0 else min(side, UNBOUNDED) for side in window)
    return left, 0 if causal else right


def _expand(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(owner, number within its owner) of counts.sum() things, counts[i] of which belong to i."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)


def _plan(runs: Tensor, other: Tensor, rows: int, left: int, right: int, block: int, other_block: int) -> TilePlan:
    runs_R4, others_O4 = _with_rest(runs, rows), other.numpy()
    document, start, length, stride = runs_R4.T
    run, number = _expand(-(-length // block))
    first = number * block  # within its run
    count = np.minimum(block, length[run] - first)
    row = (np.cumsum(length) - length)[run] + first
    tiles = np.stack([row, count, start[run] + first * stride[run], stride[run]], 1)

    tile, other_run = _pairs(document[run], others_O4[:, 0])
    owner, ranges = _ranges(tiles, tile, others_O4, other_run, left, right, other_block)
    met = np.bincount(owner, ranges[:, 1], minlength=len(tiles)).astype(np.int64)
    order = np.argsort(-met, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    by_tile = np.argsort(place[owner], kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=len(tiles))[order])])
    return TilePlan(*(torch.from_numpy(np.ascontiguousarray(x)) for x in (tiles[order], starts, ranges[by_tile])))


def _with_rest(runs: Tensor, rows: int) -> np.ndarray:
    """The runs, and one of no document for the rows after the last."""
    runs_R4 = runs.numpy()
    return np.concatenate([runs_R4, [[-1, 0, rows - runs_R4[:, 2].sum(), 1]]]).astype(np.int64)


def _pairs(documents: np.ndarray, others: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """All (i, j) with documents[i] == others[j] >= 0, by i, then j."""
    order = np.argsort(others, kind="stable")
    begin, end = (np.searchsorted(others[order], documents, side) for side in ("left", "right"))
    i, number = _expand(np.where(documents < 0, 0, end - begin))
    return i, order[begin[i] + number]


def _ranges(
    tiles: np.ndarray, tile: np.ndarray, others: np.ndarray, other_run: np.ndarray, left: int, right: int, block: int
) -> tuple[np.ndarray, np.ndarray]:
    """(tile, range) of every range that a tile meets in a run, for pairs (tile, other run)."""
    _, count, position, stride = tiles[tile].T
    _, start, length, step = others[other_run].T
    first_row = (np.cumsum(others[:, 2]) - others[:, 2])[other_run]
    last = position + (count - 1) * stride

    def seen_from(at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:  # rows [lo, hi) of the other run
        lo = -(-(at - left - start) // step)
        hi = (at + right - start) // step + 1
        return np.clip(lo, 0, length), np.clip(hi, 0, length)

    (first_lo, first_hi), (last_lo, last_hi) = seen_from(position), seen_from(last)
    begin = first_lo // block * block  # some row of the tile sees [first_lo, last_hi), every one [last_lo, first_hi)
    full_begin, full_end = -(-last_lo // block) * block, first_hi // block * block
    has_full = full_begin < full_end
    full_begin, full_end = np.where(has_full, full_begin, last_hi), np.where(has_full, full_end, last_hi)
    edges = np.stack([begin, full_begin, full_end, last_hi])
    kept_tiles, kept = [], []
    for part in range(3):
        lo, hi = edges[part], edges[part + 1]
        here = np.flatnonzero((lo < hi) & (first_lo < last_hi))
        masked = np.full(len(here), int(part != 1))
        columns = (first_row + lo, hi - lo, start + lo * step, step)
        kept.append(np.stack([*(x[here] for x in columns), masked], 1))
        kept_tiles.append(tile[here])
    ranges, owner = np.concatenate(kept), np.concatenate(kept_tiles)
    order = np.lexsort((ranges[:, 0], owner))
    return owner[order], ranges[order]
