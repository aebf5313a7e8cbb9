"""Decoded rows and events into whole transactions: pure but for what it sets aside on disk through `overflow`.

Promise: what comes out is committed, whole, in commit order, and ends beyond the LSN that the log reaches; of a
streamed transaction only the rows of surviving subtransactions. Prepared transactions are not asked for (see
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
from numpy.typing import NDArray

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
from cdc.capture.transactions.net_effect import settled, settled_parts, shows_deleted_rows
from cdc.errors import DecodeError, LogFull, SourceRefused
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry, Lsn

_PLAIN = frozenset({Begin, Commit, RelationChanged})


class Spilled(Protocol):
    """Rows set aside on disk (`cdc.capture.transactions.spill.SpillFile`)."""

    def write(self, rows: pa.Table) -> None:
        """Set rows aside. Raises LogFull: then the same call may be made again."""

    def read(self) -> Iterator[pa.Table]:
        """Everything written, in order."""

    def discard(self) -> None:
        """Forget it."""


@dataclass(frozen=True, slots=True)
class CommitStamp:
    """What the rows of a streamed transaction learn at its commit, and which subtransactions did not survive.

    `previous` is where the transaction committed before it ended; `schemas` are the ids of its new schemas by the
    provisional ones in the rows.
    """

    xid: int
    commit_lsn: Lsn
    commit_ts: int
    previous: Lsn = ZERO_LSN
    aborted: frozenset[int] = frozenset()
    schemas: Mapping[int, int] = field(default_factory=dict)

    def apply(self, rows: pa.Table, ordinal: int) -> pa.Table:
        """The surviving rows, counted from `ordinal`. While streamed, `xid` holds the subtransaction's."""
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
    """A whole transaction that lies on disk. `discard` it afterwards, whatever happened."""

    end: Lsn
    aside: Spilled
    stamp: CommitStamp | None = None
    unsettled: bool = False
    """Whether its net effect may lack some of its changes (`cdc.capture.transactions.net_effect`)."""
    rest: Sequence[pa.Table] = ()
    """Its last rows, where the disk had no room for them: no more than were read at once."""

    def parts(self) -> Iterator[pa.Table]:
        """Its rows in log order."""
        return settled_parts(self._stamped) if self.unsettled else self._stamped()

    def _stamped(self) -> Iterator[pa.Table]:
        ordinal = 0
        for rows in chain(self.aside.read(), self.rest):
            kept = rows if self.stamp is None else self.stamp.apply(rows, ordinal)
            ordinal += kept.num_rows
            yield kept

    def discard(self) -> None:
        """Give its disk space back."""
        self.aside.discard()


Item = Entry | SpilledTransaction | LogicalMessage | TableWaits


@dataclass(slots=True)
class _Rows:
    """Rows of one transaction on their way, in memory or set aside."""

    tables: list[pa.Table] = field(default_factory=list)
    size: int = 0
    aside: Spilled | None = None
    aborted: set[int] = field(default_factory=set)
    messages: list[LogicalMessage] = field(default_factory=list)
    unsettled: bool = False

    def add(self, rows: pa.Table) -> None:
        if rows.num_rows:
            self.tables.append(rows)
            self.size += rows.nbytes

    def flush(self) -> None:
        """Bring what is in memory to where the rest was set aside. Raises LogFull; what is left stays in memory."""
        while self.aside is not None and self.tables:
            self.aside.write(self.tables[0])
            rows = self.tables.pop(0)
            self.size -= rows.nbytes
            self.unsettled = self.unsettled or shows_deleted_rows(rows)

    def discard(self) -> None:
        if self.aside is not None:
            self.aside.discard()

    def complete(self, end: Lsn, stamp: CommitStamp | None = None) -> Entry | SpilledTransaction:
        if self.aside is not None:
            with suppress(LogFull):
                self.flush()
            unsettled = self.unsettled or any(map(shows_deleted_rows, self.tables))
            return SpilledTransaction(end, self.aside, stamp, unsettled, self.tables)
        rows = pa.concat_tables(self.tables) if self.tables else LOG_SCHEMA.empty_table()
        return Entry(settled(rows if stamp is None else stamp.apply(rows, 0)), end)


