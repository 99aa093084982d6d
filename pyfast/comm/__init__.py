"""Transports: groups of ranks that exchange tensors, how a process joins them, and how their traffic is counted."""

from __future__ import annotations

from pyfast.comm.group import Group, Work
from pyfast.comm.record import Event, record

__all__ = ["Event", "Group", "Work", "record"]
