"""Counts of the changes appended to the log: for status and metrics, never for decisions."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa

_FEW = 64
"""Up to this many rows are counted one by one: a group-by takes a quarter of a millisecond even for one row."""
_Group = tuple[str, str, int, int, datetime]
"""Table, operation, count, and the LSN and time of the newest commit."""


@dataclass(frozen=True, slots=True)
class AppendTotals:
    """The counts at one moment: `changes` by table and operation, `newest` the last commit of each table."""

    changes: Mapping[tuple[str, str], int]
    rows: int
    size: int
    last_commit: datetime | None
    newest: Mapping[str, tuple[int, datetime]]


class AppendCounts:
    """Counts rows as they become durable. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: Counter[tuple[str, str]] = Counter()
        self._size = 0
        self._last: datetime | None = None
        self._newest: dict[str, tuple[int, datetime]] = {}

    def add(self, rows: pa.Table, size: int) -> None:
        """These rows, of `size` bytes, are in the log."""
        if not rows.num_rows:
            return
        groups = _grouped(rows)
        with self._lock:
            for table, op, count, lsn, at in groups:
                self._changes[table, op] += count
                self._note(table, (lsn, at))
            self._size += size
            self._last = max(group[-1] for group in groups)

    def merge(self, other: "AppendCounts") -> None:
        """Add the counts of `other`, whose rows are in the log now."""
        counted = other.totals()
        with self._lock:
            self._changes.update(counted.changes)
            self._size += counted.size
            self._last = counted.last_commit or self._last
            for table, newest in counted.newest.items():
                self._note(table, newest)

    def _note(self, table: str, newest: tuple[int, datetime]) -> None:
        self._newest[table] = max(newest, self._newest.get(table, newest))

    def totals(self) -> AppendTotals:
        """The counts so far."""
        with self._lock:
            return AppendTotals(dict(self._changes), self._changes.total(), self._size, self._last, dict(self._newest))


def _grouped(rows: pa.Table) -> list[_Group]:
    picked = rows.select(["table", "op", "commit_lsn", "commit_ts"])
    if rows.num_rows <= _FEW:
        columns: list[list[Any]] = [column.to_pylist() for column in picked.columns]
        return [(table, op, 1, lsn, at) for table, op, lsn, at in zip(*columns, strict=True)]
    counts = picked.group_by(["table", "op"], use_threads=False).aggregate(
        [([], "count_all"), ("commit_lsn", "max"), ("commit_ts", "max")]
    )
    names = ("table", "op", "count_all", "commit_lsn_max", "commit_ts_max")
    return [tuple(row[name] for name in names) for row in counts.to_pylist()]
