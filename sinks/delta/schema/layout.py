"""The columns of a Delta table for a source table, and how a new schema changes an existing table. Pure.

Key columns come first (so that their file statistics exist, whatever the table's width), then the others in source
order, then Millrace's own. Readers filter on `NOT _millrace_deleted`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa
from deltalake import ColumnProperties, WriterProperties

from cdc.errors import SinkError
from cdc.model import Column, TableId, TableSchema
from sinks.delta.rows.images import type_name
from sinks.delta.schema.soft_deletes import DeleteCondition
from sinks.delta.schema.types import INSTANT, arrow_type, can_store, widens
from sinks.delta.settings import Dropped, SequenceBy, TypeChange
from sinks.delta.write.region import bounded

VERSION = "_millrace_version"
DELETED = "_millrace_deleted"
COMMITTED = "_millrace_commit_ts"
KEY_TEXT = "_millrace_key"
PREFIX = "_millrace_"
START_AT, END_AT = "__START_AT", "__END_AT"
UNCHANGED = "_millrace_unchanged"

OURS = (
    pa.field(VERSION, pa.int64()),
    pa.field(DELETED, pa.bool_()),
    pa.field(COMMITTED, INSTANT),
)
"""Millrace's own columns. A deleted row stays as a tombstone with its key and version: a replayed older change must not
bring it back.

None is NOT NULL: in a table with a timestamp_ntz column, deltalake then writes a protocol that Spark refuses
(`invariants` enabled in metadata but not listed)."""

if TYPE_CHECKING:
    AnyField: TypeAlias = "pa.Field[Any]"


_PACKED = ColumnProperties(dictionary_enabled=False, encoding="DELTA_BINARY_PACKED")
_NO_DICTIONARY = ColumnProperties(dictionary_enabled=False)
"""Every batch reads the keys of the files that it may touch. They are nearly distinct and sorted: a dictionary is
larger than the keys and three times as slow to read; packed differences take almost no space."""


@dataclass(frozen=True, slots=True)
class PlacedColumn:
    """A source column and its Delta column."""

    column: Column
    name: str
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class TableLayout:
    """The Delta column of each source column, and the columns that identify a row."""

    table: TableId
    placed: tuple[PlacedColumn, ...]
    key: tuple[str, ...]
    history: tuple["AnyField", ...] = ()
    """Type 2: when each version of a row starts and ends. Changelog: the columns that a change did not include."""
    leftover: tuple["AnyField", ...] = ()
    """Columns of the Delta table that the source no longer has: null in every row written from now on."""
    deletes: DeleteCondition | None = None
    """Rows that meet it count as deleted."""

    @property
    def arrow(self) -> pa.Schema:
        """The whole Delta table, in order."""
        keyed = [pa.field(KEY_TEXT, pa.string())] if self.by_text else []
        own = [pa.field(one.name, one.type) for one in self.placed]
        return pa.schema([*keyed, *own, *self.leftover, *self.history, *OURS])

    @property
    def by_text(self) -> bool:
        """Whether the key's JSON text identifies a row: tables whose whole row is the key, nulls included."""
        return KEY_TEXT in self.key

    @property
    def compared(self) -> list[str]:
        """The key columns with file statistics that can be compared."""
        return [name for name in self.key if bounded(self.arrow.field(name).type)]

    @property
    def encodings(self) -> WriterProperties:
        """Encodings of new files: integer keys and versions as packed differences; a key of one text column without a
        dictionary."""
        columns = self.arrow
        numbers = [name for name in (*self.key, VERSION) if pa.types.is_integer(columns.field(name).type)]
        texts = [name for name in self.key if len(self.key) == 1 and columns.field(name).type == pa.string()]
        own = {**dict.fromkeys(texts, _NO_DICTIONARY), **dict.fromkeys(numbers, _PACKED)}
        return WriterProperties(compression="SNAPPY", column_properties=own)

    @property
    def changelog(self) -> bool:
        """Whether every change is a row of its own."""
        return VERSION in self.key


