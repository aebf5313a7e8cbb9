"""Assembles decoded rows and events into complete transactions. Pure but for spilling to disk through `open_spill`.

Promise: the result is committed, complete, in commit order, and ends after the log's end; a streamed transaction has
only the rows of subtransactions that were not rolled back. Prepared transactions are not requested (see
`cdc.capture.replication.connection.protocol`): they arrive at COMMIT PREPARED like any other.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import Ints
from cdc.capture.pgoutput.events import (
    Begin,
    Commit,
    Event,
    LogicalMessage,
    RelationChanged,
    StreamAbort,
    StreamCommit,
    StreamStart,
    StreamStop,
    TableWaits,
)
from cdc.capture.transactions.net_effect import has_full_deletes, reduced, reduced_parts
from cdc.errors import DecodeError, LogFull
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry, Lsn

_PLAIN = frozenset({Begin, Commit, RelationChanged})


class Spilled(Protocol):
    """Rows of one transaction on disk (`cdc.capture.transactions.spill.SpillFile`)."""

    def write(self, rows: pa.Table) -> None:
        """Write rows. Raises LogFull: then the same call may be repeated."""

    def read(self) -> Iterator[pa.Table]:
        """Everything written, in order."""

    def discard(self) -> None:
        """Free the disk space."""


@dataclass(frozen=True, slots=True)
class CommitStamp:
    """What the rows of a streamed transaction get at its commit, and which subtransactions were rolled back.

    `previous` is the end of the transaction committed before it; `schemas` are the ids of its new schemas by the
    provisional ids in the rows.
    """

    xid: int
    commit_lsn: Lsn
    commit_ts: int
    previous: Lsn = ZERO_LSN
    aborted: frozenset[int] = frozenset()
    schemas: Mapping[int, int] = field(default_factory=dict)

    def apply(self, rows: pa.Table, ordinal: int) -> pa.Table:
        """The committed rows, numbered from `ordinal`. Until then, `xid` is the subtransaction's."""
        if self.aborted:
            dead = pa.array(sorted(self.aborted), pa.int64())
            rows = rows.filter(pc.invert(pc.is_in(rows["xid"], dead)))
        count = rows.num_rows
        when = pa.scalar(self.commit_ts, LOG_SCHEMA.field("commit_ts").type)
        stamps = {
            "version": pa.array(np.maximum(rows["version"].to_numpy(), self.previous)),
            "commit_lsn": pa.array(np.full(count, self.commit_lsn, np.int64)),
            "ordinal": pa.array(np.arange(ordinal, ordinal + count)),
            "xid": pa.array(np.full(count, self.xid, np.int64)),
            "commit_ts": pa.repeat(when, count),
        }
        if self.schemas:
            stamps["schema_id"] = self._renumbered(rows["schema_id"])
        columns = [stamps.get(name, rows[name]) for name in LOG_SCHEMA.names]
        return pa.Table.from_arrays(columns, schema=LOG_SCHEMA)

    def _renumbered(self, ids: "pa.ChunkedArray[Any]") -> "pa.Array[Any]":
        found = ids.to_numpy().copy()
        for provisional, recorded in self.schemas.items():
            found[found == provisional] = recorded
        return pa.array(found, pa.int32())


@dataclass(frozen=True, slots=True)
class SpilledTransaction:
    """A complete transaction on disk. `discard` it afterwards, also after an error."""

    end: Lsn
    spilled: Spilled
    stamp: CommitStamp | None = None
    reducible: bool = False
    """Whether its net effect may lack some of its changes (`cdc.capture.transactions.net_effect`)."""
    rest: Sequence[pa.Table] = ()
    """Its last rows, if the disk had no room for them: at most those of one feed."""

    def parts(self) -> Iterator[pa.Table]:
        """Its rows in log order."""
        return reduced_parts(self._stamped) if self.reducible else self._stamped()

    def _stamped(self) -> Iterator[pa.Table]:
        ordinal = 0
        for rows in chain(self.spilled.read(), self.rest):
            kept = rows if self.stamp is None else self.stamp.apply(rows, ordinal)
            ordinal += kept.num_rows
            yield kept

    def discard(self) -> None:
        """Free its disk space."""
        self.spilled.discard()


Item = Entry | SpilledTransaction | LogicalMessage | TableWaits


@dataclass(slots=True)
class _OpenTransaction:
    """The rows of one open transaction, in memory or on disk."""

    tables: list[pa.Table] = field(default_factory=list)
    size: int = 0
    spilled: Spilled | None = None
    aborted: set[int] = field(default_factory=set)
    messages: list[LogicalMessage] = field(default_factory=list)
    reducible: bool = False

    def add(self, rows: pa.Table) -> None:
        if rows.num_rows:
            self.tables.append(rows)
            self.size += rows.nbytes

    def flush(self) -> None:
        """Write the rows in memory to the spill file, if any. Raises LogFull; unwritten rows stay in memory."""
        while self.spilled is not None and self.tables:
            self.spilled.write(self.tables[0])
            rows = self.tables.pop(0)
            self.size -= rows.nbytes
            self.reducible = self.reducible or has_full_deletes(rows)

    def discard(self) -> None:
        if self.spilled is not None:
            self.spilled.discard()

    def complete(self, end: Lsn, stamp: CommitStamp | None = None) -> Entry | SpilledTransaction:
        if self.spilled is not None:
            with suppress(LogFull):
                self.flush()
            reducible = self.reducible or any(map(has_full_deletes, self.tables))
            return SpilledTransaction(end, self.spilled, stamp, reducible, self.tables)
        rows = pa.concat_tables(self.tables) if self.tables else LOG_SCHEMA.empty_table()
        return Entry(reduced(rows if stamp is None else stamp.apply(rows, 0)), end)


