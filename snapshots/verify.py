"""The proof that a store equals the source: row by row, on demand, also while everybody writes.

A row that differs may only be on its way. So the store is first waited for, up to the LSN that the source was read at;
and a difference is proved only if, several times running, the source had the row before and after as it was. Once is
not enough: a row can go and come back between two looks. Rows that change all the time stay undecided.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.capture.connect import connect, explained
from cdc.config import SourceSettings, TableSettings
from cdc.model import Lsn, TableId, TableSchema, format_lsn
from cdc.ports import Sink
from snapshots.compare import Comparison, compare, key_columns, key_texts
from snapshots.messages import say
from snapshots.rows import Readable, describe, masking_of, read_images
from snapshots.tables import identifier, touch

Connection = psycopg.Connection[tuple[Any, ...]]
WaitFor = Callable[[Lsn], None]
"""Returns when the store has applied everything up to an LSN; raises if it does not get there."""

_EXAMPLES = 5
_PROOFS = 3
_EMPTY = pa.table({"key": pa.array([], pa.string()), "after": pa.array([], pa.string())})


@dataclass(frozen=True, slots=True)
class Differences:
    """What was found in one table of one store. Counts, and a few keys; never a value.

    `undecided` rows changed during every look: nothing speaks against them, but nothing was proved.
    """

    sink: str
    table: TableId
    rows: int
    at: Lsn
    missing: int = 0
    extra: int = 0
    different: int = 0
    undecided: int = 0
    examples: Mapping[str, tuple[str, ...]] | None = None

    @property
    def equal(self) -> bool:
        """Whether the store holds what the source does."""
        return not (self.missing or self.extra or self.different)

    def facts(self) -> dict[str, object]:
        """For JSON."""
        counts = {name: getattr(self, name) for name in ("missing", "extra", "different", "undecided")}
        return {
            "sink": self.sink,
            "table": str(self.table),
            "equal": self.equal,
            "rows": self.rows,
            "lsn": format_lsn(self.at),
            **counts,
            "examples": {name: list(keys) for name, keys in (self.examples or {}).items()},
        }


@dataclass(frozen=True, slots=True)
class _Picture:
    """The source at one moment: its rows, and an LSN that is not before any of them."""

    schema: TableSchema
    images: pa.Table
    at: Lsn


def verify_table(
    source: SourceSettings, table: TableSettings, sink: Sink, wait: WaitFor = lambda lsn: None, looks: int = 8
) -> Differences:
    """Compare one table of a store with the source, in at most so many looks.

    The trap: without `wait` the comparison is only fair at a quiet point.
    """
    with connect(source, "millrace verify") as connection:
        picture = _look(connection, source, table)
        suspects: Counter[str] | None = None
        for _ in range(looks):
            wait(picture.at)
            found = _compared(sink, picture, suspects)
            if not found.keys:
                break
            again = _look(connection, source, table)
            moved = _moved(sink, picture, again, found.keys)
            seen = suspects or Counter()
            suspects = Counter({key: 0 if key in moved else seen[key] + 1 for key in found.keys})
            picture = again
            if min(suspects.values()) >= _PROOFS:
                break
        return _result(sink, table, picture, found, suspects or Counter())


def _look(connection: Connection, source: SourceSettings, table: TableSettings) -> _Picture:
    with explained(f"Reading table {table.name}"):
        connection.execute("begin isolation level repeatable read read only")
    readable = describe(connection, table, masking_of(source))
    touch(connection, table.name, readable.columns)
    images = pa.concat_tables([_EMPTY, *read_images(connection, readable, whole_table(readable))])
    with explained(f"Reading table {table.name}"):
        connection.execute("commit")
    # The current insert position would not do: it may be unflushed, or lie behind a page header that nobody sends.
    return _Picture(readable.layout.schema, images, say(connection, "", prefix="millrace-verify"))


def whole_table(readable: Readable) -> sql.Composed:
    """COPY of every row, through the root of a partitioned table."""
    form = sql.SQL("{}" if readable.partitioned else "only {}")
    return readable.copy_query(form.format(identifier(readable.table)))


def _compared(sink: Sink, picture: _Picture, only: Collection[str] | None) -> Comparison:
    found = compare(picture.schema, sink.expected(picture.schema, picture.images), sink.stored(picture.schema))
    return found if only is None else found.only(frozenset(only))


def _moved(sink: Sink, before: _Picture, after: _Picture, keys: frozenset[str]) -> frozenset[str]:
    """Those of the keys whose row the source itself has changed between two looks."""
    if before.schema != after.schema:
        return keys
    rows = [_picked(sink.expected(picture.schema, picture.images), before.schema, keys) for picture in (before, after)]
    return compare(before.schema, *rows).keys


def _picked(rows: pa.Table, schema: TableSchema, keys: frozenset[str]) -> pa.Table:
    texts = key_texts(rows, key_columns(schema, rows))
    return rows.filter(pc.is_in(texts, pa.array(sorted(keys), pa.string())))


def _result(
    sink: Sink, table: TableSettings, picture: _Picture, found: Comparison, suspects: Counter[str]
) -> Differences:
    wrong = found.only(frozenset(key for key, proofs in suspects.items() if proofs >= _PROOFS))
    kinds = {"missing": wrong.missing, "extra": wrong.extra, "different": wrong.different}
    return Differences(
        sink.name,
        table.name,
        picture.images.num_rows,
        picture.at,
        len(wrong.missing),
        len(wrong.extra),
        len(wrong.different),
        len(found.keys) - len(wrong.keys),
        {name: tuple(islice(_shown(keys), _EXAMPLES)) for name, keys in kinds.items() if keys},
    )


def _shown(keys: frozenset[str]) -> Iterator[str]:
    return (key.replace("\x1f", ", ") for key in sorted(keys))
