"""kernels.gemm against float64 matmul: shapes around the tile sizes, strides, dtypes, accumulation, threads."""

from __future__ import annotations

import pytest
import torch

from pyfast.kernels import cpu, plain

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-14, torch.bfloat16: 3e-3, torch.float16: 4e-4}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "m, n, k", [(1, 1, 1), (12, 32, 384), (13, 33, 385), (5, 70, 3), (200, 97, 800), (31, 5000, 9)]
)
def test_equals_float64(m, n, k, dtype):
    torch.manual_seed(0)
    a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    out = cpu.gemm(a, b, torch.empty(m, n, dtype=dtype))
    assert relative_error(out, a.double() @ b.double()) < TOLERANCE[dtype]


def layouts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """x in memory orders a caller may come with."""
    wide = x.new_zeros(2 * x.shape[0], 3 * x.shape[1])
    spread = wide[::2, ::3]
    spread.copy_(x)
    return {"rows": x, "columns": x.t().contiguous().t(), "spread": spread}


@pytest.mark.parametrize("a_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("b_layout", ["rows", "columns", "spread"])
@pytest.mark.parametrize("a_layout", ["rows", "columns", "spread"])
def test_any_strides_give_the_same_bits(a_layout, b_layout, a_dtype):
    torch.manual_seed(0)
    a, b = torch.randn(37, 403).to(a_dtype), torch.randn(403, 71).bfloat16()
    expected = cpu.gemm(a, b, torch.empty(37, 71))
    assert relative_error(expected, a.double() @ b.double()) < 1e-6
    assert torch.equal(cpu.gemm(layouts(a)[a_layout], layouts(b)[b_layout], torch.empty(37, 71)), expected)
    # A transposed result is the product of the transposes; its sums run in the same order.
    assert torch.equal(cpu.gemm(layouts(a)[a_layout], b, torch.empty(71, 37).t()), expected)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_accumulate_and_scale_leave_the_surroundings_alone(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(26, 500, dtype=dtype), torch.randn(500, 45, dtype=dtype)
    buffer = torch.randn(30, 60, dtype=dtype)
    before = buffer.clone()
    cpu.gemm(a, b, buffer[2:28, 7:52], accumulate=True, scale=0.5)
    expected = before.double()
    expected[2:28, 7:52] += 0.5 * (a.double() @ b.double())
    assert relative_error(buffer[2:28, 7:52], expected[2:28, 7:52]) < TOLERANCE[dtype]
    buffer[2:28, 7:52] = before[2:28, 7:52]
    assert torch.equal(buffer, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_same_bits_for_any_number_of_threads(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(331, 900, dtype=dtype), torch.randn(900, 700, dtype=dtype)
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append(cpu.gemm(a, b, torch.empty(331, 700, dtype=dtype)))
    torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_rows_do_not_depend_on_their_neighbours():
    a, b = torch.randn(100, 128), torch.randn(128, 64)
    whole = cpu.gemm(a, b, torch.empty(100, 64))
    for first, last in ((0, 1), (3, 8), (40, 100)):
        assert torch.equal(cpu.gemm(a[first:last], b, torch.empty(last - first, 64)), whole[first:last])


def test_empty_dimensions():
    out = torch.full((3, 4), 7.0)
    cpu.gemm(torch.empty(3, 0), torch.empty(0, 4), out, accumulate=True)
    assert torch.equal(out, torch.full((3, 4), 7.0))
    cpu.gemm(torch.empty(3, 0), torch.empty(0, 4), out)
    assert torch.equal(out, torch.zeros(3, 4))
    assert cpu.gemm(torch.empty(0, 5), torch.empty(5, 4), torch.empty(0, 4)).shape == (0, 4)


def test_plain_form_agrees():
    a, b, out = torch.randn(9, 20).bfloat16(), torch.randn(20, 7), torch.randn(9, 7).bfloat16()
    torch.testing.assert_close(
        plain.gemm(a, b, out.clone(), True, 0.5), cpu.gemm(a, b, out.clone(), True, 0.5), rtol=8e-3, atol=1e-2
    )


def test_out_without_a_contiguous_dimension_is_refused():
    with pytest.raises(ValueError, match="out has strides"):
        cpu.gemm(torch.randn(3, 3), torch.randn(3, 3), torch.empty(6, 6)[::2, ::2])
