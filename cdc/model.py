"""The data types of a change, which all other modules import.

Nothing here opens a socket, reads a clock or uses Spark. See docs/architecture.md for the order that `version` and
`(commit_lsn, ordinal)` promise.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType, Self

import pyarrow as pa

Lsn = NewType("Lsn", int)
"""A position in the source's WAL as a 64-bit number: comparable, and stored as `bigint` everywhere."""

ZERO_LSN = Lsn(0)


def parse_lsn(text: str) -> Lsn:
    """Read Postgres's `16/B374D848`; raises ValueError on anything else."""
    high, slash, low = text.partition("/")
    if not slash or not 1 <= len(high) <= 8 or not 1 <= len(low) <= 8:
        raise ValueError(f"{text!r} is not an LSN; an LSN looks like 16/B374D848")
    return Lsn((int(high, 16) << 32) | int(low, 16))


def format_lsn(lsn: Lsn) -> str:
    """Write an LSN as Postgres does."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


class Op(StrEnum):
    """What happened to the row: Debezium's codes, and `p`."""

    INSERT = "c"
    UPDATE = "u"
    DELETE = "d"
    READ = "r"
    TRUNCATE = "t"
    MESSAGE = "m"
    REMOVE = "p"
    """A partition was removed: every row of a key range with a smaller version is gone (`cdc.key_range`)."""


@dataclass(frozen=True, slots=True, order=True)
class TableId:
    """A table's schema and name. Its text quotes a part only if that contains a dot or a quote."""

    schema: str
    name: str

    def __str__(self) -> str:
        return f"{_quoted(self.schema)}.{_quoted(self.name)}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `schema.name`; a part that contains a dot or a quote is quoted as in SQL."""
        parts = list(_parts(text))
        if len(parts) != 2 or not all(parts):
            raise ValueError(f"{text!r} is not a table; write schema.name, for instance public.orders")
        return cls(parts[0], parts[1])


def _quoted(part: str) -> str:
    return '"' + part.replace('"', '""') + '"' if "." in part or '"' in part else part


def _parts(text: str) -> Iterator[str]:
    rest = text
    while True:
        if rest.startswith('"'):
            end = _closing_quote(rest)
            yield rest[1:end].replace('""', '"')
            rest = rest[end + 1 :]
        else:
            end = rest.find(".") if "." in rest else len(rest)
            yield rest[:end]
            rest = rest[end:]
        if not rest.startswith("."):
            if rest:
                yield ""  # trailing characters: the caller refuses an empty part
            return
        rest = rest[1:]


def _closing_quote(text: str) -> int:
    at = 1
    while (at := text.find('"', at)) != -1:
        if text[at + 1 : at + 2] != '"':
            return at
        at += 2
    raise ValueError(f"{text!r} has an opening quote without a closing one")


class TypeKind(StrEnum):
    """The category of a Postgres type: `pg_type.typtype`, with arrays separate from base types."""

    BASE = "base"
    ARRAY = "array"
    ENUM = "enum"
    DOMAIN = "domain"
    COMPOSITE = "composite"
    RANGE = "range"
    MULTIRANGE = "multirange"


@dataclass(frozen=True, slots=True)
class PgType:
    """A Postgres type. `element` is an array's element or a domain's base, else None."""

    oid: int
    name: str
    kind: TypeKind = TypeKind.BASE
    element: "PgType | None" = None
    delimiter: str = field(default=",", compare=False)
    """The separator of values of this type in an array's text. Only decoding needs it: it is not stored."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column as the source sends it; `modifier` is Postgres's typmod (-1: none)."""

    name: str
    type: PgType
    modifier: int = -1
    key: bool = False


@dataclass(frozen=True, slots=True)
class TableSchema:
    """A table's columns at one time; `id` counts the schemas of this table in the registry, from 1."""

    table: TableId
    columns: tuple[Column, ...]
    id: int = 0
    oid: int = 0
    identity: str = "d"
    """Replica identity: d default, f full, i index, n nothing."""

    @property
    def key(self) -> tuple[Column, ...]:
        """The columns that identify a row, in table order."""
        return tuple(column for column in self.columns if column.key)

    @property
    def keyed_by_row(self) -> bool:
        """Whether the whole row is the key, nulls included: replica identity FULL without a primary key, or none."""
        return not self.key or (self.identity == "f" and len(self.key) == len(self.columns))


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """Columns of a table that name a row of another table, its parent."""

    table: TableId
    columns: tuple[str, ...]
    parent: TableId
    parent_columns: tuple[str, ...]


LOG_SCHEMA = pa.schema(
    [
        pa.field("table", pa.string(), nullable=False),
        pa.field("op", pa.string(), nullable=False),
        pa.field("key", pa.string()),
        pa.field("after", pa.string()),
        pa.field("before", pa.string()),
        pa.field("unchanged", pa.list_(pa.string())),
        pa.field("version", pa.int64(), nullable=False),
        pa.field("commit_lsn", pa.int64(), nullable=False),
        pa.field("ordinal", pa.int64(), nullable=False),
        pa.field("xid", pa.int64(), nullable=False),
        pa.field("commit_ts", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("schema_id", pa.int32(), nullable=False),
    ]
)
"""A change as an Arrow row. `key`, `after` and `before` are JSON objects as text.

`unchanged` names the columns that the server did not send (unchanged TOAST): they are absent from `after`,
and absent is never NULL. `key` is null only for truncates and messages; for `Op.REMOVE` it is the text of the key
range, a JSON array.
"""

PROGRESS_TABLE = "millrace.progress"
"""Table name of the progress rows (op `m`) that end each micro-batch of a log's frame: `version` is the LSN up to which
the batch is complete. They pass every filter, so a reader always knows how far it has read."""

TICKS_TABLE = "millrace.ticks"
"""Table name of ticks (op `m`): the time by capture's clock, as rows of the log, so that a replay sees the same times.
`after` is {"id":1,"at":"<ISO-8601, UTC>"}, `version` the end of the log. Appended while a view asks for them; sinks
ignore them, as they ignore every row with op `m`."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Whole transactions to append to the log.

    `rows` has LOG_SCHEMA and is in log order; `end` is the LSN that may be confirmed to the source once the entry is
    durable; `marks` are keys and values that must become durable together with it (a finished snapshot chunk).
    """

    rows: pa.Table
    end: Lsn
    marks: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """The durable end and marks of a log, always read from the log itself, never from a second file."""

    end: Lsn = ZERO_LSN
    marks: Mapping[str, str] = field(default_factory=dict)
