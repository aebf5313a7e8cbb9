"""The number of dead letters by sink and table, read from their files.

Promise: read after a sink's position, it counts every dead letter up to that position. A sink's status lags behind.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from sinks.apply.dead_letters import DeadLetters

_SETTLED = 1.0
"""Seconds after which an unchanged time stamp proves that a file is unchanged: file time stamps are coarse."""


class DeadLetterCounts:
    """The files of a pipeline's sinks. Cheap enough to poll: an unchanged file is not opened."""

    def __init__(self, state: Path, sinks: Iterable[str]) -> None:
        self._folders = {name: state / "dead-letters" / name for name in sinks}
        self._known: dict[str, tuple[tuple[int, int], Mapping[str, int]]] = {}

    def read(self) -> dict[str, Mapping[str, int]]:
        """By sink and table."""
        return {name: self._counts(name, folder) for name, folder in self._folders.items()}

    def _counts(self, name: str, folder: Path) -> Mapping[str, int]:
        try:
            found = (folder / "letters.db").stat()
        except FileNotFoundError:
            return {}
        stamp, known = (found.st_mtime_ns, found.st_size), self._known.get(name)
        if known is None or known[0] != stamp or time.time() - found.st_mtime < _SETTLED:
            self._known[name] = known = (stamp, DeadLetters(folder).counts())
        return known[1]