@dataclass(frozen=True, slots=True)
class Evolution:
    """What an existing table needs before it can store rows of a layout: new columns, and columns to rewrite."""

    layout: TableLayout
    added: tuple["AnyField", ...] = ()
    rewritten: Mapping[str, "AnyField | None"] = field(default_factory=dict)
    """By stored name: the new column (wider, renamed), or None if it is removed."""


def folder(table: TableId) -> str:
    """The table's folder: `schema.name`, with every character beyond letters, digits, _ and - as ~hex."""
    return f"{_safe(table.schema)}.{_safe(table.name)}"


def _safe(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", lambda match: "".join(f"~{byte:02x}" for byte in match[0].encode()), part)


@dataclass(frozen=True, slots=True)
class LayoutOptions:
    """What the settings ask of a table's layout."""

    as_text: AbstractSet[str] = frozenset()
    type_change: TypeChange = "stop"
    scd_type: Literal[1, 2] = 1
    sequence_by: SequenceBy = "version"
    append_only: bool = False
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Old names of columns to new ones."""
    dropped: Dropped = "keep"
    deletes: DeleteCondition | None = None

    @property
    def history(self) -> tuple["AnyField", ...]:
        """The columns that type 2 or a changelog adds."""
        if self.append_only:
            return (pa.field(UNCHANGED, pa.string()),)
        if self.scd_type == 1:
            return ()
        type_ = pa.int64() if self.sequence_by == "version" else INSTANT
        return pa.field(START_AT, type_), pa.field(END_AT, type_)


def new_layout(schema: TableSchema, options: LayoutOptions = LayoutOptions()) -> TableLayout:  # noqa: B008 - frozen
    """The layout of a table that does not exist yet."""
    _check(schema)
    placed = tuple(PlacedColumn(column, column.name, _wanted(column, options)) for column in _keys_first(schema))
    key = _key(schema, schema.keyed_by_row, options)
    return TableLayout(schema.table, placed, key, options.history, deletes=_deletes(schema, options))


def evolve(schema: TableSchema, stored: pa.Schema, options: LayoutOptions = LayoutOptions()) -> Evolution:  # noqa: B008 - frozen
    """How rows of this schema fit into an existing table. Raises SinkError if the options forbid it."""
    _check(schema)
    if {one.name: one.type for one in options.history} != _history(stored):
        raise SinkError(
            f"table {schema.table}: its Delta table was created with another `stored_as_scd_type`, `sequence_by` or "
            "`append_only`.",
            "Set it back, or add a sink with another name and path.",
        )
    rewritten: dict[str, AnyField | None] = dict(_renamed(schema, stored, options.renamed))
    stored = pa.schema([rewritten.get(one.name) or one for one in stored])
    placed, added = [], []
    for column in _with_stored_names(schema, stored, options.renamed):
        one, is_new, is_wider = _placed(schema.table, column, _wanted(column[0], options), stored, options.type_change)
        placed.append(one)
        added += [pa.field(one.name, one.type)] if is_new else []
        if is_wider:
            rewritten[_old_name(one.name, rewritten)] = pa.field(one.name, one.type)
    taken = {*(one.name for one in placed), *(one.name for one in OURS), KEY_TEXT, *_HISTORY}
    leftover = tuple(one.with_nullable(True) for one in stored if one.name not in taken)
    if options.dropped == "remove":
        rewritten |= {one.name: None for one in leftover}
        leftover = ()
    key = _key(schema, KEY_TEXT in stored.names, options)
    layout = TableLayout(schema.table, tuple(placed), key, options.history, leftover, _deletes(schema, options))
    return Evolution(layout, tuple(added), rewritten)


def known_columns(schema: TableSchema, stored: pa.Schema, options: LayoutOptions) -> TableSchema:
    """An older schema without the columns that were removed from the table since."""
    names = {*stored.names, *(old for old, new in options.renamed.items() if new in stored.names)}
    return replace(schema, columns=tuple(column for column in schema.columns if column.key or column.name in names))


def _renamed(schema: TableSchema, stored: pa.Schema, renamed: Mapping[str, str]) -> Iterator[tuple[str, "AnyField"]]:
    """Stored columns that still have their old name, while the source has the new one."""
    names = {column.name for column in schema.columns}
    for old, new in renamed.items():
        if old in stored.names and old not in names and new in names and new not in stored.names:
            yield old, stored.field(old).with_name(new)


def _with_stored_names(
    schema: TableSchema, stored: pa.Schema, renamed: Mapping[str, str]
) -> Iterator[tuple[Column, str]]:
    """Each column with its name in the table: an older schema still has the old name."""
    for column in _keys_first(schema):
        new = renamed.get(column.name, "")
        yield column, new if new in stored.names and column.name not in stored.names else column.name


def _old_name(name: str, rewritten: Mapping[str, "AnyField | None"]) -> str:
    return next((old for old, new in rewritten.items() if new is not None and new.name == name), name)


def _deletes(schema: TableSchema, options: LayoutOptions) -> DeleteCondition | None:
    condition = options.deletes
    if condition is not None and condition.column not in {column.name for column in schema.columns}:
        raise SinkError(
            f"table {schema.table}: `apply_as_deletes` names column {condition.column}, which it does not have.",
            "Correct the name, or remove the setting.",
        )
    return condition


def _wanted(column: Column, options: LayoutOptions) -> pa.DataType:
    return pa.string() if column.name in options.as_text else arrow_type(column)


def _placed(
    table: TableId, named: tuple[Column, str], wanted: pa.DataType, stored: pa.Schema, policy: TypeChange
) -> tuple[PlacedColumn, bool, bool]:
    column, name = named
    if name not in stored.names:
        return PlacedColumn(column, name, wanted), True, False
    have = stored.field(name).type
    if can_store(have, wanted):
        return PlacedColumn(column, name, have), False, False
    if widens(have, wanted):
        return PlacedColumn(column, name, wanted), False, True
    if policy == "stop" or column.key:
        raise _type_changed(table, column, have, wanted)
    beside = f"{name}__{re.sub('[^a-z0-9]+', '_', type_name(wanted)).strip('_')}"
    if beside not in stored.names:
        return PlacedColumn(column, beside, wanted), True, False
    return PlacedColumn(column, beside, stored.field(beside).type), False, False


def _type_changed(table: TableId, column: Column, have: pa.DataType, wanted: pa.DataType) -> SinkError:
    return SinkError(
        f"table {table}: column {column.name} is {type_name(have)} in Delta and now {type_name(wanted)} in the source.",
        "Nothing was written. Set `type_change: new_column` to keep both, or start the table over: remove its folder "
        f"and its note below delta/ in the state folder, then: millrace backfill {table}",
    )


def _keys_first(schema: TableSchema) -> Sequence[Column]:
    return [*schema.key, *(column for column in schema.columns if not column.key)]


def _key(schema: TableSchema, by_text: bool, options: LayoutOptions) -> tuple[str, ...]:
    key = (KEY_TEXT,) if by_text else tuple(column.name for column in schema.key)
    return (*key, VERSION) if options.append_only else key


_HISTORY = (START_AT, END_AT, UNCHANGED)


def _history(stored: pa.Schema) -> dict[str, pa.DataType]:
    return {name: stored.field(name).type for name in _HISTORY if name in stored.names}


def _check(schema: TableSchema) -> None:
    if not schema.key:
        raise SinkError(
            f"table {schema.table} has no key, so nothing identifies its rows.",
            f"Give it a primary key, or run: ALTER TABLE {schema.table} REPLICA IDENTITY FULL.",
        )
    folded = [column.name.lower() for column in schema.columns]
    for column in schema.columns:
        if column.name.startswith(PREFIX) or column.name in (START_AT, END_AT):
            raise SinkError(
                f"table {schema.table}: the name of column {column.name} is reserved by Millrace.",
                "Rename the column, or leave it out with `columns`.",
            )
        if folded.count(column.name.lower()) > 1:
            raise SinkError(
                f"table {schema.table}: the name of column {column.name} differs from another only by case.",
                "Rename the column, or leave one out with `columns`: Delta ignores case.",
            )
