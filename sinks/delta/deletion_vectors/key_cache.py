"""The keys of files that a look-up has read before, kept in little room: files never change.

A batch all over a table would else open most of its files again, each time. Only integer keys in order are kept, as
distances from the first one: two bytes a row where keys are dense. What finds no room is read from its file as ever.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.arrays import AnyArray, Ints

ROOM = 24 << 20
"""Bytes for a table: twelve million dense keys. Beyond it nothing is kept, rather than read and dropped in turns."""
_WIDTHS: tuple[Any, ...] = (np.uint16, np.uint32, np.uint64)


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """The keys of one file, in ascending order: some may be equal."""

    base: int
    distances: npt.NDArray[Any]

    @classmethod
    def of(cls, stored: AnyArray) -> "SortedKeys | None":
        """None for texts and for keys that are not in order."""
        if not pa.types.is_integer(stored.type) or stored.null_count or not len(stored):
            return None
        values = stored.to_numpy().astype(np.int64, copy=False)
        if (values[1:] < values[:-1]).any():
            return None
        base, span = int(values[0]), int(values[-1]) - int(values[0])
        width = next(one for one in _WIDTHS if span <= np.iinfo(one).max)
        return cls(base, (values - base).astype(width))

    def places(self, asked: Ints) -> Ints:
        """The numbers of the rows with one of these keys, which are sorted and distinct."""
        near = asked[(asked >= self.base) & (asked <= self.at(np.array([-1]))[0])]
        sought = (near - self.base).astype(self.distances.dtype)
        first, last = (np.searchsorted(self.distances, sought, side=side) for side in ("left", "right"))
        counts = last - first
        before = np.cumsum(counts) - counts
        places: Ints = np.repeat(first - before, counts) + np.arange(counts.sum())
        return places

    def at(self, places: Ints) -> Ints:
        """The keys of these rows."""
        keys: Ints = self.distances[places].astype(np.int64) + self.base
        return keys


class KeyCache:
    """By file. Not for two threads at once."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = self._left = room
        self._keys: dict[str, SortedKeys] = {}
        self._column = ""

    def of_column(self, name: str) -> None:
        """From here on this column's values are meant: a table whose key was replaced has another."""
        if name != self._column:
            self._column, self._keys, self._left = name, {}, self._room

    def get(self, path: str) -> SortedKeys | None:
        """What was kept of a file."""
        return self._keys.get(path)

    def keep(self, path: str, keys: SortedKeys) -> None:
        """Remember them, if there is room."""
        if keys.distances.nbytes <= self._left:
            self._keys[path] = keys
            self._left -= keys.distances.nbytes

    def keep_only(self, live: Container[str]) -> None:
        """Forget files that are no longer part of the table."""
        for path in [path for path in self._keys if path not in live]:
            self._left += self._keys.pop(path).distances.nbytes
