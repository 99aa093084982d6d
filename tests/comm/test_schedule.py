"""Plans of overlapped collectives: every row once, own shard first, nobody in two places."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from pyfast.comm.schedule import Cut, even_lengths, gather_order, scatter_order

cuts = st.builds(
    Cut,
    outer=st.integers(1, 3),
    lengths=st.lists(st.integers(0, 4), min_size=1, max_size=5).map(tuple),
    inner=st.integers(1, 3),
)


@given(cuts)
def test_panels_put_shards_where_concatenation_does(cut):
    shards = [torch.arange(cut.shard_rows(rank)) + 1000 * rank for rank in range(len(cut.lengths))]
    whole = torch.cat([s.view(cut.outer, -1, cut.inner) for s in shards], 1).flatten()
    for rank in range(len(cut.lengths)):
        for order in (gather_order(cut, rank), scatter_order(cut, rank)):
            got = torch.full((cut.rows,), -1)
            for owner, shard_row, row, rows in order:
                assert rows > 0 and (got[row : row + rows] == -1).all(), "a row twice"
                got[row : row + rows] = shards[owner][shard_row : shard_row + rows]
            assert torch.equal(got, whole)


@given(cuts)
def test_a_rank_gathers_its_own_shard_first_and_scatters_it_last(cut):
    for rank in range(len(cut.lengths)):
        gathered = [panel[0] for panel in gather_order(cut, rank)]
        scattered = [panel[0] for panel in scatter_order(cut, rank)]
        if rank in gathered:
            assert gathered[: cut.outer] == [rank] * cut.outer and scattered[-cut.outer :] == [rank] * cut.outer


def test_no_two_ranks_read_from_the_same_one_at_a_time():
    cut = Cut(1, (3, 3, 3, 3), 2)
    for step in range(4):
        assert len({gather_order(cut, rank)[step][0] for rank in range(4)}) == 4
        assert len({scatter_order(cut, rank)[step][0] for rank in range(4)}) == 4


def test_even_lengths_are_those_of_array_split():
    for length in (0, 1, 7, 12):
        for ranks in (1, 2, 3, 5):
            assert even_lengths(length, ranks) == tuple(len(part) for part in torch.arange(length).tensor_split(ranks))
