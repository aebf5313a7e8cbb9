"""How a source table lies in Delta: names, types and what a new schema asks of an existing table. Pure.

Key columns come first (so that their file statistics exist, whatever the table's width), then the others in source
order, then ours. Readers filter on `NOT _millrace_deleted`.
"""

import re
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import pyarrow as pa

from cdc.errors import SinkError
from cdc.model import Column, TableId, TableSchema
from sinks.delta_images import type_name
from sinks.delta_region import bounded
from sinks.delta_types import INSTANT, arrow_type, holds, widens

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
"""A deleted row stays as a tombstone with its key and version: a replayed older change must not bring it back.

None is NOT NULL: in a table with a timestamp_ntz column, deltalake then writes a protocol that Spark refuses
(`invariants` enabled in metadata but not listed)."""

if TYPE_CHECKING:
    AnyField: TypeAlias = "pa.Field[Any]"

TypeChange = Literal["stop", "new_column"]
SequenceBy = Literal["version", "commit_ts"]


@dataclass(frozen=True, slots=True)
class Placed:
    """A source column and the Delta column that holds it."""

    column: Column
    name: str
    type: pa.DataType


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each column of a schema lies in a Delta table, and by which columns rows are told apart."""

    table: TableId
    placed: tuple[Placed, ...]
    key: tuple[str, ...]
    history: tuple["AnyField", ...] = ()
    """Type 2: where each version of a row begins and ends. Changelog: which columns a change did not bring."""
    leftover: tuple["AnyField", ...] = ()
    """Columns of the Delta table that the source no longer has: null in every row written from now on."""

    @property
    def arrow(self) -> pa.Schema:
        """The whole Delta table, in order."""
        keyed = [pa.field(KEY_TEXT, pa.string())] if self.by_text else []
        own = [pa.field(one.name, one.type) for one in self.placed]
        return pa.schema([*keyed, *own, *self.leftover, *self.history, *OURS])

    @property
    def by_text(self) -> bool:
        """Whether rows are told apart by the key's JSON text: tables whose whole row is the key, nulls included."""
        return KEY_TEXT in self.key

    @property
    def compared(self) -> list[str]:
        """The key columns by which files can be told apart."""
        return [name for name in self.key if bounded(self.arrow.field(name).type)]

    @property
    def changelog(self) -> bool:
        """Whether every change is a row of its own."""
        return VERSION in self.key


@dataclass(frozen=True, slots=True)
class Evolution:
    """What an existing table needs before rows of a layout fit: new columns, and columns to rewrite wider."""

    layout: Layout
    added: tuple["AnyField", ...] = ()
    widened: tuple["AnyField", ...] = ()


def folder(table: TableId) -> str:
    """The table's folder: `schema.name`, with every character beyond letters, digits, _ and - as ~hex."""
    return f"{_safe(table.schema)}.{_safe(table.name)}"


