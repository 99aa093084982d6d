"""kernels.runs: where rows stand, and plans that visit each visible pair once and no tile in vain."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pyfast.kernels import runs


def expanded(table, rows):
    """[(document, position)] of each row, by the definition."""
    places = [(document, start + i * stride) for document, start, length, stride in table for i in range(length)]
    return [place if place[0] >= 0 else (-1, 0) for place in places] + [(-1, 0)] * (rows - len(places))


def visible(runs_q, runs_k, rows_q, rows_k, causal, window):
    """Boolean [rows_q, rows_k] by the definition."""
    left, right = (side if side >= 0 else 10**9 for side in window)
    right = 0 if causal else right
    q, k = expanded(runs_q.tolist(), rows_q), expanded(runs_k.tolist(), rows_k)
    return torch.tensor(
        [[a[0] == b[0] >= 0 and b[1] - a[1] <= right and a[1] - b[1] <= left for b in k] for a in q], dtype=torch.bool
    ).view(rows_q, rows_k)


def painted(plan, rows, other_rows, block, left, right):
    """How often a kernel that follows the plan counts each pair; checks the plan's promises on the way."""
    counted = torch.zeros(rows, other_rows, dtype=torch.int64)
    covered = torch.zeros(rows, dtype=torch.int64)
    work = []
    for t, (row, count, position, stride) in enumerate(plan.tiles.tolist()):
        covered[row : row + count] += 1
        mine = plan.ranges[plan.starts[t] : plan.starts[t + 1]].tolist()
        work.append(sum(r[1] for r in mine))
        at = position + stride * torch.arange(count)[:, None]
        for other_row, other_count, other_position, other_stride, masked in mine:
            assert masked or other_count % block == 0
            other_at = other_position + other_stride * torch.arange(other_count)
            see = (other_at - at <= right) & (at - other_at <= left)
            assert masked or see.all()
            counted[row : row + count, other_row : other_row + other_count] += see
            if left + right + 1 < max(stride, other_stride):  # a narrow window may look between two rows
                continue
            for first in range(0, other_count, block):
                assert see[:, first : first + block].any(), "a block without a visible pair"
    assert covered.eq(1).all()
    assert work == sorted(work, reverse=True)
    return counted


@st.composite
def shards(draw):
    """Runs of a few documents (some absent, empty, or padding) and the number of rows of the shard."""
    one_run = st.tuples(st.integers(-1, 2), st.integers(-5, 40), st.integers(0, 30), st.integers(1, 4))
    table = torch.tensor(draw(st.lists(one_run, min_size=0, max_size=5)), dtype=torch.int64).view(-1, 4)
    return table, int(table[:, 2].sum()) + draw(st.integers(0, 9))


@settings(max_examples=150, deadline=None)
@given(shards(), shards(), st.booleans(), st.integers(-1, 20), st.integers(-1, 20), st.sampled_from([(4, 8), (16, 5)]))
def test_plans_count_every_visible_pair_once(q, k, causal, left, right, blocks):
    (runs_q, rows_q), (runs_k, rows_k) = q, k
    wide_left, wide_right = (side if side >= 0 else 10**9 for side in (left, right))
    wide_right = 0 if causal else wide_right
    expected = visible(runs_q, runs_k, rows_q, rows_k, causal, (left, right))
    plan = runs.plan_query_tiles(runs_q, runs_k, rows_q, causal, (left, right), *blocks)
    counted = painted(plan, rows_q, rows_k, blocks[1], wide_left, wide_right)
    assert torch.equal(counted, expected.long())
    plan = runs.plan_key_tiles(runs_q, runs_k, rows_k, causal, (left, right), *blocks)
    counted = painted(plan, rows_k, rows_q, blocks[0], wide_right, wide_left)
    assert torch.equal(counted, expected.T.long())


def test_causal_visits_the_triangle_only():
    """1024 queries in tiles of 64: 16 x 17 / 2 tiles are visited, 16 of them masked."""
    runs_q, runs_k = runs.batch_runs(1, 1024, 1024)
    plan = runs.plan_query_tiles(runs_q, runs_k, 1024, True, (-1, -1), 64, 64)
    masked = plan.ranges[:, 4].bool()
    assert plan.ranges[:, 1].sum() == 64 * 16 * 17 // 2
    assert plan.ranges[masked, 1].sum() == 64 * 16


def test_a_zigzag_shard_meets_no_masked_out_tile():
    """Rank 0 of 2 holds quarters 0 and 3 of 64 tokens, rank 1 keys of quarters 1 and 2: quarter 3 sees both whole."""
    mine = torch.tensor([[0, 0, 16, 1], [0, 48, 16, 1]])
    theirs = torch.tensor([[0, 16, 16, 1], [0, 32, 16, 1]])
    plan = runs.plan_query_tiles(mine, theirs, 32, True, (-1, -1), 16, 16)
    assert plan.tiles.tolist() == [[16, 16, 48, 1], [0, 16, 0, 1]]
    assert plan.starts.tolist() == [0, 2, 2]
    assert plan.ranges.tolist() == [[0, 16, 16, 1, 0], [16, 16, 32, 1, 0]]


def test_runs_of_cu_seqlens_are_bottom_right_aligned():
    cu_q, cu_k = torch.tensor([2, 5, 5, 9], dtype=torch.int32), torch.tensor([0, 4, 9, 9], dtype=torch.int32)
    runs_q, runs_k = runs.cu_seqlens_runs(cu_q, cu_k)
    assert runs_q.tolist() == [[-1, 0, 2, 1], [0, 1, 3, 1], [1, 5, 0, 1], [2, -4, 4, 1]]
    assert runs_k.tolist() == [[0, 0, 4, 1], [1, 0, 5, 1], [2, 0, 0, 1]]
    documents, positions = runs.rows_of_runs(runs_q, 11)
    assert documents.tolist() == [-1, -1, 0, 0, 0, 2, 2, 2, 2, -1, -1]
    assert positions.tolist() == [0, 0, 1, 2, 3, -4, -3, -2, -1, 0, 0]
    runs_q, runs_k = runs.batch_runs(2, 3, 5)
    assert runs_q.tolist() == [[0, 2, 3, 1], [1, 2, 3, 1]]
    assert runs_k.tolist() == [[0, 0, 5, 1], [1, 0, 5, 1]]


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ([[0, 0, 4, 1]], TypeError, "runs_q is list"),
        (torch.zeros(1, 4), TypeError, "runs_q is torch.float32"),
        (torch.zeros(4, dtype=torch.int64), ValueError, r"runs_q has shape \(4,\)"),
        (torch.tensor([[0, 0, 1, 1], [0, 0, 1, 0]]), ValueError, r"run 1 of runs_q is \[0, 0, 1, 0\]; its stride"),
        (torch.tensor([[0, 0, -1, 1]]), ValueError, "its length must be >= 0"),
        (torch.tensor([[-2, 0, 1, 1]]), ValueError, "its document must be"),
        (torch.tensor([[0, 0, 5, 1], [1, 0, 4, 1]]), ValueError, "runs_q has 9 rows; the shard has only 8"),
    ],
)
def test_bad_runs_are_named(table, error, words):
    with pytest.raises(error, match=words):
        runs.check_runs("runs_q", table, 8)
