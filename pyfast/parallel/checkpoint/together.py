"""Steps that all ranks take together: what fails on one rank is the same error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from torch.distributed.checkpoint.api import CheckpointException

from pyfast.parallel.checkpoint.metadata import CheckpointError

T = TypeVar("T")
# Errors that keep their type; any other becomes a CheckpointError that names it.
_KEPT = {error.__name__: error for error in (ValueError, TypeError, FileExistsError, FileNotFoundError)}


def together(group: Any, name: str, action: Callable[[], T], *, name_ranks: bool = True) -> list[T]:
    """Run `action` on every rank of `group` and return the results of all of them, in rank order.

    When it raises on any rank, every rank raises the same error once all have finished: of the same type if all
    failures are one of the plain types above, otherwise CheckpointError. It says which ranks failed unless all did or
    `name_ranks` is off.
    """
    try:
        outcome: tuple[Any, ...] = (None, action())
    except Exception as error:
        outcome = (_describe(error), None)
    outcomes = group.all_gather_object(outcome, name=name)
    failures = {rank: failure for rank, (failure, _) in enumerate(outcomes) if failure is not None}
    if failures:
        _raise(name, failures, len(outcomes) if name_ranks else len(failures))
    return [result for _, result in outcomes]


def on_first_rank(group: Any, name: str, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 only; every rank returns its result or raises its error."""
    return together(group, name, action if group.rank == 0 else lambda: None, name_ranks=False)[0]


def raise_as_ours(name: str, error: CheckpointException, size: int) -> NoReturn:
    """Turn the exception of torch.distributed.checkpoint, already equal on all ranks, into ours."""
    if any(isinstance(failure, KeyboardInterrupt) for failure, _ in error.failures.values()):
        raise KeyboardInterrupt from error
    _raise(name, {rank: _describe(failure) for rank, (failure, _) in sorted(error.failures.items())}, size)


def _describe(error: BaseException) -> tuple[str, str]:
    return type(error).__name__, str(error)


def _raise(name: str, failures: dict[int, tuple[str, str]], size: int) -> NoReturn:
    kinds = {kind for kind, _ in failures.values()}
    kept = _KEPT.get(next(iter(kinds))) if len(kinds) == 1 else None
    ranks_of: dict[str, list[int]] = {}
    for rank, (kind, text) in failures.items():
        plain = kind in _KEPT or kind == CheckpointError.__name__
        ranks_of.setdefault(text if plain else f"{kind}: {text}", []).append(rank)
    lines = []
    for text, ranks in ranks_of.items():
        everywhere = len(ranks) == size
        lines.append(text if everywhere else f"rank {', '.join(map(str, ranks))}: {text}")
    # Not chained: the cause may lie on another rank, and the text is the same on all.
    raise (kept or CheckpointError)(f"{name}: " + "\n".join(lines)) from None
