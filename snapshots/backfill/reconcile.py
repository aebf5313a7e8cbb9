"""Merges a chunk of rows that was read beside the stream with the changes of the stream. Pure.

The chunk was read between two marks in the WAL. A change in the stream between them wins over the chunk's row, so the
log has, for every key of the chunk, the state at the high mark. Two cases need more:

- A transaction can be in the WAL before the low mark and still be invisible to the chunk, while it waits for its flush
  or for a standby. Then the chunk has an older row than the log, and must be read again.
- A change between the marks may lack a large column that it did not touch (unchanged TOAST). The log may not have the
  row yet, so the change is completed from the chunk and repeated, with every column and its own version.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.json_text.members import build, members
from cdc.model import LOG_SCHEMA, Lsn

_WRAP = 0xFFFFFFFF
REMEMBERED = 65_536
"""The number of recent commits that are kept. An older one that is still invisible would have to wait for a standby
longer than this many later commits."""
MOST_BYTES = 64 * 2**20
"""The limit of changes kept for one window; above it, a smaller chunk is read."""

_WHOLE = pa.schema([LOG_SCHEMA.field(name) for name in ("key", "after", "version")])
_SEEN = ["op", "key", "after", "unchanged", "version", "schema_id"]


@dataclass(frozen=True, slots=True)
class PgSnapshot:
    """`pg_current_snapshot()`: which transactions a read sees. Its transaction ids have 64 bits, the stream's have
    32."""

    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse Postgres's `xmin:xmax:xip,xip`."""
        _, xmax, listed = text.split(":")
        return cls(int(xmax), frozenset(int(xid) for xid in listed.split(",") if xid))

    def hides(self, xids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these (32-bit) transactions are not visible."""
        listed = np.fromiter((xid & _WRAP for xid in self.running), np.int64, len(self.running))
        later = ((xids - (self.xmax & _WRAP)) & _WRAP) < 2**31
        hidden: NDArray[np.bool_] = np.isin(xids, listed) | later
        return hidden


class Committed:
    """The ids of the transactions that the stream sent last, in a circular buffer."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._xids = np.full(size, -1, np.int64)
        self._at = 0

    def add(self, xids: NDArray[np.int64]) -> None:
        """Add the transactions of these rows, which are in log order."""
        if not len(xids):
            return
        distinct = xids[np.concatenate(([True], xids[1:] != xids[:-1]))][-len(self._xids) :]
        slots = (self._at + np.arange(len(distinct))) % len(self._xids)
        self._xids[slots] = distinct
        self._at = int((self._at + len(distinct)) % len(self._xids))

    def recent(self) -> NDArray[np.int64]:
        """A copy of the ids, in no order."""
        return self._xids[self._xids >= 0].copy()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows (key, after) read under one snapshot; changes with a smaller version than `version` do not replace them."""

    rows: pa.Table
    snapshot: PgSnapshot
    version: Lsn
    schema_id: int


@dataclass(frozen=True, slots=True)
class Merged:
    """Rows (key, after, version) for the log at the high mark; `dropped`: rows for which the stream had newer
    changes."""

    rows: pa.Table
    dropped: int


@dataclass(frozen=True, slots=True)
class Reread:
    """The chunk cannot be merged; read it again, `smaller` if set, so that fewer changes fall between its marks."""

    reason: str
    smaller: bool = False


@dataclass(slots=True)
class Window:
    """The changes of one table between a low and a high mark. `before`: recent commits before the low mark."""

    table: str
    before: NDArray[np.int64]
    changes: list[pa.Table] = field(default_factory=list)
    size: int = 0
    unusable: str = ""
    """Why no chunk can be merged; empty: it can."""

    def add(self, rows: pa.Table) -> None:
        """The stream sent these committed rows."""
        mine = rows.filter(pc.equal(rows["table"], pa.scalar(self.table)))
        if self.unusable or not mine.num_rows:
            return
        self.changes.append(mine.select(_SEEN))
        self.size += mine.nbytes
        if self.size > MOST_BYTES:
            self.invalidate("the table changes faster than it is read")

    def invalidate(self, reason: str) -> None:
        """The stream sent changes that cannot be compared with a chunk."""
        self.unusable, self.changes = reason, []

    def merge(self, chunk: Chunk) -> Merged | Reread:
        """The rows to append at the high mark."""
        if self.unusable:
            return Reread(self.unusable, smaller=True)
        if chunk.snapshot.hides(self.before).any():
            return Reread("a transaction in the log is not visible yet")
        if not self.changes:
            return Merged(_versioned(chunk.rows, chunk.version), 0)
        changes = pa.concat_tables(self.changes)
        if not pc.all(pc.equal(changes["schema_id"], pa.scalar(chunk.schema_id, pa.int32()))).as_py():
            return Reread("the table's columns have changed")
        if pc.any(pc.equal(changes["op"], pa.scalar("t"))).as_py():
            return Merged(_WHOLE.empty_table(), chunk.rows.num_rows)
        touched = pc.is_in(chunk.rows["key"], changes["key"].combine_chunks())
        kept = chunk.rows.filter(pc.invert(touched))
        whole = _completed(chunk.rows.filter(touched), changes)
        return Merged(pa.concat_tables([_versioned(kept, chunk.version), whole]), chunk.rows.num_rows - kept.num_rows)


def _versioned(rows: pa.Table, version: Lsn) -> pa.Table:
    versions = pa.array(np.full(rows.num_rows, version, np.int64))
    return rows.select(["key", "after"]).append_column("version", versions).cast(_WHOLE)


def _completed(rows: pa.Table, changes: pa.Table) -> pa.Table:
    """The newest change of each of these keys that lacks a column, completed. Rare, hence row by row."""
    lacking = pc.greater(pc.fill_null(pc.list_value_length(changes["unchanged"]), pa.scalar(0)), pa.scalar(0))
    if not pc.any(lacking).as_py():
        return _WHOLE.empty_table()
    keys = pc.unique(changes.filter(lacking)["key"])
    histories: dict[str, list[dict[str, Any]]] = {}
    for change in changes.filter(pc.is_in(changes["key"], keys)).to_pylist():
        histories.setdefault(change["key"], []).append(change)
    chosen = rows.filter(pc.is_in(rows["key"], keys)).to_pylist()
    whole = [done for row in chosen if (done := _complete(histories[row["key"]], str(row["after"])))]
    return pa.Table.from_pylist(whole, schema=_WHOLE)


def _complete(history: list[dict[str, Any]], read: str) -> dict[str, Any] | None:
    """The last change with every column: from the newest older change that has it, else from the chunk's row.

    A column that no change between the marks touched is the same at both marks, so the chunk's value is right. Not if
    the key was deleted and reused by another row: the chunk may have read either of them.
    """
    last = history[-1]
    if last["op"] == "d" or not last["unchanged"]:
        return None
    born = max((at + 1 for at, change in enumerate(history) if change["op"] == "d"), default=0)
    images = [members(change["after"]) for change in reversed(history[born:]) if change["after"] is not None]
    row = members(read)
    if born and any(all(name not in image for image in images) for name in row):
        return None
    return {
        "key": last["key"],
        "after": build({name: next((image[name] for image in images if name in image), row[name]) for name in row}),
        "version": last["version"],
    }
