"""One run at a time in a directory: a lock that lasts as long as the process that took it, however that ends."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from pyfast.train.errors import ConfigError, TrainingError

FILE_NAME = ".lock"
# A run that was just killed may still hold its lock for a moment.
PATIENCE_SECONDS = 2.0
# File systems that know no locks: the run goes on without.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class RunLock:
    """The directories a run writes to, `directories`: config key -> path.

    The lock is on a file `.lock` in each, which stays behind and says which process took it last.
    """

    def __init__(self, directories: Mapping[str, str | os.PathLike[str]]):
        self._waiting = {key: Path(path) for key, path in directories.items()}
        self._held: dict[Path, IO[str]] = {}

    def take_existing(self) -> None:
        """Lock the directories that exist; makes none. Raises `TrainingError` as `take` does."""
        self._take([key for key, path in self._waiting.items() if path.exists()])

    def take(self) -> None:
        """Make the directories and lock them.

        Raises `ConfigError` for one that cannot be made or written to, `TrainingError` naming the directory and the
        process when another run holds it, or made it after `take_existing`.
        """
        for key, path in self._waiting.items():
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _unusable(key, path, error) from error
        new = list(self._waiting.values())
        self._take(list(self._waiting))
        for path in new:
            if any(entry.name.startswith(("metrics", "step-")) for entry in path.iterdir()):
                raise TrainingError(f"Another run wrote to {path} while this one started. Start it again to go on.")

    def release(self) -> None:
        """Let others have the directories."""
        for file in self._held.values():
            file.close()
        self._held = {}

    def _take(self, keys: list[str]) -> None:
        for key in keys:
            path = self._waiting.pop(key)
            if path.resolve() in self._held:  # two keys, one directory
                continue
            try:
                file = (path / FILE_NAME).open("a+", encoding="utf-8")
            except OSError as error:
                raise _unusable(key, path, error) from error
            self._held[path.resolve()] = file
            _lock(file, path)


def _lock(file: IO[str], path: Path) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.seek(0)
                raise TrainingError(
                    f"Another run ({file.read().strip() or 'of unknown process'}) is writing to {path}. "
                    "Wait for it or stop it, or give this one another --log.directory."
                ) from None
            time.sleep(0.05)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            return
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


def _unusable(key: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        key, str(path), f"cannot be written to: {error.strerror}", hint="Give a directory, or a path to make one at."
    )
