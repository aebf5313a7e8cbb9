"""The schema registry in a compacted topic: the key is `<table>#<id>`, the value the schema as JSON."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from cdc.errors import LogCorrupt, LogError
from cdc.log.kafka.topic_tail import TopicTail
from cdc.model import Column, PgType, TableId, TableSchema, TypeKind

Publish = Callable[[bytes, bytes], None]
"""Stores a key and its value durably in the registry's topic."""


class KafkaSchemas:
    """Reads the topic as it grows. Can write only if it has `publish`."""

    def __init__(self, tail: TopicTail, publish: Publish | None = None) -> None:
        self._tail = tail
        self._publish = publish
        self._versions: dict[TableId, dict[int, TableSchema]] = {}
        self._lock = threading.RLock()

    def record(self, schema: TableSchema) -> TableSchema:
        """Store a schema if it differs from the newest one of its table."""
        with self._lock:
            self._catch_up()
            known = self._versions.get(schema.table, {})
            newest = known[max(known)] if known else None
            if newest is not None and replace(schema, id=newest.id) == newest:
                return newest
            if self._publish is None:
                raise LogError(f"A reader cannot store the schema of {schema.table}.", "Use the log's writer.")
            stored = replace(schema, id=(newest.id if newest else 0) + 1)
            self._publish(f"{schema.table}#{stored.id}".encode(), encode(stored))
            self._learn(stored)
            return stored

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        """The schema that a change was written with."""
        with self._lock:
            if schema_id not in self._versions.get(table, {}):
                self._catch_up()
            try:
                return self._versions[table][schema_id]
            except KeyError:
                raise LogCorrupt(
                    f"Schema {schema_id} of {table} is not in the registry.",
                    "Keep the topic <prefix>.millrace.schemas as long as the rows.",
                ) from None

    def newest(self) -> Sequence[TableSchema]:
        """The newest schema of every table, ordered by name."""
        with self._lock:
            self._catch_up()
            return [self._versions[table][max(self._versions[table])] for table in sorted(self._versions)]

    def tables(self) -> Sequence[TableId]:
        """Every table that has a schema in the registry."""
        return [schema.table for schema in self.newest()]

    def _catch_up(self) -> None:
        for message in self._tail.drain():
            if message.value is not None:
                self._learn(decode(message.value, message.offset))

    def _learn(self, schema: TableSchema) -> None:
        self._versions.setdefault(schema.table, {})[schema.id] = schema


def encode(schema: TableSchema) -> bytes:
    """A schema as JSON."""
    data = {
        "format": 1,
        "schema": schema.table.schema,
        "name": schema.table.name,
        "id": schema.id,
        "oid": schema.oid,
        "identity": schema.identity,
        "columns": [[column.name, _type_data(column.type), column.modifier, column.key] for column in schema.columns],
    }
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


def decode(value: bytes, offset: int) -> TableSchema:
    """The schema that `encode` wrote. Raises LogCorrupt naming the offset."""
    try:
        data = json.loads(value)
        columns = tuple(Column(name, _type(kind), modifier, key) for name, kind, modifier, key in data["columns"])
        table = TableId(data["schema"], data["name"])
        return TableSchema(table, columns, data["id"], data["oid"], data["identity"])
    except (ValueError, KeyError, TypeError):
        raise LogCorrupt(
            f"The record at offset {offset} of the schema registry is not a schema.",
            "Only the log's writer may write to <prefix>.millrace.schemas.",
        ) from None


def _type_data(kind: PgType) -> list[object]:
    return [kind.oid, kind.name, kind.kind.value, None if kind.element is None else _type_data(kind.element)]


def _type(data: list[object]) -> PgType:
    oid, name, kind, element = data
    if not isinstance(oid, int) or not isinstance(name, str) or not isinstance(kind, str):
        raise ValueError("type")
    return PgType(oid, name, TypeKind(kind), _type(element) if isinstance(element, list) else None)
