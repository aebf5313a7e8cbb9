"""Relation messages: the table schemas that rows are decoded with, and which one applies at which position.

A relation message applies from its position on. Inside a streamed block it applies to that transaction only; at the
commit it applies to all, as the server assumes too. A schema that is new there has a provisional (negative) id until
the commit, so that a rollback leaves nothing in the registry.

A relation that is not captured has no layout: it is neither looked up nor recorded, and its rows are dropped. A
captured table that cannot be captured any more waits at once, also in a streamed block: if that is rolled back, the
table is read again although nothing was wrong.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection
from dataclasses import replace

from cdc.capture.pgoutput.cursor import MessageCursor
from cdc.capture.pgoutput.events import TableWaits
from cdc.capture.replication.captured_tables import CapturedTables, WaitReason
from cdc.capture.rows.layout import RowLayout, lay_out, recorded_as
from cdc.capture.rows.mask import Masking
from cdc.capture.rows.types import BUILT_IN
from cdc.capture.source.schema_policy import already_recorded, refusal, stops
from cdc.errors import DecodeError
from cdc.model import Column, PgType, TableId, TableSchema
from cdc.ports import Schemas

Catalog = Callable[[int], PgType]
"""Looks up a type by oid; called once for each oid that is not built in."""
Keys = Callable[[int], Collection[str]]
"""Looks up the primary key columns of a table by oid; called only under identity FULL, where the stream flags every
column as key. Empty: the table has no primary key, and the whole row is the key."""

_KEY_FLAG = 1


class Relations:
    """Every relation known so far, by scope (0, or the streamed transaction's id) and oid."""

    def __init__(
        self, schemas: Schemas, catalog: Catalog, keys: Keys, masking: Masking, captured: CapturedTables | None = None
    ) -> None:
        self._captured = captured
        self._schemas = schemas
        self._catalog = catalog
        self._keys = keys
        self._masking = masking
        self._types: dict[int, PgType] = {}
        self._messages: dict[int, tuple[bytes, RowLayout | None]] = {}
        self._history: dict[tuple[int, int], list[tuple[int, RowLayout | None]]] = {}
        self._ended: set[int] = set()
        self._pending: dict[int, list[tuple[bytes, RowLayout]]] = {}
        self._provisional = 0

    def read(self, message: memoryview, scope: int, at: int) -> RowLayout | TableWaits | None:
        """Read the relation message with index `at` in this feed; returns the layout if it is new, or the table that
        waits from here on."""
        body = bytes(message[5 if scope else 1 :])
        oid = int.from_bytes(body[:4], "big")
        seen = self._messages.get(oid)
        if seen is not None and seen[0] == body:
            self._history.setdefault((scope, oid), []).append((at, seen[1]))
            return None
        before = None if seen is None else seen[1]
        found = self._layout_or_wait(message, scope, body)
        layout = found if isinstance(found, RowLayout) else None
        if layout is None:
            self._messages[oid] = (body, None)
        self._history.setdefault((scope, oid), []).append((at, layout))
        changed = layout is not None and (before is None or before.schema != layout.schema)
        return found if changed or layout is None else None

    def _layout_or_wait(self, message: memoryview, scope: int, body: bytes) -> RowLayout | TableWaits | None:
        """The layout of a captured table, or that it waits; None: the table is not captured."""
        cursor = MessageCursor(message)
        if scope:
            cursor.u32()
        oid = cursor.u32()
        table = TableId(cursor.text() or "pg_catalog", cursor.text())
        if self._captured is None or self._captured.has(table):
            layout = self._layout(_parsed(cursor, oid, table, self._type))
            reason = self._obstacle(layout.schema, scope)
            return self._recorded(layout, scope, body) if reason is None else self._waits(table, reason)
        found = self._captured.renamed(oid, table)
        return None if found is None else self._waits(*found)

    def _waits(self, table: TableId, reason: WaitReason) -> TableWaits:
        if self._captured is not None:
            self._captured.remove(table)
        return TableWaits(table, reason)

    def _obstacle(self, schema: TableSchema, scope: int) -> WaitReason | None:
        """Why a captured table cannot be captured with this schema."""
        if self._captured is None:
            return None
        if (lost := self._captured.lost_key(schema)) is not None:
            return lost
        earlier = (layout.schema for _, layout in reversed(self._pending.get(scope, [])))
        refused = refusal(self._schemas, schema, next((had for had in earlier if had.table == schema.table), None))
        if refused is None or stops(self._schemas):  # then `record` raises, for a streamed transaction at its commit
            return None
        return WaitReason(refused.message, refused.remedy)

    def _recorded(self, layout: RowLayout, scope: int, body: bytes) -> RowLayout:
        """Record the schema; that of a streamed transaction only at its commit, because its DDL may be rolled back."""
        if self._captured is not None:
            self._captured.note(layout.schema)
        found = already_recorded(self._schemas, layout.schema) if scope else self._schemas.record(layout.schema)
        if found is not None:
            layout = recorded_as(layout, found)
            self._messages[layout.schema.oid] = (body, layout)
            return layout
        self._provisional -= 1
        layout = recorded_as(layout, replace(layout.schema, id=self._provisional))
        self._pending.setdefault(scope, []).append((body, layout))
        return layout

    def layout_at(self, scope: int, oid: int, at: int) -> RowLayout | None:
        """The layout of a row in the message with this index; None: its table is not captured.

        Raises DecodeError if the stream has not described the relation.
        """
        history = self._history.get((scope, oid), [])
        index = bisect_left(history, at, key=lambda entry: entry[0])
        if index:
            return history[index - 1][1]
        if not scope:
            raise DecodeError(f"Message {at} of the feed is of relation {oid}, which was never described", 0)
        return self.layout_at(0, oid, at)

    def changed_at(self, scope: int, oid: int) -> list[int]:
        """The messages of this feed at which the layout of this relation changes."""
        return [at for at, _ in self._history.get((scope, oid), []) if at >= 0]

    def commit(self, scope: int, at: int) -> dict[int, int]:
        """The streamed transaction is committed: record its schemas, which apply to every transaction from here on.

        Returns the ids of its schemas by the provisional (negative) ids in its rows.
        """
        recorded: dict[int, RowLayout] = {}
        for body, layout in self._pending.pop(scope, ()):
            kept = recorded_as(layout, self._schemas.record(replace(layout.schema, id=0)))
            recorded[layout.schema.id] = kept
            self._messages[layout.schema.oid] = (body, kept)
        for (inner, oid), history in list(self._history.items()):
            if inner == scope:
                last = history[-1][1]
                kept_last = None if last is None else recorded.get(last.schema.id, last)
                self._history.setdefault((0, oid), []).append((at, kept_last))
        self.end(scope)
        return {provisional: layout.schema.id for provisional, layout in recorded.items()}

    def end(self, scope: int) -> None:
        """The streamed transaction has ended; its rows in this feed may still need its layouts."""
        self._pending.pop(scope, None)
        self._ended.add(scope)

    def end_feed(self) -> None:
        """The feed has ended: only the last layouts apply from here on."""
        for key, history in list(self._history.items()):
            if key[0] in self._ended:
                del self._history[key]
            else:
                history[:] = [(-1, history[-1][1])]
        self._ended.clear()

    def _layout(self, schema: TableSchema) -> RowLayout:
        if schema.identity == "f" and (names := self._keys(schema.oid)):
            schema = _keyed(schema, names)
        return lay_out(schema, self._masking)

    def _type(self, oid: int) -> PgType:
        found = BUILT_IN.get(oid) or self._types.get(oid)
        if found is None:
            found = self._types[oid] = self._catalog(oid)
        return found


def _keyed(schema: TableSchema, names: Collection[str]) -> TableSchema:
    columns = tuple(
        Column(column.name, column.type, column.modifier, column.name in names) for column in schema.columns
    )
    return TableSchema(schema.table, columns, schema.id, schema.oid, schema.identity)


def _parsed(cursor: MessageCursor, oid: int, table: TableId, find: Catalog) -> TableSchema:
    """The rest of a relation message, after its name."""
    identity = chr(cursor.octet())
    if identity not in "dfin":
        raise DecodeError(f"Relation {table} has an unknown replica identity", 0)
    raw = [(cursor.octet(), cursor.text(), cursor.u32(), cursor.i32()) for _ in range(cursor.u16())]
    cursor.end()
    columns = tuple(
        Column(name, find(type_oid), modifier, bool(flags & _KEY_FLAG)) for flags, name, type_oid, modifier in raw
    )
    return TableSchema(table, columns, 0, oid, identity)
