"""The mended interpreter: bfloat16 as torch has it, and planted mistakes are found."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")
import triton.language as tl  # noqa: E402
from support import triton_examples as example  # noqa: E402
from support.triton_interpreter import shuffled_programs, tf32_products  # noqa: E402

pytestmark = pytest.mark.triton_interpreter


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_products_are_rounded_once(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(16, 32, dtype=dtype), torch.randn(32, 16, dtype=dtype)
    c = torch.empty(16, 16, dtype=dtype)
    out = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}[dtype]
    example.matmul[(1,)](a, b, c, 16, 16, 32, "ieee", out)
    torch.testing.assert_close(c.double(), a.double() @ b.double(), rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_bfloat16_arithmetic_rounds_to_nearest_as_torch_does():
    x = torch.randn(64, dtype=torch.bfloat16)
    y, total, largest = torch.empty_like(x), torch.empty(1, dtype=x.dtype), torch.empty(1, dtype=x.dtype)
    example.bfloat16_arithmetic[(1,)](x, y, total, largest, 64)
    torch.testing.assert_close(y, x * x + x, rtol=0, atol=0)
    torch.testing.assert_close(total[0], x.float().sum().bfloat16(), rtol=2**-7, atol=0)
    assert largest[0] == x.max()


def test_tf32_products_show_the_error_of_tf32():
    a, b, c = torch.randn(16, 32), torch.randn(32, 16), torch.empty(16, 16)
    with tf32_products():
        example.matmul[(1,)](a, b, c, 16, 16, 32, "tf32", tl.float32)
        tf32 = (c - a @ b).norm() / c.norm()
        example.matmul[(1,)](a, b, c, 16, 16, 32, "ieee", tl.float32)
        ieee = (c - a @ b).norm() / c.norm()
    assert 1e-5 < tf32 < 1e-3 and ieee < 1e-6


def test_a_missing_mask_is_found():
    x, y = torch.arange(100.0), torch.empty(100)
    example.add_one[(2,)](x, y, 100, 64, True)
    torch.testing.assert_close(y, x + 1)
    with pytest.raises(Exception, match="28 of 64 addresses lie in no argument"):
        example.add_one[(2,)](x, y, 100, 64, False)


def test_two_writers_are_found():
    with pytest.raises(Exception, match=r"\(1, 0, 0\) writes what program number 0 wrote"):
        example.all_write_the_first[(2,)](torch.empty(1, dtype=torch.int32))


def test_a_reader_and_a_writer_are_found():
    with pytest.raises(Exception, match=r"\(1, 0, 0\) writes what program number 0 read"):
        example.read_what_the_next_writes[(4,)](torch.zeros(4), 4)


def test_programs_run_in_the_order_asked_for():
    counter, order = torch.zeros(1, dtype=torch.int32), torch.empty(8, dtype=torch.int32)
    example.order_of_programs[(8,)](counter, order)
    assert order.tolist() == list(range(8))
    counter.zero_()
    with shuffled_programs(seed=1):
        example.order_of_programs[(8,)](counter, order)
    assert order.tolist() != list(range(8)) and sorted(order.tolist()) == list(range(8))


def test_device_asserts_are_checked():
    example.assert_below[(1,)](torch.ones(1), 2.0)
    with pytest.raises(Exception, match="too large"):
        example.assert_below[(1,)](torch.full((1,), 3.0), 2.0)
