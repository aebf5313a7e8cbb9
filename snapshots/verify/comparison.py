"""Verifies that a store equals the source, row by row, also while the source is written to.

First both sides are read once, at the same time and in pieces, into checksums (snapshots.verify.checksums). For most
tables they are equal, and that is all. Only the rows of groups that differ are compared themselves.

A row may differ only because its change has not arrived yet. So the comparison first waits until the store has reached
an LSN not before the source's snapshot; and a difference counts only if, several times in a row, the source had the
same row before and after. Once is not enough: a row can be deleted and inserted again between two reads. Rows that
change all the time stay undecided.
"""

from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice, takewhile
from threading import Event
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import sql

from cdc.capture.source.connect import connect, explained
from cdc.config.settings import SourceSettings, TableSettings
from cdc.errors import SourceLost
from cdc.model import Lsn, TableId, TableSchema, format_lsn
from cdc.ports import ShapesTables, Sink, StoredPieces
from snapshots.tables.catalog import estimated_rows, identifier, lock_for_read
from snapshots.tables.rows import Readable, describe, masking_of, read_images
from snapshots.tables.wal_messages import write_message
from snapshots.verify.checksums import GROUPS, Checksums, key_groups
from snapshots.verify.row_comparison import Comparison, compare, key_columns, key_texts

Connection = psycopg.Connection[tuple[Any, ...]]
WaitFor = Callable[[Lsn], None]
"""Returns when the store has applied everything up to an LSN; raises if it does not reach it."""

T = TypeVar("T")

_EXAMPLES = 5
PROOFS = 5
"""With three, a row that was constantly deleted and inserted again was once reported as extra, on a busy machine."""
_ATTEMPTS = 3
_EMPTY = pa.table({"key": pa.array([], pa.string()), "after": pa.array([], pa.string())})

SUSPECT_ROWS = 1_000_000
SUSPECT_BYTES = 256 << 20
"""The most rows, and bytes per side, that are kept in memory for the comparison: a store that lost a large table is
still reported as different; only the count of missing rows is limited."""


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences of one table in one store: counts and a few keys, never other values.

    `undecided` rows changed during every read, or were too many to compare.
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
        """Whether the store has the same rows as the source."""
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
class Compared:
    """The progress of the checksums: rows read on each side, and the estimated number (0: not known)."""

    source: int
    stored: int
    estimate: int


Report = Callable[[Compared], None]
"""Called from several threads."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """One table of one store, and connections to its source: one to read, one to write marks into the WAL."""

    source: SourceSettings
    table: TableSettings
    sink: Sink
    reader: Connection
    marker: Connection

    def stored_schema(self, schema: TableSchema) -> TableSchema:
        """The columns of the rows that the sink gives for a schema of the source."""
        return self.sink.stored_schema(schema) if isinstance(self.sink, ShapesTables) else schema


@dataclass(frozen=True, slots=True)
class _Overview:
    """The result of the checksums: which groups differ, and how many of their rows are left out."""

    schema: TableSchema
    at: Lsn
    rows: int
    suspected: npt.NDArray[np.bool_]
    left_out: int


@dataclass(frozen=True, slots=True)
class _SourceRows:
    """The source's rows of the groups that differ, as the store should have them; `at` is an LSN not before any of
    them."""

    schema: TableSchema
    stored: TableSchema
    """The columns of `rows`."""
    rows: pa.Table
    at: Lsn


class _SchemaChanged(Exception):
    """The table's columns changed between two reads."""


def verify_table(
    source: SourceSettings,
    table: TableSettings,
    sink: Sink,
    wait: WaitFor = lambda lsn: None,
    looks: int = 12,
    *,
    report: Report = lambda compared: None,
) -> Differences:
    """Compare one table of a store with the source; rows that seem to differ are read at most `looks` times.

    The trap: without `wait` the result is right only while nothing is written.
    """
    with connect(source, "millrace verify") as reader, connect(source, "millrace verify") as marker:
        scope = _Scope(source, table, sink, reader, marker)
        for _ in range(_ATTEMPTS):
            try:
                return _verified(scope, wait, looks, report)
            except _SchemaChanged:
                continue
    raise SourceLost(f"Table {table.name} changed its columns while it was compared.", "Compare it again.")