def _safe(part: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", lambda match: "".join(f"~{byte:02x}" for byte in match[0].encode()), part)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the settings ask of a table's layout."""

    as_text: AbstractSet[str] = frozenset()
    type_change: TypeChange = "stop"
    scd_type: Literal[1, 2] = 1
    sequence_by: SequenceBy = "version"
    append_only: bool = False

    @property
    def history(self) -> tuple["AnyField", ...]:
        """The columns that type 2 or a changelog adds."""
        if self.append_only:
            return (pa.field(UNCHANGED, pa.string()),)
        if self.scd_type == 1:
            return ()
        type_ = pa.int64() if self.sequence_by == "version" else INSTANT
        return pa.field(START_AT, type_), pa.field(END_AT, type_)


def new_layout(schema: TableSchema, wishes: Wishes = Wishes()) -> Layout:  # noqa: B008 - frozen
    """The layout of a table that does not exist yet."""
    _check(schema)
    placed = tuple(Placed(column, column.name, _wanted(column, wishes)) for column in _keys_first(schema))
    return Layout(schema.table, placed, _key(schema, _whole_row_is_key(schema), wishes), wishes.history)


def evolve(schema: TableSchema, stored: pa.Schema, wishes: Wishes = Wishes()) -> Evolution:  # noqa: B008 - frozen
    """How rows of this schema fit into a table that exists. Raises SinkError if the wishes forbid it."""
    _check(schema)
    if {field.name: field.type for field in wishes.history} != _history(stored):
        raise SinkError(
            f"table {schema.table}: `stored_as_scd_type`, `sequence_by` or `append_only` is not what its Delta table "
            "was made with.",
            "Set it back, or add a sink with another name and path.",
        )
    placed, added, widened = [], [], []
    for column in _keys_first(schema):
        one, is_new, is_wider = _place(schema.table, column, _wanted(column, wishes), stored, wishes.type_change)
        placed.append(one)
        added += [pa.field(one.name, one.type)] if is_new else []
        widened += [pa.field(one.name, one.type)] if is_wider else []
    taken = {*(one.name for one in placed), *(field.name for field in OURS), KEY_TEXT, *_HISTORY}
    leftover = tuple(field.with_nullable(True) for field in stored if field.name not in taken)
    key = _key(schema, KEY_TEXT in stored.names, wishes)
    layout = Layout(schema.table, tuple(placed), key, wishes.history, leftover)
    return Evolution(layout, tuple(added), tuple(widened))


def _wanted(column: Column, wishes: Wishes) -> pa.DataType:
    return pa.string() if column.name in wishes.as_text else arrow_type(column)


def _place(
    table: TableId, column: Column, wanted: pa.DataType, stored: pa.Schema, policy: TypeChange
) -> tuple[Placed, bool, bool]:
    if column.name not in stored.names:
        return Placed(column, column.name, wanted), True, False
    have = stored.field(column.name).type
    if holds(have, wanted):
        return Placed(column, column.name, have), False, False
    if widens(have, wanted):
        return Placed(column, column.name, wanted), False, True
    if policy == "stop" or column.key:
        raise _type_changed(table, column, have, wanted)
    name = f"{column.name}__{re.sub('[^a-z0-9]+', '_', type_name(wanted)).strip('_')}"
    if name not in stored.names:
        return Placed(column, name, wanted), True, False
    return Placed(column, name, stored.field(name).type), False, False


def _type_changed(table: TableId, column: Column, have: pa.DataType, wanted: pa.DataType) -> SinkError:
    return SinkError(
        f"table {table}: column {column.name} is {type_name(have)} in Delta and now {type_name(wanted)} in the source.",
        "Nothing was written. Set `type_change: new_column` to keep both, or begin the table anew: remove its folder "
        "and its note below delta/ in the state folder, then: millrace resync",
    )


def _keys_first(schema: TableSchema) -> Sequence[Column]:
    return [*schema.key, *(column for column in schema.columns if not column.key)]


def _key(schema: TableSchema, by_text: bool, wishes: Wishes) -> tuple[str, ...]:
    key = (KEY_TEXT,) if by_text else tuple(column.name for column in schema.key)
    return (*key, VERSION) if wishes.append_only else key


_HISTORY = (START_AT, END_AT, UNCHANGED)


def _history(stored: pa.Schema) -> dict[str, pa.DataType]:
    return {name: stored.field(name).type for name in _HISTORY if name in stored.names}


def _whole_row_is_key(schema: TableSchema) -> bool:
    """REPLICA IDENTITY FULL without a primary key: nulls among the key columns, which no equality finds."""
    return schema.identity == "f" and len(schema.key) == len(schema.columns)


def _check(schema: TableSchema) -> None:
    if not schema.key:
        raise SinkError(
            f"table {schema.table} has no key, so Delta could not tell its rows apart.",
            f"Give it a primary key, or run: ALTER TABLE {schema.table} REPLICA IDENTITY FULL.",
        )
    folded = [column.name.lower() for column in schema.columns]
    for column in schema.columns:
        if column.name.startswith(PREFIX) or column.name in (START_AT, END_AT):
            raise SinkError(
                f"table {schema.table}: the name of column {column.name} is taken by Millrace.",
                "Rename the column, or leave it out with `columns`.",
            )
        if folded.count(column.name.lower()) > 1:
            raise SinkError(
                f"table {schema.table}: Delta cannot tell column {column.name} from one of other case.",
                "Rename the column, or leave one out with `columns`.",
            )
