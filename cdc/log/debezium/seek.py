"""Finds an LSN in a partition of a connector's topic by binary search, since topics have no index of LSNs.

A message has the end of the transaction *before* its own (`commit_lsn`), which grows along a partition. Of the messages
whose previous transaction ended at or before the point, only those of the last transaction can end beyond it.
"""

from collections.abc import Callable, Iterable

import numpy as np

from cdc.log.kafka.read.ranges import OffsetRange, RangeRows

Read = Callable[[Iterable[OffsetRange]], list[RangeRows]]
_WINDOW = 64
"""Messages read in one step: most are changes, and every tombstone follows a delete."""


def offset_before(read: Read, whole: OffsetRange, point: int) -> int:
    """An offset before which no message belongs to a transaction that ends beyond the point."""
    low = whole.start or 0
    beyond = _first_above(read, whole, low, whole.end, point)
    last = _last_row(read, whole, low, beyond)
    return beyond if last is None else _first_above(read, whole, low, beyond, last - 1)


def _first_above(read: Read, whole: OffsetRange, low: int, high: int, bound: int) -> int:
    """The first offset in [low, high) whose message has a greater commit_lsn; `high` if there is none."""
    while low < high:
        middle = (low + high) // 2
        found = _first_row(read, whole, middle, high)
        if found is None or found[1] > bound:
            high = middle
        else:
            low = found[0] + 1
    return low


def _first_row(read: Read, whole: OffsetRange, start: int, end: int) -> tuple[int, int] | None:
    """Offset and commit_lsn of the first change at or after an offset."""
    while start < end:
        for part in read([OffsetRange(whole.topic, whole.partition, start, min(start + _WINDOW, end))]):
            return int(part.offsets[0]), int(part.rows.column("commit_lsn")[0].as_py() or 0)
        start += _WINDOW
    return None


def _last_row(read: Read, whole: OffsetRange, low: int, end: int) -> int | None:
    """The commit_lsn of the last change before an offset."""
    while low < end:
        for part in read([OffsetRange(whole.topic, whole.partition, max(low, end - _WINDOW), end)]):
            at = int(np.argmax(part.offsets))
            return int(part.rows.column("commit_lsn")[at].as_py() or 0)
        end -= _WINDOW
    return None
