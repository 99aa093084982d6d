"""Memory that all ranks of one host map: one segment a rank, gone with the last process that maps it.

Segments are memfds, which the peers open through /proc: they have no name in any file system, so that nothing is left
behind however a process ends.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist


class Segments(NamedTuple):
    """Every rank's segment, mapped here, and a handle on every rank's process (the caller closes those)."""

    maps: list[mmap.mmap]
    pidfds: list[int]


def share_segments(
    process_group: dist.ProcessGroup, count: int, rank: int, size: int, *, reserve: bool = False
) -> Segments | None:
    """Make a segment of `size` bytes, map those of all `count` ranks; None, alike on every rank, if one cannot.

    A collective over `process_group`. It fails where the ranks cannot reach each other's memory (several hosts); with
    `reserve`, which takes the memory now and not page by page, also where there is not enough.
    """
    token = secrets.token_hex(16)
    descriptor = _create(token, size, reserve)
    try:
        peers: list[Any] = [None] * count
        dist.all_gather_object(peers, (os.getpid(), descriptor, token), group=process_group)
        mapped = None if descriptor is None else _map_all(peers, rank, descriptor, size)
        agreed: list[Any] = [None] * count
        # also the barrier after which the descriptors may go
        dist.all_gather_object(agreed, mapped is not None, group=process_group)
    finally:
        if descriptor is not None:
            os.close(descriptor)
    if mapped is None:
        return None
    if not all(agreed):
        close_all(mapped.pidfds)
        return None
    return mapped


def close_all(descriptors: list[int]) -> None:
    """Close `descriptors` and empty the list."""
    while descriptors:
        os.close(descriptors.pop())


def _create(token: str, size: int, reserve: bool) -> int | None:
    """A descriptor of this rank's segment; None where this cannot work."""
    if not (sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "pidfd_open")):
        return None
    try:
        descriptor = os.memfd_create(f"pyfast-{token}", os.MFD_CLOEXEC)
    except OSError:
        return None
    try:
        os.ftruncate(descriptor, size)
        if reserve:
            os.posix_fallocate(descriptor, 0, size)  # an error now, not a SIGBUS when memory has run out
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _map_all(peers: Sequence[Any], rank: int, descriptor: int, size: int) -> Segments | None:
    """Every rank's segment and process; None if one of them is out of reach (another host)."""
    segments, pidfds = [], []
    try:
        for peer, (pid, their_descriptor, token) in enumerate(peers):
            path = f"/proc/{pid}/fd/{their_descriptor}"
            # The name holds a secret of this run: a process of another host or container cannot be taken for the peer.
            if their_descriptor is None or f"pyfast-{token}" not in os.readlink(path):
                raise OSError("not the peer's segment")
            pidfds.append(os.pidfd_open(pid))
            theirs = os.dup(descriptor) if peer == rank else os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                segments.append(mmap.mmap(theirs, size))
            finally:
                os.close(theirs)
    except OSError:
        # the ranks agree on the slower transport then
        close_all(pidfds)
        return None
    return Segments(segments, pidfds)
