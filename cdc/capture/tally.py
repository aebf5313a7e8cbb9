"""What went into the log, counted: for status and metrics, never for decisions."""

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc


@dataclass(frozen=True, slots=True)
class Counted:
    """The counts at one moment; `changes` by table and operation, `newest` the last commit of each table."""

    changes: Mapping[tuple[str, str], int]
    rows: int
    size: int
    last_commit: datetime | None
    newest: Mapping[str, tuple[int, datetime]]


class Tally:
    """Counts rows as they become durable. Safe to read from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: Counter[tuple[str, str]] = Counter()
        self._size = 0
        self._last: datetime | None = None
        self._newest: dict[str, tuple[int, datetime]] = {}

    def add(self, rows: pa.Table) -> None:
        """These rows are in the log."""
        if not rows.num_rows:
            return
        groups = rows.select(["table", "op", "commit_lsn", "commit_ts"]).group_by(["table", "op"], use_threads=False)
        counts = groups.aggregate([([], "count_all"), ("commit_lsn", "max"), ("commit_ts", "max")])
        last = pc.max(rows["commit_ts"]).as_py()
        with self._lock:
            for row in counts.to_pylist():
                self._changes[row["table"], row["op"]] += row["count_all"]
                self._note(row["table"], (row["commit_lsn_max"], row["commit_ts_max"]))
            self._size += rows.nbytes
            self._last = last

    def merge(self, other: "Tally") -> None:
        """What another one counted is in the log as well."""
        counted = other.counted()
        with self._lock:
            self._changes.update(counted.changes)
            self._size += counted.size
            self._last = counted.last_commit or self._last
            for table, newest in counted.newest.items():
                self._note(table, newest)

    def _note(self, table: str, newest: tuple[int, datetime]) -> None:
        self._newest[table] = max(newest, self._newest.get(table, newest))

    def counted(self) -> Counted:
        """The counts so far."""
        with self._lock:
            return Counted(dict(self._changes), self._changes.total(), self._size, self._last, dict(self._newest))
