"""The 16 bits a bfloat16 pre-activation is kept in, against rounding to 10 significant bits in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed")
import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from pyfast.kernels.triton.kept import from_kept, kept_view, to_kept  # noqa: E402

pytestmark = pytest.mark.triton_interpreter


@triton.jit
def keep_kernel(p_x, p_kept, p_again, SIZE: tl.constexpr):
    o_i = tl.arange(0, SIZE)
    b_kept = to_kept(tl.load(p_x + o_i), p_kept.dtype.element_ty)
    tl.store(p_kept + o_i, b_kept)
    tl.store(p_again + o_i, from_kept(b_kept))


def kept_and_read(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(what is kept of float32 x [a power of 2] in a tensor of `dtype`, what is read from it)."""
    kept, again = torch.empty(x.shape, dtype=dtype), torch.empty_like(x)
    keep_kernel[(1,)](x, kept_view(kept), again, SIZE=x.numel())
    return kept, again


def test_values_are_rounded_to_ten_significant_bits_ties_to_even():
    torch.manual_seed(0)
    x = (1 + torch.rand(2048)) * torch.randn(2048).sign() * 2.0 ** torch.randint(-38, 23, (2048,))
    x[:512] = (1 + (torch.arange(512) + 0.5) / 512) * 2.0 ** torch.randint(-39, 22, (512,))  # all are ties
    _, again = kept_and_read(x, torch.bfloat16)
    wide = x.double()
    unit = 2.0 ** (torch.frexp(wide).exponent - 10).double()
    assert torch.equal(again.double(), (wide / unit).round() * unit)


def test_what_is_kept_twice_is_the_same():
    x = torch.randn(256)
    kept, again = kept_and_read(x, torch.bfloat16)
    assert torch.equal(kept_and_read(again, torch.bfloat16)[0].view(torch.int16), kept.view(torch.int16))


def test_values_without_a_code():
    """Too small is 0, too large the largest, which infinity is too; NaN stays NaN, and the sign of all others stays."""
    least, largest = 2.0**-39, (2 - 2.0**-8) * 2.0**23
    nan, inf = float("nan"), float("inf")
    x = torch.tensor([0.0, 1e-45, least * 0.999, least, largest, 2.0**24, 3e38, inf])
    wanted = torch.tensor([0.0, 0.0, 0.0, least, largest, largest, largest, largest])
    for sign in (1, -1):
        _, again = kept_and_read(sign * x, torch.bfloat16)
        assert torch.equal(again, sign * wanted)
        assert torch.equal(again.signbit(), (sign * x).signbit())
    assert kept_and_read(torch.full((4,), nan), torch.bfloat16)[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_types_are_only_cast(dtype):
    x = torch.tensor([1.0, -1.2345678, 1e5, float("nan")])
    kept, again = kept_and_read(x, dtype)
    torch.testing.assert_close(kept, x.to(dtype), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(again, kept.float(), rtol=0, atol=0, equal_nan=True)
