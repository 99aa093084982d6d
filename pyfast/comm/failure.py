"""Saying who is missing when a collective fails: ranks leave a note in the store, and read the notes of the others."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch.distributed as dist

# Ranks that wait in the same collective fail at about the same time; this long their notes are waited for.
_GRACE_S = 1.0
_POLL_S = 0.02


@dataclass(frozen=True)
class Place:
    """Where a rank was when its collective failed."""

    operation: str
    name: str
    group: str
    ranks: tuple[int, ...]
    sequence: int

    def same_group(self, other: Place) -> bool:
        return self.ranks == other.ranks


def describe_absent(store: dist.Store | None, rank: int, place: Place, grace_s: float = _GRACE_S) -> str:
    """One sentence on the ranks that have not reached `place`, where global rank `rank` has just failed."""
    if store is None:
        return "Which ranks are missing is not known: the group has no store."
    try:
        notes = _exchange_notes(store, rank, place, grace_s)
    except (RuntimeError, OSError) as error:
        # the store may have gone with the rank that kept it; the collective's own error is what matters
        return f"Which ranks are missing is not known: the store does not answer ({type(error).__name__})."
    absent, elsewhere = [], []
    for peer in place.ranks:
        note = notes.get(peer)
        if peer == rank:
            continue
        if note is None:
            absent.append(peer)
        elif not (note.same_group(place) and note.sequence >= place.sequence):
            elsewhere.append(f"rank {peer} failed in {note.operation} '{note.name}' of group '{note.group}'")
    sentences = []
    if absent:
        sentences.append(f"Ranks that have not arrived: {absent} (late, hung, or dead).")
    if elsewhere:
        sentences.append(f"Elsewhere: {'; '.join(elsewhere)}.")
    return " ".join(sentences) or "All ranks of the group have reported the same failure."


def _exchange_notes(store: dist.Store, rank: int, place: Place, grace_s: float) -> dict[int, Place]:
    store.set(_key(rank), json.dumps(place.__dict__))
    missing, notes = [peer for peer in place.ranks if peer != rank], {}
    deadline = time.monotonic() + grace_s
    while missing and time.monotonic() < deadline:
        for peer in list(missing):
            if store.check([_key(peer)]):
                fields = json.loads(store.get(_key(peer)))
                notes[peer] = Place(**{**fields, "ranks": tuple(fields["ranks"])})
                missing.remove(peer)
        time.sleep(_POLL_S)
    return notes


def _key(rank: int) -> str:
    return f"pyfast/failed/{rank}"