def _verified(scope: _Scope, wait: WaitFor, looks: int, report: Report) -> Differences:
    overview = _overview(scope, wait, report)
    equal = Differences(scope.sink.name, scope.table.name, overview.rows, overview.at, undecided=overview.left_out)
    if not overview.suspected.any():
        return equal
    rows = _read_suspected(scope, overview)
    suspects: Counter[str] | None = None
    for _ in range(looks):
        wait(rows.at)
        found = _compared(scope.sink, rows, overview, suspects)
        if not found.keys:
            break
        again = _read_suspected(scope, overview)
        changed = _changed(rows, again, found.keys)
        proofs = suspects or Counter()
        suspects = Counter({key: 0 if key in changed else proofs[key] + 1 for key in found.keys})
        rows = again
        if min(suspects.values()) >= PROOFS:
            break
    return proven(replace(equal, at=rows.at), found, suspects or Counter())


def _overview(scope: _Scope, wait: WaitFor, report: Report) -> _Overview:
    """Read both sides at the same time. The source's snapshot is older than the LSN that the store must reach first."""
    with _snapshot(scope) as readable:
        # Not the current insert position: it may be unflushed, or after a page header, which no change ever reaches.
        at = write_message(scope.marker, "", prefix="millrace-verify")
        estimate = estimated_rows(scope.reader, scope.table.name)
        wait(at)
        schema = readable.layout.schema
        scope.sink.expected(schema, _EMPTY)  # the sink caches what it reads from the store, before two threads use it
        expected, stored = Checksums(), Checksums()
        read = Counter[str]()

        def add(side: str, checksums: Checksums, rows: pa.Table, count: int) -> None:
            checksums.add(rows, key_columns(scope.stored_schema(schema), rows))
            read[side] += count
            report(Compared(read["source"], read["stored"], estimate))

        def add_source(stop: Event) -> None:
            with closing(_expected(scope, readable)) as blocks:
                for rows, count in _until(stop, blocks):
                    add("source", expected, rows, count)

        def add_stored(stop: Event) -> None:
            with closing(_stored(scope.sink, schema)) as pieces:
                for rows in _until(stop, pieces):
                    add("stored", stored, rows, rows.num_rows)

        _run_in_threads(add_source, add_stored)
    suspected, left_out = _suspected(expected, stored)
    return _Overview(schema, at, read["source"], suspected, left_out)


@contextmanager
def _snapshot(scope: _Scope) -> Iterator[Readable]:
    """The table in one snapshot. After an error in the block the connection must be closed."""
    name = scope.table.name
    with explained(f"Reading table {name}"):
        scope.reader.execute("begin isolation level repeatable read read only")
    readable = describe(scope.reader, scope.table, masking_of(scope.source))
    lock_for_read(scope.reader, name, readable.columns)
    yield readable
    with explained(f"Reading table {name}"):
        scope.reader.execute("commit")


def _run_in_threads(*jobs: Callable[[Event], None]) -> None:
    """Run each job in a thread: their work is in C. When one fails, the others stop at their next piece."""
    stop = Event()
    with ThreadPoolExecutor(len(jobs), thread_name_prefix="verify") as pool:
        running = [pool.submit(job, stop) for job in jobs]
        try:
            for done in as_completed(running):
                done.result()
        finally:
            stop.set()


def _until(stop: Event, pieces: Iterator[T]) -> Iterator[T]:
    return takewhile(lambda _: not stop.is_set(), pieces)


def _expected(scope: _Scope, readable: Readable) -> Generator[tuple[pa.Table, int], None, None]:
    """The source's rows as the store should have them, and from how many rows of the source they come."""
    for images in read_images(scope.reader, readable, whole_table(readable)):
        yield scope.sink.expected(readable.layout.schema, images), images.num_rows


def whole_table(readable: Readable) -> sql.Composed:
    """COPY of every row, through the root of a partitioned table."""
    form = sql.SQL("{}" if readable.partitioned else "only {}")
    return readable.copy_query(form.format(identifier(readable.table)))


def _stored(sink: Sink, schema: TableSchema, keys: Sequence[str] | None = None) -> Generator[pa.Table, None, None]:
    if isinstance(sink, StoredPieces):
        yield from sink.stored_pieces(schema, keys)
    else:
        yield sink.stored(schema)


