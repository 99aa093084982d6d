"""cpu.sum_of_squares: against math.fsum, the same bits for any number of threads and on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch

from pyfast.kernels import cpu, plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 16384, 16385, 100_003])
def test_equals_the_exact_sum(dtype, count):
    x = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(dtype) * 1e3
    exact = math.fsum(value * value for value in x.tolist())
    # plain torch adds up in fewer chains side by side, which round more
    for module, tolerance in ((cpu, 1e-14), (plain, 1e-13)):
        total = module.sum_of_squares(x)
        assert total.dtype == torch.float64 and total.shape == ()
        assert total.item() == pytest.approx(exact, rel=tolerance)


def test_sums_what_overflows_float32_and_passes_nan_on():
    assert cpu.sum_of_squares(torch.full((1000,), 3e38)).item() == pytest.approx(1000 * float(torch.tensor(3e38)) ** 2)
    assert math.isnan(cpu.sum_of_squares(torch.tensor([1.0, math.nan])).item())
    assert cpu.sum_of_squares(torch.tensor([1.0, -math.inf])).item() == math.inf


def test_the_same_bits_for_any_threads_and_instruction_set():
    x = torch.randn(300_001, generator=torch.Generator().manual_seed(1))
    before, best = torch.get_num_threads(), cpu.available_isas()[0]
    results = set()
    try:
        for isa in cpu.available_isas():
            cpu.use_isa(isa)
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.add(cpu.sum_of_squares(x).item())
    finally:
        torch.set_num_threads(before)
        cpu.use_isa(best)
    assert len(results) == 1


def test_what_it_does_not_take_is_named():
    for x in (torch.ones(4, dtype=torch.bfloat16), torch.ones(4, 4).T[::2]):
        with pytest.raises(ValueError, match="contiguous float32 or float64"):
            cpu.sum_of_squares(x)
