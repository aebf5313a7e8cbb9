"""A cache of the keys of files that a look-up has read: files never change.

Without it, each batch all over a table would open most of its files again. Only sorted integer keys are cached, as
distances from the first one: two bytes a row where keys are dense. Other files are read again.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.arrays import AnyArray, Ints

CAPACITY = 24 << 20
"""Bytes per table: twelve million dense keys. A full cache takes no more, rather than evict and read in turns."""
_WIDTHS: tuple[Any, ...] = (np.uint16, np.uint32, np.uint64)


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """The keys of one file, in ascending order; some may be equal."""

    base: int
    distances: npt.NDArray[Any]

    @classmethod
    def of(cls, stored: AnyArray) -> "SortedKeys | None":
        """None for texts and for unsorted keys."""
        if not pa.types.is_integer(stored.type) or stored.null_count or not len(stored):
            return None
        values = stored.to_numpy().astype(np.int64, copy=False)
        if (values[1:] < values[:-1]).any():
            return None
        base, span = int(values[0]), int(values[-1]) - int(values[0])
        width = next(one for one in _WIDTHS if span <= np.iinfo(one).max)
        return cls(base, (values - base).astype(width))

    def rows_with(self, asked: Ints) -> Ints:
        """The numbers of the rows with one of these keys; `asked` is sorted and distinct."""
        near = asked[(asked >= self.base) & (asked <= self.keys_of(np.array([-1]))[0])]
        sought = (near - self.base).astype(self.distances.dtype)
        first, last = (np.searchsorted(self.distances, sought, side=side) for side in ("left", "right"))
        counts = last - first
        before = np.cumsum(counts) - counts
        rows: Ints = np.repeat(first - before, counts) + np.arange(counts.sum())
        return rows

    def keys_of(self, rows: Ints) -> Ints:
        """The keys of these rows."""
        keys: Ints = self.distances[rows].astype(np.int64) + self.base
        return keys


class KeyCache:
    """The keys of a table's files, by path. Not for two threads at once."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._capacity = self._left = capacity
        self._keys: dict[str, SortedKeys] = {}
        self._column = ""

    def of_column(self, name: str) -> None:
        """Set the cached column; another one (the table's key was replaced) empties the cache."""
        if name != self._column:
            self._column, self._keys, self._left = name, {}, self._capacity

    def get(self, path: str) -> SortedKeys | None:
        """The cached keys of a file."""
        return self._keys.get(path)

    def keep(self, path: str, keys: SortedKeys) -> None:
        """Cache the keys of a file, if there is room."""
        if keys.distances.nbytes <= self._left:
            self._keys[path] = keys
            self._left -= keys.distances.nbytes

    def keep_only(self, live: Container[str]) -> None:
        """Drop files that are no longer part of the table."""
        for path in [path for path in self._keys if path not in live]:
            self._left += self._keys.pop(path).distances.nbytes
