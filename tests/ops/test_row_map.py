"""ops.row_map against torch's stable sort."""

from __future__ import annotations

import pytest
import torch

from pyfast import ops
from pyfast.kernels import plain


def sorted_by_torch(experts: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    """(offsets, gather, slot, inverse) when nothing is dropped."""
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=num_experts)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return tuple(t.int() for t in (offsets, order // experts.shape[1], order, order.argsort()))


@pytest.mark.parametrize(("tokens", "k", "num_experts"), [(1, 1, 1), (100, 2, 8), (4096, 2, 64), (70_001, 3, 100)])
def test_equals_a_stable_sort(tokens, k, num_experts):
    torch.manual_seed(0)
    experts = torch.randint(0, num_experts, (tokens, k))
    mapped = ops.row_map(experts, num_experts)
    for ours, expected in zip(mapped[:4], sorted_by_torch(experts, num_experts), strict=True):
        assert ours.dtype == torch.int32 and torch.equal(ours, expected)
    assert mapped.k == k


def test_dropped_slots_leave_the_other_rows_where_they_belong():
    mapped = ops.row_map(torch.tensor([[1, -1], [0, 1], [-1, -1], [1, 0]]), 3)
    assert mapped.offsets.tolist() == [0, 2, 5, 5]
    assert mapped.slot.tolist() == [2, 7, 0, 3, 6, -1, -1, -1]
    assert mapped.gather.tolist() == [1, 3, 0, 1, 3, -1, -1, -1]
    assert mapped.inverse.tolist() == [2, -1, 0, 3, -1, -1, 4, 1]


def test_same_bytes_for_any_number_of_threads():
    """So many slots that 2, 3 and 5 threads each sort a chunk of their own."""
    experts = torch.randint(-1, 19, (40_000, 3), generator=torch.Generator().manual_seed(0))
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3, 5):
        torch.set_num_threads(count)
        results.append(ops.row_map(experts, 19))
    torch.set_num_threads(threads)
    for other in (*results[1:], plain.row_map(experts, 19)):
        assert all(torch.equal(a, b) for a, b in zip(results[0][:4], other[:4], strict=True))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("wrong", [8, -2, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("backend", [ops, plain], ids=["cpu", "plain"])
def test_an_id_that_does_not_exist_is_named(backend, wrong, dtype):
    experts = torch.zeros(70, 3, dtype=dtype)
    experts[41, 2] = wrong
    with pytest.raises(ValueError, match=f"experts holds {wrong} for token 41, slot 2.*0 to 7.*-1 for a dropped"):
        backend.row_map(experts, 8)


def test_an_id_beyond_int32_is_not_cut_off():
    with pytest.raises(ValueError, match=f"experts holds {2**32} for token 0"):
        ops.row_map(torch.tensor([[2**32]]), 8)


def test_the_first_of_several_wrong_ids_is_named_for_any_number_of_threads():
    experts = torch.zeros(60_000, 2, dtype=torch.int64)
    experts[[17_000, 50_000], 1] = 9
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        with pytest.raises(ValueError, match="experts holds 9 for token 17000, slot 1"):
            ops.row_map(experts, 3)
    torch.set_num_threads(threads)


def test_a_view_that_passes_two_billion_elements(tmp_path):
    """The last token's id lies 2.1e9 elements behind the first's: a sparse file takes no room for what is between."""
    path = tmp_path / "experts"
    path.touch()
    size = 2**31 + 8
    flat = torch.from_file(str(path), shared=True, size=size, dtype=torch.int32)
    flat[2**31 - 4], flat[2**31 + 5] = 2, 1
    experts = flat.as_strided((2, 2), (2**31 - 4, 9))
    assert [row.tolist() for row in experts] == [[0, 0], [2, 1]]
    mapped = ops.row_map(experts, 3)
    assert mapped.slot.tolist() == [0, 1, 3, 2]


def test_opcheck_and_fullgraph_compile():
    experts = torch.tensor([[1, 0], [2, -1], [1, 1]])
    torch.library.opcheck(torch.ops.pyfast.row_map.default, (experts, 3))
    compiled = torch.compile(lambda e: ops.row_map(e, 3), fullgraph=True, backend="aot_eager")(experts)
    assert all(torch.equal(a, b) for a, b in zip(compiled[:4], ops.row_map(experts, 3)[:4], strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"experts": [[0]]}, TypeError, "experts is list"),
        ({"experts": torch.zeros(2, 2)}, TypeError, "experts is torch.float32"),
        ({"experts": torch.zeros(2, dtype=torch.int64)}, ValueError, r"experts has shape \(2,\)"),
        ({"experts": torch.zeros(2, 0, dtype=torch.int64)}, ValueError, "at least one expert a token"),
        ({"num_experts": 0}, ValueError, "num_experts is 0"),
        ({"num_experts": 2.0}, TypeError, "num_experts is 2.0"),
        ({"num_experts": True}, TypeError, "num_experts is True"),
        ({"experts": torch.zeros(1, 1, dtype=torch.int32).expand(2**30, 2)}, ValueError, "2\\^31 slots"),
    ],
)
def test_bad_arguments_are_named(arguments, error, words):
    arguments = {"experts": torch.zeros(2, 2, dtype=torch.int64), "num_experts": 2, **arguments}
    with pytest.raises(error, match=words):
        ops.row_map(**arguments)