class Assembler:
    """Feeds in, transactions out. One per connection: a reconnect begins every open transaction afresh.

    About `budget` bytes of open transactions are held in memory; beyond that the largest is set aside on disk. Where
    that has no room, `trouble` says so: give it nothing more until `relieve` has worked.
    """

    def __init__(self, after: Lsn, budget: int, overflow: Callable[[], Spilled]) -> None:
        self._after = after
        self._budget = budget
        self._overflow = overflow
        self._open: _Rows | None = None
        self._streams: dict[int, _Rows] = {}
        self._block = 0
        self.trouble = ""

    @property
    def between(self) -> bool:
        """Whether no transaction is half received. Streamed ones do not count: their commit is yet to come."""
        return self._open is None and not self._block

    def take(self, rows: pa.Table, events: Sequence[Event], subxids: NDArray[np.int64]) -> list[Item]:
        """What these rows and events complete, in order."""
        if not self._block and _PLAIN.issuperset(map(type, events)):
            return self._take_plain(rows, events)
        items: list[Item] = []
        at = 0
        for event in events:
            self._add(rows.slice(at, event.row - at), subxids[at : event.row])
            at = event.row
            items += self._happened(event)
        self._add(rows.slice(at), subxids[at:])
        self.relieve()
        return items

    def discard(self) -> None:
        """Forget everything that is open."""
        for held in self._held():
            held.discard()
        self._open, self._block = None, 0
        self._streams.clear()

    def _take_plain(self, rows: pa.Table, events: Sequence[Event]) -> list[Item]:
        """The common case, without a look at each transaction: everything up to the last commit is one entry."""
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
            items.append(Entry(settled(rows.slice(taken, commits[-1].row - taken)), commits[-1].end_lsn))
            taken = commits[-1].row
        if type(next((event for event in reversed(events) if type(event) is not RelationChanged), None)) is Begin:
            self._open = _Rows()
        if self._open is not None:
            self._open.add(rows.slice(taken))
            self.relieve()
        return items

    def _happened(self, event: Event) -> list[Item]:
        match event:
            case Begin():
                self._open = _Rows()
            case Commit() if self._open is not None:
                whole, self._open = self._open, None
                return self._committed(whole, event.end_lsn)
            case StreamStart():
                self._block = event.xid
                self._streams.setdefault(event.xid, _Rows())
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
                return self._said(event)
            case TableWaits():
                return [event]  # ahead of its transaction: before any row of the table is missed
            case RelationChanged():
                pass
            case Commit() | StreamCommit():
                raise DecodeError("A commit without its transaction", 0)
            case _:
                raise SourceRefused(
                    "The slot sends prepared transactions ahead of their commit.",
                    "Use a slot that was made without two_phase: let Millrace make it.",
                )
        return []

    def _said(self, message: LogicalMessage) -> list[Item]:
        """A transactional message waits for its commit; the other kind is said at once, even if rolled back."""
        here = self._streams.get(self._block) if self._block else self._open
        if not message.transactional or here is None:
            return [message]
        here.messages.append(message)
        return []

    def _abort(self, event: StreamAbort) -> None:
        if event.xid == event.subxid:
            if (gone := self._streams.pop(event.xid, None)) is not None:
                gone.discard()
        elif event.xid in self._streams:
            self._streams[event.xid].aborted.add(event.subxid)

    def _committed(self, whole: _Rows, end: Lsn, stamp: CommitStamp | None = None) -> list[Item]:
        if end <= self._after:
            whole.discard()
            return []
        said = [message for message in whole.messages if message.xid not in whole.aborted]
        return [*said, whole.complete(end, stamp)]

    def _add(self, rows: pa.Table, subxids: NDArray[np.int64]) -> None:
        if not rows.num_rows:
            return
        if self._block:
            place = LOG_SCHEMA.get_field_index("xid")
            self._streams[self._block].add(rows.set_column(place, LOG_SCHEMA.field(place), pa.array(subxids)))
        elif self._open is not None:
            self._open.add(rows)
        else:
            raise DecodeError("A change outside of any transaction", 0)

    def relieve(self) -> bool:
        """Bring to disk what memory has no room for; False while the disk has none either."""
        try:
            self._relieve()
        except LogFull as error:
            self.trouble = str(error)
            return False
        self.trouble = ""
        return True

    def _relieve(self) -> None:
        held = []
        for rows in self._held():
            rows.flush()
            if rows.aside is None:
                held.append(rows)
        while held and sum(rows.size for rows in held) > self._budget:
            largest = max(held, key=lambda rows: rows.size)
            largest.aside = self._overflow()
            largest.flush()
            held.remove(largest)

    def _held(self) -> list[_Rows]:
        return [*self._streams.values(), *([self._open] if self._open is not None else [])]
