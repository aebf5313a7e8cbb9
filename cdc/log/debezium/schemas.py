"""Schemas of tables that a Debezium connector captures: as the messages declare them, else guessed; then stored.

A message without schema has only column names and JSON types. The result is stored in the registry's topic, so that
every process and every restart uses the same schema. A schema stored there beforehand takes precedence.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

from cdc.errors import LogCorrupt
from cdc.log.debezium.decode import schema_id_of
from cdc.log.kafka.schemas import KafkaSchemas, encode
from cdc.model import Column, PgType, TableId, TableSchema

Sample = Callable[[TableId], Iterable[Mapping[str, object]]]
"""Rows of the log to guess a table's schema from, the most likely ones first."""

Declared = Mapping[int, Mapping[str, PgType]]
"""The column types that messages declare, by schema id."""

_NOTHING: Mapping[str, PgType] = {}
_TEXT = PgType(25, "text")


class _Whole(str):
    """The text of a number without a fraction: Python refuses to parse one of more than 4300 digits."""

    __slots__ = ()


class _Fraction(str):
    """The text of a number with a fraction or an exponent."""

    __slots__ = ()


_TEXTS = json.JSONDecoder(parse_int=_Whole, parse_float=_Fraction)
_KINDS: Mapping[type, PgType] = {
    bool: PgType(16, "bool"),
    _Whole: PgType(20, "int8"),
    _Fraction: PgType(701, "float8"),
    list: PgType(3802, "jsonb"),
    dict: PgType(3802, "jsonb"),
}


class DebeziumSchemas:
    """The registry's topic, and a guess for schemas that are not in it."""

    def __init__(
        self, kept: KafkaSchemas, publish: Callable[[bytes, bytes], None], sample: Sample, declared: Declared
    ) -> None:
        self._kept = kept
        self._declared = declared
        self._publish = publish
        self._sample = sample

    def record(self, schema: TableSchema) -> TableSchema:
        """Store a known schema. It applies to row images with exactly its columns."""
        names = json.dumps({column.name: None for column in schema.columns})
        stored = TableSchema(schema.table, schema.columns, schema_id_of(names), schema.oid, schema.identity)
        self._publish(f"{stored.table}#{stored.id}".encode(), encode(stored))
        return stored

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        """The stored schema, or a guess, which is then stored."""
        try:
            return self._kept.get(table, schema_id)
        except LogCorrupt:
            rows = [row for row in self._sample(table) if row["schema_id"] == schema_id]
            if not rows:
                raise
        guess = guessed(table, schema_id, rows, self._declared.get(schema_id, {}))
        self._publish(f"{table}#{schema_id}".encode(), encode(guess))
        return guess

    def newest(self) -> Sequence[TableSchema]:
        """The newest stored schema of every table."""
        return self._kept.newest()


def guessed(
    table: TableId, schema_id: int, rows: Iterable[Mapping[str, object]], declared: Mapping[str, PgType] = _NOTHING
) -> TableSchema:
    """A schema that fits these row images: declared types, else Postgres types for JSON types, else text."""
    kinds: dict[str, PgType | None] = {}
    keys: set[str] = set()
    for row in rows:
        keys |= set(_TEXTS.decode(str(row["key"] or "{}")))
        for name in row["unchanged"] or ():  # type: ignore[attr-defined]
            kinds.setdefault(name, None)
        for name, value in _TEXTS.decode(str(row["after"] or row["before"] or "{}")).items():
            kinds[name] = kinds.get(name) or (None if value is None else _KINDS.get(type(value), _TEXT))
    columns = tuple(Column(name, declared.get(name) or kind or _TEXT, key=name in keys) for name, kind in kinds.items())
    return TableSchema(table, columns, schema_id)
