"""The product over rows that lie apart: the bits of the plain one, flags raised when rows are done, failures told."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch

from pyfast.comm.schedule import Cut, gather_order
from pyfast.kernels import cpu
from pyfast.kernels.extension import _C
from pyfast.kernels.panels import Flags


class Counters:
    """Flags in plain memory, as csrc/flags.h lays them out: 64 bytes each, 0 at first; and the process of this test."""

    def __init__(self, count: int) -> None:
        self.memory = torch.zeros((count + 2) * 16, dtype=torch.int32)
        self.start = (self.memory.data_ptr() + 63) // 64 * 64
        self.process = os.pidfd_open(os.getpid())
        self.peers = torch.tensor([[self.address(count), self.process]] * count, dtype=torch.int64)

    def address(self, index: int) -> int:
        return self.start + 64 * index

    def value(self, index: int) -> int:
        return self.memory[(self.address(index) - self.memory.data_ptr()) // 4].item()


@pytest.fixture
def counters():
    flags = Counters(3)
    yield flags
    os.close(flags.process)


CUT = Cut(2, (150, 0, 201), 1)


def product(counters, dtype, out_dtype, n=70, k=131, arrives=(0, 0, 0), leaves=(0, 0, 0), timeout_s=5.0, threads=1):
    """(what panel_gemm returned, its result, the plain product)."""
    torch.manual_seed(0)
    shards = [torch.randn(CUT.shard_rows(rank), k, dtype=torch.float64).to(dtype) for rank in range(3)]
    b, out = torch.randn(n, k, dtype=torch.float64).to(dtype).t(), torch.empty(CUT.rows, n, dtype=out_dtype)
    panels = torch.tensor(gather_order(CUT, 2))
    torch.set_num_threads(threads)
    try:
        code = cpu.panel_gemm(panels, shards, b, out, Flags(7, counters.peers, timeout_s, arrives, leaves))
    finally:
        torch.set_num_threads(1)
    whole = torch.cat([s.view(2, rows, k) for s, rows in zip(shards, CUT.lengths, strict=True)], 1).view(CUT.rows, k)
    return code, out, cpu.gemm(whole, b, torch.empty_like(out))


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "dtypes",
    [("float32",) * 2, ("float64",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32"), ("float16",) * 2],
    ids="-".join,
)
def test_it_has_the_bits_of_the_plain_product(counters, dtypes, threads):
    code, out, want = product(counters, *(getattr(torch, name) for name in dtypes), n=1100, k=400, threads=threads)
    assert code == -1 and torch.equal(out, want)


def test_a_flag_rises_when_its_rows_are_done(counters):
    addresses = [counters.address(index) for index in range(3)]
    assert product(counters, torch.float32, torch.float32, leaves=addresses)[0] == -1
    assert [counters.value(index) for index in range(3)] == [7, 7, 7]  # the rank without rows too


def test_it_waits_for_rows_that_come_late(counters):
    arrives = [counters.address(0), 0, 0]
    raising = threading.Timer(0.1, lambda: _C.flag_raise(counters.address(0), 7))
    start = time.monotonic()
    raising.start()
    code, out, want = product(counters, torch.float32, torch.float32, arrives=arrives)
    assert code == -1 and torch.equal(out, want) and time.monotonic() - start >= 0.09


def test_rows_that_never_come_are_an_error_code(counters):
    arrives = [counters.address(0), 0, 0]
    assert product(counters, torch.float32, torch.float32, arrives=arrives, timeout_s=0.1)[0] == 4 * 0 + 3
    _C.flag_raise(counters.address(3), 1)  # what the peers point to: given up
    assert product(counters, torch.float32, torch.float32, arrives=arrives)[0] == 4 * 0 + 2


def test_flags_pass_the_end_of_32_bits(counters):
    address, peer = counters.address(0), counters.peers.data_ptr()
    _C.flag_raise(address, 2**32 - 1)
    assert _C.flag_wait(address, 2**32 - 2, peer, 0.05) == 0
    assert _C.flag_wait(address, 1, peer, 0.05) == 3
    _C.flag_raise(address, 1)
    assert _C.flag_wait(address, 2**32 - 1, peer, 0.05) == 0


@pytest.mark.parametrize(("n", "k"), [(5, 0), (0, 5)])
def test_empty_products_raise_their_flags(counters, n, k):
    addresses = [counters.address(index) for index in range(3)]
    code, out, _ = product(counters, torch.float32, torch.float32, n=n, k=k, leaves=addresses)
    assert code == -1 and (out == 0).all()
    assert [counters.value(index) for index in range(3)] == [7, 7, 7]
