"""How many dead letters each sink has of each table, read from the files themselves.

Promise: asked after a sink's position, it has every letter that was parked on the way there. What the sink says of
itself comes later.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from sinks.apply.dead_letters import DeadLetters

_SETTLED = 1.0
"""Seconds after which a file that looks the same is the same: the clock of its time stamp is coarse."""


class DeadLetterCounts:
    """The files of a pipeline's sinks. Cheap to ask again and again: a file that has not changed is not opened."""

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
