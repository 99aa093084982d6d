"""glibc's allocator, set so that large temporaries are reused instead of mapped anew.

By default glibc gives every block above a threshold (128 KiB, at most 32 MiB) a fresh mapping and returns it to the
system when it is freed, so each step pays a page fault for every 4 KiB of every large activation. A training process
uses the same sizes step after step: keeping the memory costs nothing and saves the faults. Only the training process
calls this, never `import pyfast`: it is a setting of the whole process.
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3
LARGEST = 2**31 - 1
LARGEST_OLD = 32 * 2**20  # glibc before 2.35 takes no larger threshold
PAD = 64 * 2**20


def reuse_large_blocks() -> bool:
    """Serve blocks of any size below 2 GiB from the heap and keep freed memory. True where this worked (glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # musl
        return False
    kept = mallopt(M_TRIM_THRESHOLD, LARGEST) == 1 and mallopt(M_TOP_PAD, PAD) == 1
    return kept and (mallopt(M_MMAP_THRESHOLD, LARGEST) == 1 or mallopt(M_MMAP_THRESHOLD, LARGEST_OLD) == 1)