def _suspected(expected: Checksums, stored: Checksums) -> tuple[npt.NDArray[np.bool_], int]:
    """The groups that differ, small ones first, as far as their rows fit into memory; and how many rows do not fit."""
    groups = expected.differing(stored)
    sizes = np.maximum(expected.counts, stored.counts)[groups].astype(np.int64)
    order = np.argsort(sizes, kind="stable")
    fit = min(SUSPECT_ROWS, int(SUSPECT_BYTES / max(expected.row_bytes, stored.row_bytes, 1.0)))
    kept = np.cumsum(sizes[order]) <= fit
    kept[:1] = True  # at least one, however large its rows are
    suspected = np.zeros(GROUPS, np.bool_)
    suspected[groups[order[kept]]] = True
    return suspected, int(sizes[order[~kept]].sum())


def _read_suspected(scope: _Scope, overview: _Overview) -> _SourceRows:
    with _snapshot(scope) as readable:
        schema = readable.layout.schema
        if schema != overview.schema:
            raise _SchemaChanged
        stored = scope.stored_schema(schema)
        blocks = [scope.sink.expected(schema, _EMPTY)]
        blocks += (_distinct(_in_groups(rows, stored, overview), stored) for rows, _ in _expected(scope, readable))
    return _SourceRows(
        schema, stored, pa.concat_tables(blocks), write_message(scope.marker, "", prefix="millrace-verify")
    )


def _in_groups(rows: pa.Table, schema: TableSchema, overview: _Overview) -> pa.Table:
    if not rows.num_rows:
        return rows
    return rows.filter(pa.array(overview.suspected[key_groups(rows, key_columns(schema, rows))]))


def _distinct(rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Without a key the source may have the same row several times; a store has it once."""
    keys: Any = key_texts(rows, key_columns(schema, rows)).dictionary_encode()
    if len(keys.dictionary) == rows.num_rows:
        return rows
    return rows.take(np.unique(np.asarray(keys.indices), return_index=True)[1])


def _compared(sink: Sink, source: _SourceRows, overview: _Overview, suspects: Collection[str] | None) -> Comparison:
    schema, stored = source.schema, source.stored
    if suspects is None:
        pieces = [_in_groups(rows, stored, overview) for rows in _stored(sink, schema)]
        return compare(stored, source.rows, _joined(pieces, source.rows))
    keys = frozenset(suspects)
    pieces = [_picked(rows, stored, keys) for rows in _stored(sink, schema, sorted(keys))]
    return compare(stored, _picked(source.rows, stored, keys), _joined(pieces, source.rows))


def _joined(pieces: Sequence[pa.Table], like: pa.Table) -> pa.Table:
    return pa.concat_tables(pieces) if pieces else like.slice(0, 0)


def _changed(before: _SourceRows, after: _SourceRows, keys: frozenset[str]) -> frozenset[str]:
    """Those of the keys whose row changed in the source between two reads."""
    return compare(before.stored, *(_picked(read.rows, read.stored, keys) for read in (before, after))).keys


def _picked(rows: pa.Table, schema: TableSchema, keys: frozenset[str]) -> pa.Table:
    texts = key_texts(rows, key_columns(schema, rows))
    return rows.filter(pc.is_in(texts, pa.array(sorted(keys), pa.string())))


def proven(equal: Differences, found: Comparison, suspects: Counter[str]) -> Differences:
    """The differences that were found often enough; the others are undecided."""
    wrong = found.only(frozenset(key for key, proofs in suspects.items() if proofs >= PROOFS))
    kinds = {"missing": wrong.missing, "extra": wrong.extra, "different": wrong.different}
    return replace(
        equal,
        missing=len(wrong.missing),
        extra=len(wrong.extra),
        different=len(wrong.different),
        undecided=equal.undecided + len(found.keys) - len(wrong.keys),
        examples={name: tuple(islice(_shown(keys), _EXAMPLES)) for name, keys in kinds.items() if keys},
    )


def _shown(keys: frozenset[str]) -> Iterator[str]:
    return (key.replace("\x1f", ", ") for key in sorted(keys))