class Assembler:
    """Feeds in, transactions out. One per connection: a reconnect receives open transactions from their start.

    About `budget` bytes of open transactions stay in memory; above that the largest is spilled to disk. If the disk has
    no room, `trouble` says so: give it nothing more until `spill` returns True.
    """

    def __init__(self, after: Lsn, budget: int, open_spill: Callable[[], Spilled]) -> None:
        self._after = after
        self._budget = budget
        self._open_spill = open_spill
        self._open: _OpenTransaction | None = None
        self._streams: dict[int, _OpenTransaction] = {}
        self._block = 0
        self.trouble = ""

    @property
    def idle(self) -> bool:
        """Whether no transaction is partly received. Streamed ones do not count: their commit comes later."""
        return self._open is None and not self._block

    def take(self, rows: pa.Table, events: Sequence[Event], subxids: Ints) -> list[Item]:
        """The transactions and messages that these rows and events complete, in order."""
        if not self._block and _PLAIN.issuperset(map(type, events)):
            return self._take_plain(rows, events)
        items: list[Item] = []
        at = 0
        for event in events:
            self._add(rows.slice(at, event.row - at), subxids[at : event.row])
            at = event.row
            items += self._handle(event)
        self._add(rows.slice(at), subxids[at:])
        self.spill()
        return items

    def discard(self) -> None:
        """Drop all open transactions."""
        for rows in self._in_progress():
            rows.discard()
        self._open, self._block = None, 0
        self._streams.clear()

    def _take_plain(self, rows: pa.Table, events: Sequence[Event]) -> list[Item]:
        """The common case, without work per transaction: everything up to the last commit is one entry."""
        commits = [event for event in events if type(event) is Commit]
        items: list[Item] = []
        taken = 0
        if commits and self._open is not None:
            first = commits.pop(0)
            self._open.add(rows.slice(0, first.row))
            items += self._committed(self._open, first.end_lsn)
            self._open, taken = None, first.row
        while commits and commits[0].end_lsn <= self._after:
            taken = commits.pop(0).row
        if commits:
            items.append(Entry(reduced(rows.slice(taken, commits[-1].row - taken)), commits[-1].end_lsn))
            taken = commits[-1].row
        if type(next((event for event in reversed(events) if type(event) is not RelationChanged), None)) is Begin:
            self._open = _OpenTransaction()
        if self._open is not None:
            self._open.add(rows.slice(taken))
            self.spill()
        return items

    def _handle(self, event: Event) -> list[Item]:
        match event:
            case Begin():
                self._open = _OpenTransaction()
            case Commit() if self._open is not None:
                whole, self._open = self._open, None
                return self._committed(whole, event.end_lsn)
            case StreamStart():
                self._block = event.xid
                self._streams.setdefault(event.xid, _OpenTransaction())
            case StreamStop():
                self._block = 0
            case StreamAbort():
                self._abort(event)
            case StreamCommit() if event.xid in self._streams:
                whole = self._streams.pop(event.xid)
                stamp = CommitStamp(
                    event.xid,
                    event.commit_lsn,
                    event.commit_ts,
                    event.previous,
                    frozenset(whole.aborted),
                    event.schemas,
                )
                return self._committed(whole, event.end_lsn, stamp)
            case LogicalMessage():
                return self._message(event)
            case TableWaits():
                return [event]  # before its transaction commits: before any row of the table is missed
            case RelationChanged():
                pass
            case Commit() | StreamCommit():
                raise DecodeError("A commit without its transaction", 0)
        return []

    def _message(self, message: LogicalMessage) -> list[Item]:
        """A transactional message waits for its commit; the other kind counts at once, even if rolled back."""
        here = self._streams.get(self._block) if self._block else self._open
        if not message.transactional or here is None:
            return [message]
        here.messages.append(message)
        return []

    def _abort(self, event: StreamAbort) -> None:
        if event.xid == event.subxid:
            if (dropped := self._streams.pop(event.xid, None)) is not None:
                dropped.discard()
        elif event.xid in self._streams:
            self._streams[event.xid].aborted.add(event.subxid)

    def _committed(self, whole: _OpenTransaction, end: Lsn, stamp: CommitStamp | None = None) -> list[Item]:
        if end <= self._after:
            whole.discard()
            return []
        messages = [message for message in whole.messages if message.xid not in whole.aborted]
        return [*messages, whole.complete(end, stamp)]

    def _add(self, rows: pa.Table, subxids: Ints) -> None:
        if not rows.num_rows:
            return
        if self._block:
            column = LOG_SCHEMA.get_field_index("xid")
            self._streams[self._block].add(rows.set_column(column, LOG_SCHEMA.field(column), pa.array(subxids)))
        elif self._open is not None:
            self._open.add(rows)
        else:
            raise DecodeError("A change outside of any transaction", 0)

    def spill(self) -> bool:
        """Write to disk what exceeds the memory budget; False while the disk has no room either."""
        try:
            self._spill_largest()
        except LogFull as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        return True

    def _spill_largest(self) -> None:
        in_memory = []
        for rows in self._in_progress():
            rows.flush()
            if rows.spilled is None:
                in_memory.append(rows)
        while in_memory and sum(rows.size for rows in in_memory) > self._budget:
            largest = max(in_memory, key=lambda rows: rows.size)
            largest.spilled = self._open_spill()
            largest.flush()
            in_memory.remove(largest)

    def _in_progress(self) -> list[_OpenTransaction]:
        return [*self._streams.values(), *([self._open] if self._open is not None else [])]
