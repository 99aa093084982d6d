"""Small kernels, right and wrong on purpose, for the tests of the tests (tests/kernels/triton/test_support_*.py)."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_one(x_ptr, y_ptr, length, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < length
    if MASKED:
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets, mask=mask) + 1, mask=mask)
    else:
        tl.store(y_ptr + offsets, tl.load(x_ptr + offsets) + 1, mask=mask)


@triton.jit
def all_write_the_first(y_ptr):
    tl.store(y_ptr, tl.program_id(0))


@triton.jit
def read_what_the_next_writes(x_ptr, length):
    program = tl.program_id(0)
    tl.store(x_ptr + program, tl.load(x_ptr + (program + 1) % length))


@triton.jit
def order_of_programs(counter_ptr, order_ptr):
    place = tl.atomic_add(counter_ptr, 1)
    tl.store(order_ptr + tl.program_id(0), place)


@triton.jit
def assert_below(x_ptr, limit):
    tl.device_assert(tl.load(x_ptr) < limit, "too large")


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr, OUT: tl.constexpr
):  # fmt: skip
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    a = tl.load(a_ptr + m[:, None] * K + k[None, :])
    b = tl.load(b_ptr + k[:, None] * N + n[None, :])
    c = tl.dot(a, b, input_precision=PRECISION)
    tl.store(c_ptr + m[:, None] * N + n[None, :], c.to(OUT))


@triton.jit
def bfloat16_arithmetic(x_ptr, y_ptr, sum_ptr, max_ptr, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i)
    tl.store(y_ptr + i, x * x + x)
    tl.store(sum_ptr, tl.sum(x, 0))
    tl.store(max_ptr, tl.max(x, 0))
