"""A chunk of rows read beside the stream, made right for its place in the log: pure.

The chunk was read between two marks in the WAL. Whatever the stream changed between them wins over the chunk's row, so
at the high mark the log holds, for every key of the chunk, the state at the high mark. Two things need more care:

- A transaction can be in the WAL before the low mark and still be invisible to the chunk, while it waits for its flush
  or for a standby. Then the chunk has an older row than the log, and must be read again.
- A change between the marks may lack a large column that it did not touch (unchanged TOAST). Nobody needs to have the
  row yet, so the change is completed from the chunk and repeated, whole, with its own version.
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
"""Commits that are remembered. One that is older and still invisible waits for a standby that so many others, committed
later, did not wait for."""
MOST_BYTES = 64 * 2**20
"""Changes held for one window; more than that, and a smaller chunk is read instead."""

_WHOLE = pa.schema([LOG_SCHEMA.field(name) for name in ("key", "after", "version")])
_SEEN = ["op", "key", "after", "unchanged", "version", "schema_id"]


@dataclass(frozen=True, slots=True)
class PgSnapshot:
    """`pg_current_snapshot()`: what a read can see. Its transaction ids have 64 bits, the stream's have 32."""

    xmax: int
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read Postgres's `xmin:xmax:xip,xip`."""
        _, xmax, listed = text.split(":")
        return cls(int(xmax), frozenset(int(xid) for xid in listed.split(",") if xid))

    def hides(self, xids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these (32-bit) transactions it cannot see."""
        listed = np.fromiter((xid & _WRAP for xid in self.running), np.int64, len(self.running))
        later = ((xids - (self.xmax & _WRAP)) & _WRAP) < 2**31
        hidden: NDArray[np.bool_] = np.isin(xids, listed) | later
        return hidden


class Committed:
    """The transactions that the stream has shown last: a ring, so that remembering costs nothing."""

    def __init__(self, size: int = REMEMBERED) -> None:
        self._ring = np.full(size, -1, np.int64)
        self._at = 0

    def add(self, xids: NDArray[np.int64]) -> None:
        """Remember the transactions of these rows, which are in log order."""
        if not len(xids):
            return
        distinct = xids[np.concatenate(([True], xids[1:] != xids[:-1]))][-len(self._ring) :]
        places = (self._at + np.arange(len(distinct))) % len(self._ring)
        self._ring[places] = distinct
        self._at = int((self._at + len(distinct)) % len(self._ring))

    def recent(self) -> NDArray[np.int64]:
        """A copy of what is remembered, in no order."""
        return self._ring[self._ring >= 0].copy()


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows (key, after) read under one snapshot, none of which changes with a version below `version` can undo."""

    rows: pa.Table
    snapshot: PgSnapshot
    version: Lsn
    schema_id: int


@dataclass(frozen=True, slots=True)
class Merged:
    """Rows (key, after, version) for the log at the high mark; `dropped` is how many the stream had newer."""

    rows: pa.Table
    dropped: int


@dataclass(frozen=True, slots=True)
class Reread:
    """The chunk proves nothing; read it again, and where `smaller` less of it: a shorter window sees less go by."""

    reason: str
    smaller: bool = False


@dataclass(slots=True)
class Window:
    """What the stream says of one table between a low and a high mark. `before`: the commits seen before it."""

    table: str
    before: NDArray[np.int64]
    changes: list[pa.Table] = field(default_factory=list)
    size: int = 0
    spoiled: str = ""

    def see(self, rows: pa.Table) -> None:
        """Committed rows go by."""
        mine = rows.filter(pc.equal(rows["table"], pa.scalar(self.table)))
        if self.spoiled or not mine.num_rows:
            return
        self.changes.append(mine.select(_SEEN))
        self.size += mine.nbytes
        if self.size > MOST_BYTES:
            self.spoil("the table changes faster than it is read")

    def spoil(self, reason: str) -> None:
        """Something goes by that cannot be weighed against a chunk."""
        self.spoiled, self.changes = reason, []

    def merge(self, chunk: Chunk) -> Merged | Reread:
        """What belongs into the log at the high mark."""
        if self.spoiled:
            return Reread(self.spoiled, smaller=True)
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
    """The newest change of each of these keys that lacks something, made whole. Rare, hence row by row."""
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
    """The last change with every column: from the nearest older change that has it, else from the row as read.

    What no change between the marks has touched is the same at both marks, so the chunk's value is the right one.
    Not so where the key was deleted and taken over by another row: the chunk may have read either of them.
    """
    last = history[-1]
    if last["op"] == "d" or not last["unchanged"]:
        return None
    born = max((at + 1 for at, change in enumerate(history) if change["op"] == "d"), default=0)
    images = [members(change["after"]) for change in reversed(history[born:]) if change["after"] is not None]
    row = members(read)
    if born and any(all(name not in held for held in images) for name in row):
        return None
    return {
        "key": last["key"],
        "after": build({name: next((held[name] for held in images if name in held), row[name]) for name in row}),
        "version": last["version"],
    }
