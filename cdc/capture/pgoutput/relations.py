"""Relation messages: the table schemas that rows are decoded with, and which of them counts where in the stream.

A relation counts from its message on. Inside a streamed block it counts for that transaction only, until its commit
makes it everybody's: so does the server think of what it has sent. A schema that is new there has a provisional id
(negative) until then, so that a rollback leaves nothing in the registry.

A relation that is not captured has no layout: nothing is asked or recorded of it, and its rows are dropped. A captured
table that cannot be followed any more is said to wait at once, also in a streamed block: should that be rolled back,
the table has waited for nothing and is read again.
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
from cdc.capture.source.schema_policy import refusal, standing, stops
from cdc.errors import DecodeError
from cdc.model import Column, PgType, TableId, TableSchema
from cdc.ports import Schemas

Catalog = Callable[[int], PgType]
"""Finds a type by oid; asked only for oids that are not Postgres's own, once each."""
Keys = Callable[[int], Collection[str]]
"""Finds the primary key's columns of a table by oid; asked only under identity FULL, where the wire calls every
column a key. Empty: the table has none, and its whole row is its key."""

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
        self._over: set[int] = set()
        self._pending: dict[int, list[tuple[bytes, RowLayout]]] = {}
        self._provisional = 0

    def learn(self, message: memoryview, scope: int, place: int) -> RowLayout | TableWaits | None:
        """Take in a relation message that stands at `place` of this feed; returns the layout where it is new, or which
        table waits from here on."""
        body = bytes(message[5 if scope else 1 :])
        oid = int.from_bytes(body[:4], "big")
        seen = self._messages.get(oid)
        if seen is not None and seen[0] == body:
            self._history.setdefault((scope, oid), []).append((place, seen[1]))
            return None
        before = None if seen is None else seen[1]
        found = self._taken_in(message, scope, body)
        layout = found if isinstance(found, RowLayout) else None
        if layout is None:
            self._messages[oid] = (body, None)
        self._history.setdefault((scope, oid), []).append((place, layout))
        changed = layout is not None and (before is None or before.schema != layout.schema)
        return found if changed or layout is None else None

    def _taken_in(self, message: memoryview, scope: int, body: bytes) -> RowLayout | TableWaits | None:
        """The layout of a captured table; None: nobody wants its rows."""
        reading = MessageCursor(message)
        if scope:
            reading.u32()
        oid = reading.u32()
        table = TableId(reading.text() or "pg_catalog", reading.text())
        if self._captured is None or self._captured.takes(table):
            layout = self._laid_out(_parsed(reading, oid, table, self._type))
            reason = self._obstacle(layout.schema, scope)
            return self._recorded(layout, scope, body) if reason is None else self._waits(table, reason)
        found = self._captured.renamed(oid, table)
        return None if found is None else self._waits(*found)

    def _waits(self, table: TableId, reason: WaitReason) -> TableWaits:
        if self._captured is not None:
            self._captured.wait(table)
        return TableWaits(table, reason)

    def _obstacle(self, schema: TableSchema, scope: int) -> WaitReason | None:
        """Why a captured table cannot be followed with this schema."""
        if self._captured is None:
            return None
        if (lost := self._captured.unidentified(schema)) is not None:
            return lost
        earlier = (layout.schema for _, layout in reversed(self._pending.get(scope, [])))
        refused = refusal(self._schemas, schema, next((had for had in earlier if had.table == schema.table), None))
        if refused is None or stops(self._schemas):  # recording it raises, a streamed one at its commit
            return None
        return WaitReason(refused.message, refused.remedy)

    def _recorded(self, layout: RowLayout, scope: int, body: bytes) -> RowLayout:
        """Recorded at once, but for a streamed transaction's: that may yet be rolled back with all its DDL."""
        if self._captured is not None:
            self._captured.know(layout.schema)
        found = standing(self._schemas, layout.schema) if scope else self._schemas.record(layout.schema)
        if found is not None:
            layout = recorded_as(layout, found)
            self._messages[layout.schema.oid] = (body, layout)
            return layout
        self._provisional -= 1
        layout = recorded_as(layout, replace(layout.schema, id=self._provisional))
        self._pending.setdefault(scope, []).append((body, layout))
        return layout

    def at(self, scope: int, oid: int, place: int) -> RowLayout | None:
        """The layout that a row at this place of the feed was written with; None: its table is not captured.

        Raises DecodeError where the stream has not described the relation.
        """
        history = self._history.get((scope, oid), [])
        index = bisect_left(history, place, key=lambda entry: entry[0])
        if index:
            return history[index - 1][1]
        if not scope:
            raise DecodeError(f"Message {place} of the feed is of relation {oid}, which was never described", 0)
        return self.at(0, oid, place)

    def changes(self, scope: int, oid: int) -> list[int]:
        """Where in this feed the layout of this relation changes."""
        return [place for place, _ in self._history.get((scope, oid), []) if place >= 0]

    def publish(self, scope: int, place: int) -> dict[int, int]:
        """The streamed transaction is committed at this place: what it said of relations is recorded and holds for all.

        Returns the ids of its schemas by the provisional ones (negative) that its rows carry.
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
                self._history.setdefault((0, oid), []).append((place, kept_last))
        self.forget(scope)
        return {provisional: layout.schema.id for provisional, layout in recorded.items()}

    def forget(self, scope: int) -> None:
        """The streamed transaction is over; its rows in this feed may still ask."""
        self._pending.pop(scope, None)
        self._over.add(scope)

    def settle(self) -> None:
        """The feed is over: only the last layouts count from here on."""
        for key, history in list(self._history.items()):
            if key[0] in self._over:
                del self._history[key]
            else:
                history[:] = [(-1, history[-1][1])]
        self._over.clear()

    def _laid_out(self, schema: TableSchema) -> RowLayout:
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


def _parsed(reading: MessageCursor, oid: int, table: TableId, find: Catalog) -> TableSchema:
    """The rest of a relation message, behind its name."""
    identity = chr(reading.octet())
    if identity not in "dfin":
        raise DecodeError(f"Relation {table} has an unknown replica identity", 0)
    raw = [(reading.octet(), reading.text(), reading.u32(), reading.i32()) for _ in range(reading.u16())]
    reading.end()
    columns = tuple(
        Column(name, find(type_oid), modifier, bool(flags & _KEY_FLAG)) for flags, name, type_oid, modifier in raw
    )
    return TableSchema(table, columns, 0, oid, identity)
