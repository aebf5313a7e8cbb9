"""The decoder of `pgoutput`, protocol 1 to 4: WAL messages in, Arrow rows and events out. Pure: no socket, no clock.

    decoder = Decoder(schemas, catalog)
    decoded = decoder.feed(frames)      # CopyData payloads as received: XLogData; keepalives are skipped

`decoded.rows` is one table in LOG_SCHEMA with every change of the feed, in stream order. `decoded.events` is everything
else in the stream (`events`), in stream order, each with `row`: the number of rows before it. So a transaction's rows
are `rows.slice(begin.row, commit.row - begin.row)`, and all complete transactions of a feed are one slice up to the
last Commit's `row`; no code runs per row. A transaction may span feeds, and so may a block of a streamed one. `ordinal`
counts a transaction's rows across feeds.

- `version` is the greater of the change's own LSN and the end of the transaction committed before: see
  docs/adr/0013-versions.md. Two changes of one transaction may have the same.
- `commit_lsn` and `commit_ts` come from Begin. In a streamed block they are 0: the caller fills them in at
  StreamCommit, after dropping the rows whose `subxid` was aborted, and raises `version` to its `previous`.
  `decoded.subxids` has each row's own (sub)transaction id; for rows that are not streamed, the transaction's.
- A key change is two rows, `d` of the old key and `c` of the new one, same version, adjacent ordinals. The trap: the
  `c` may have `unchanged` columns, whose values are stored under the old key (not under FULL, which sends them).
- `before` is set only under identity FULL. `unchanged` is NULL if every column was sent.
- Truncate: one row per table, op `t`, key, after and before NULL.
- Keys: the columns of the replica identity. Under FULL the stream flags every column as key, so `keys` looks up the
  primary key; without one the whole row is the key, as for a table with identity NOTHING (inserts only).
- A relation message applies from its position on, also inside a transaction. A schema that is new in a streamed block
  has a negative `schema_id` in its rows; the StreamCommit has the id that it was recorded under.
- Rows of tables that are not captured are dropped before their columns are decoded.

Malformed bytes raise DecodeError and nothing else, a slot with two_phase SourceRefused; the decoder must not be used
afterwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cdc.arrays import Ints
from cdc.capture.pgoutput import changes, control_messages
from cdc.capture.pgoutput.changes import Changes
from cdc.capture.pgoutput.cursor import MessageCursor
from cdc.capture.pgoutput.events import (
    Event,
    LogicalMessage,
    RelationChanged,
    StreamAbort,
    StreamCommit,
    StreamStart,
    TableWaits,
)
from cdc.capture.pgoutput.frames import BEGIN, COMMIT, Frames, flags_of_kinds, join
from cdc.capture.pgoutput.relations import Catalog, Keys, Relations
from cdc.capture.pgoutput.transaction_context import RowTransactions, TransactionContexts
from cdc.capture.replication.captured_tables import CapturedTables
from cdc.capture.rows.arrow_buffers import repeated, take
from cdc.capture.rows.layout import RowLayout
from cdc.capture.rows.mask import NO_MASK, Masking
from cdc.errors import DecodeError, SourceRefused
from cdc.model import LOG_SCHEMA, ZERO_LSN, Lsn
from cdc.ports import Schemas

PART = 64 << 20
"""Feeds are decoded in parts of this many bytes, so that no Arrow buffer comes near its limit of 2 GiB."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """The content of one feed: see the module."""

    rows: pa.Table
    events: Sequence[Event]
    subxids: Ints


class Decoder:
    """Decodes one replication stream from its start. Not thread-safe.

    `schemas` records every new table schema (masked). `catalog` looks up types that are not built in. `keys` looks up
    the primary key of a table with identity FULL. `parallel`: the stream was started with `streaming 'parallel'`
    (protocol 4), whose aborts are longer. `after` is the position that the stream was started from: transactions that
    end at or before it are in the log, later ones are not. `captured` are the tables to decode; None: all.
    """

    def __init__(
        self,
        schemas: Schemas,
        catalog: Catalog,
        keys: Keys = lambda _: (),
        masking: Masking = NO_MASK,
        *,
        parallel: bool = False,
        after: Lsn = ZERO_LSN,
        captured: CapturedTables | None = None,
    ) -> None:
        self._relations = Relations(schemas, catalog, keys, masking, captured)
        self._contexts = TransactionContexts(ended=after)
        self._parsers = dict(control_messages.PARSERS)
        if parallel:
            self._parsers["A"] = control_messages.parallel_abort

    def feed(self, frames: Sequence[bytes | memoryview]) -> Decoded:
        """Decode the next frames of the stream. Raises DecodeError; see the module for the result."""
        return _joined([self._decode(join(part)) for part in _parts(frames)])

    def _decode(self, frames: Frames) -> Decoded:
        _check_kinds(frames)
        found = self._control(frames)
        scopes = self._scopes(frames, found)
        self._contexts.check(frames, frames.of(_ROWS))
        self._read_relations(frames, scopes, found)
        groups = self._changes(frames, scopes) + self._truncates(frames, scopes)
        self._relations.end_feed()
        counts = np.zeros(len(frames), np.int64)
        for _, group in groups:
            counts += np.bincount(group.message, minlength=len(frames))
        message = np.repeat(np.arange(len(frames)), counts)
        transactions = self._contexts.assign(frames, found, counts, message)
        rows = _table(groups, frames, message, transactions)
        subxids = transactions.xid if scopes is None else _subxids(frames, scopes, message, transactions.xid)
        return Decoded(rows, control_messages.ordered(frames, found, counts), subxids)

    def _control(self, frames: Frames) -> dict[int, Event]:
        """The rare messages, parsed one by one. Origins and types are parsed, but not used."""
        streamed = self._contexts.streamed_flags(frames)
        found: dict[int, Event] = {}
        for index in frames.of(_RARE).tolist():
            message = frames.message(index)
            kind = chr(message[0])
            cursor = MessageCursor(message)
            xid = cursor.u32() if kind in "MY" and streamed is not None and streamed[index] else 0
            event = self._parsers[kind](cursor)
            cursor.end()
            if event is not None:
                found[index] = event._replace(xid=xid) if isinstance(event, LogicalMessage) else event
        return found

    def _scopes(self, frames: Frames, found: Mapping[int, Event]) -> Ints | None:
        """The streamed transaction that each message belongs to, 0 for none; None: the feed has no streamed block."""
        streamed = self._contexts.streamed_flags(frames)
        if streamed is None:
            return None
        starts = [(index, event.xid) for index, event in found.items() if isinstance(event, StreamStart)]
        at = np.array([index for index, _ in starts], np.int64)
        xids = np.array([self._contexts.xid, *(xid for _, xid in starts)], np.int64)
        return np.where(streamed, xids[np.searchsorted(at, np.arange(len(frames)), side="right")], 0)

    def _read_relations(self, frames: Frames, scopes: Ints | None, found: dict[int, Event]) -> None:
        """Process relation messages and the ends of streamed transactions in stream order."""
        for index in frames.of(_RELATIONS).tolist():
            event = found.get(index)
            if isinstance(event, StreamCommit):
                found[index] = event._replace(schemas=self._relations.commit(event.xid, index))
            elif isinstance(event, StreamAbort):
                if event.xid == event.subxid:
                    self._relations.end(event.xid)
            else:
                scope = 0 if scopes is None else int(scopes[index])
                new = self._relations.read(frames.message(index), scope, index)
                if new is not None:
                    found[index] = new if isinstance(new, TableWaits) else RelationChanged(new.schema)

    def _changes(self, frames: Frames, scopes: Ints | None) -> list[tuple[RowLayout, Changes]]:
        """The inserts, updates and deletes, grouped by table schema."""
        message = frames.of(_CHANGES)
        if len(message) == 0:
            return []
        scope = None if scopes is None else scopes[message]
        at = frames.start[message] + (1 if scope is None else np.where(scope != 0, 5, 1))
        short = at + 5 > frames.stop[message]
        if short.any():
            index = int(message[np.argmax(short)])
            raise DecodeError("A row message ends before its row", frames.offset(index, int(frames.stop[index])))
        oid = frames.u32(at)
        groups = self._by_layout(scope, oid, message)
        return [(layout, changes.decode(frames, layout, message[rows], at[rows] + 4)) for layout, rows in groups]

    def _by_layout(self, scope: Ints | None, oid: Ints, message: Ints) -> list[tuple[RowLayout, Ints | slice]]:
        """The rows of each layout, without tables that are not captured. A usual feed has one table with one layout."""
        first = int(oid[0])
        if scope is None and (oid == first).all() and not self._relations.changed_at(0, first):
            layout = self._relations.layout_at(0, first, int(message[0]))
            return [] if layout is None else [(layout, slice(None))]
        return self._by_each_layout(np.zeros(len(oid), np.int64) if scope is None else scope, oid, message)

    def _by_each_layout(self, scope: Ints, oid: Ints, message: Ints) -> list[tuple[RowLayout, Ints | slice]]:
        parts: dict[int, tuple[RowLayout, list[Ints]]] = {}
        for code in np.unique(scope << 32 | oid).tolist():
            of_scope, of_oid = code >> 32, code & 0xFFFFFFFF
            rows = np.flatnonzero((oid == of_oid) & (scope == of_scope))
            cuts = np.searchsorted(message[rows], self._relations.changed_at(of_scope, of_oid))
            for piece in filter(len, np.split(rows, cuts)):
                layout = self._relations.layout_at(of_scope, of_oid, int(message[piece[0]]))
                if layout is not None:
                    parts.setdefault(id(layout), (layout, []))[1].append(piece)
        return [(layout, np.sort(np.concatenate(pieces))) for layout, pieces in parts.values()]

    def _truncates(self, frames: Frames, scopes: Ints | None) -> list[tuple[RowLayout, Changes]]:
        groups = []
        for index in frames.of(_TRUNCATE).tolist():
            scope = 0 if scopes is None else int(scopes[index])
            for oid in control_messages.truncated(frames.message(index), scope != 0):
                if (layout := self._relations.layout_at(scope, oid, index)) is not None:
                    groups.append((layout, changes.truncate(index)))
        return groups


_KNOWN = flags_of_kinds("BCORYIUDTMSEcA")
_TRUNCATE = flags_of_kinds("T")
_CHANGES = flags_of_kinds("IUD")
_ROWS = flags_of_kinds("IUDT")
_PREPARED = frozenset(b"bPKrp")
_RELATIONS = flags_of_kinds("RcA")
_RARE = flags_of_kinds("SEcAMOY")
_SIZES = (("B", BEGIN, 21), ("C", COMMIT, 26))


def _check_kinds(frames: Frames) -> None:
    unknown = frames.of(~_KNOWN)
    if len(unknown):
        at = int(unknown[0])
        if frames.kind[at] in _PREPARED:
            raise SourceRefused(
                "The slot sends prepared transactions before their commit.",
                "Use a slot that was created without two_phase: let Millrace create it.",
            )
        raise DecodeError(f"Message kind {frames.kind[at]} is unknown", frames.offset(at, int(frames.start[at])))
    for kind, flags, wanted in _SIZES:
        these = frames.of(flags)
        wrong = frames.stop[these] - frames.start[these] != wanted
        if wrong.any():
            at = int(these[np.argmax(wrong)])
            raise DecodeError(f"A {kind} message has the wrong length", frames.offset(at, int(frames.stop[at])))


def _parts(frames: Sequence[bytes | memoryview]) -> Iterator[Sequence[bytes | memoryview]]:
    """The frames in runs of at most PART bytes; a larger frame is a run of its own."""
    if sum(map(len, frames)) <= PART:
        yield frames
        return
    first = size = 0
    for at, frame in enumerate(frames):
        if size and size + len(frame) > PART:
            yield frames[first:at]
            first, size = at, 0
        size += len(frame)
    yield frames[first:]


def _joined(parts: Sequence[Decoded]) -> Decoded:
    if len(parts) == 1:
        return parts[0]
    found: list[Event] = []
    before = 0
    for part in parts:
        found.extend(event._replace(row=event.row + before) for event in part.events)
        before += part.rows.num_rows
    rows = pa.concat_tables([part.rows for part in parts])
    return Decoded(rows, found, np.concatenate([part.subxids for part in parts]))


def _table(
    groups: Sequence[tuple[RowLayout, Changes]], frames: Frames, message: Ints, transactions: RowTransactions
) -> pa.Table:
    """The rows of all groups in stream order."""
    if not groups:
        return LOG_SCHEMA.empty_table()
    parts = [
        [
            repeated(str(layout.schema.table), len(group.message)),
            *group.texts,
            pa.array(np.full(len(group.message), layout.schema.id, np.int32)),
        ]
        for layout, group in groups
    ]
    columns = parts[0]
    if len(groups) > 1:
        order = np.argsort(np.concatenate([group.message for _, group in groups]), kind="stable")
        columns = [take(pa.concat_arrays(column), order) for column in zip(*parts, strict=True)]
    arrays = [
        *columns[:-1],
        pa.array(np.maximum(frames.lsn[message], transactions.previous)),
        pa.array(transactions.commit_lsn),
        pa.array(transactions.ordinal),
        pa.array(transactions.xid),
        pa.array(transactions.commit_ts).view(pa.timestamp("us", tz="UTC")),
        columns[-1],
    ]
    return pa.Table.from_arrays(arrays, schema=LOG_SCHEMA)


def _subxids(frames: Frames, scopes: Ints, message: Ints, xid: Ints) -> Ints:
    own = frames.u32(frames.start[message] + 1)
    return np.where(scopes[message] != 0, own, xid)
