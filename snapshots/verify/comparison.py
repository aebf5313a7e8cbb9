"""The proof that a store equals the source: row by row, on demand, also while everybody writes.

First both sides are read once, at the same time and in pieces, into checksums (snapshots.verify.checksums): most tables
are equal, and then that is all. Where checksums differ the rows themselves are compared, and only those.

A row that differs may only be on its way. So the store is first waited for, up to an LSN that is not before the
source's snapshot; and a difference is proved only if, several times running, the source had the row before and after as
it was. Once is not enough: a row can go and come back between two looks. Rows that change all the time stay undecided.
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
from cdc.ports import Sink, StoredPieces
from snapshots.tables.catalog import estimated_rows, identifier, touch
from snapshots.tables.rows import Readable, describe, masking_of, read_images
from snapshots.tables.wal_messages import say
from snapshots.verify.checksums import GROUPS, Checksums, key_groups
from snapshots.verify.row_comparison import Comparison, compare, key_columns, key_texts

Connection = psycopg.Connection[tuple[Any, ...]]
WaitFor = Callable[[Lsn], None]
"""Returns when the store has applied everything up to an LSN; raises if it does not get there."""

T = TypeVar("T")

_EXAMPLES = 5
_PROOFS = 5
"""With three, a row that was deleted and inserted again all the time was once taken for extra, on a busy machine."""
_ATTEMPTS = 3
_EMPTY = pa.table({"key": pa.array([], pa.string()), "after": pa.array([], pa.string())})

SUSPECT_ROWS = 1_000_000
SUSPECT_BYTES = 256 << 20
"""Most rows, and bytes on each side, that are held to be compared: a store that lost a large table is told apart from
an equal one all the same, and only the count of what is missing ends here."""


@dataclass(frozen=True, slots=True)
class Differences:
    """What was found in one table of one store. Counts, and a few keys; never a value.

    `undecided` rows changed during every look, or were too many to look at: nothing was proved of them.
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
class Compared:
    """How far the first look is: rows read on each side, of about so many (0: nobody knows)."""

    source: int
    stored: int
    estimate: int


Report = Callable[[Compared], None]
"""Called from several threads."""


@dataclass(frozen=True, slots=True)
class _Scope:
    """One table of one store, and the connections to its source."""

    source: SourceSettings
    table: TableSettings
    sink: Sink
    reader: Connection
    speaker: Connection


@dataclass(frozen=True, slots=True)
class _Overview:
    """The first look: which groups of rows differ, and how many rows of them are left out."""

    schema: TableSchema
    at: Lsn
    rows: int
    suspected: npt.NDArray[np.bool_]
    left_out: int


@dataclass(frozen=True, slots=True)
class _Picture:
    """The suspected rows of the source at one moment, as the store should hold them; `at` is not before any of them."""

    schema: TableSchema
    rows: pa.Table
    at: Lsn


class _SchemaChanged(Exception):
    """The table's columns changed between two looks."""


def verify_table(
    source: SourceSettings,
    table: TableSettings,
    sink: Sink,
    wait: WaitFor = lambda lsn: None,
    looks: int = 12,
    *,
    report: Report = lambda compared: None,
) -> Differences:
    """Compare one table of a store with the source, in at most so many looks at the rows that seem to differ.

    The trap: without `wait` the comparison is only fair at a quiet point.
    """
    with connect(source, "millrace verify") as reader, connect(source, "millrace verify") as speaker:
        scope = _Scope(source, table, sink, reader, speaker)
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
    picture = _look(scope, overview)
    suspects: Counter[str] | None = None
    for _ in range(looks):
        wait(picture.at)
        found = _compared(scope.sink, picture, overview, suspects)
        if not found.keys:
            break
        again = _look(scope, overview)
        moved = _moved(picture, again, found.keys)
        seen = suspects or Counter()
        suspects = Counter({key: 0 if key in moved else seen[key] + 1 for key in found.keys})
        picture = again
        if min(suspects.values()) >= _PROOFS:
            break
    return _result(replace(equal, at=picture.at), found, suspects or Counter())


def _overview(scope: _Scope, wait: WaitFor, report: Report) -> _Overview:
    """Read both sides at the same time. The source's snapshot is older than the LSN that the store is waited for."""
    with _snapshot(scope) as readable:
        # The current insert position would not do: it may be unflushed, or lie behind a page header that nobody sends.
        at, estimate = say(scope.speaker, "", prefix="millrace-verify"), estimated_rows(scope.reader, scope.table.name)
        wait(at)
        schema = readable.layout.schema
        scope.sink.expected(schema, _EMPTY)  # what it asks the store for is known before two threads use it
        wanted, held = Checksums(), Checksums()
        read = Counter[str]()

        def add(side: str, checksums: Checksums, rows: pa.Table, count: int) -> None:
            checksums.add(rows, key_columns(schema, rows))
            read[side] += count
            report(Compared(read["source"], read["stored"], estimate))

        def add_source(stop: Event) -> None:
            with closing(_expected(scope, readable)) as blocks:
                for rows, count in _until(stop, blocks):
                    add("source", wanted, rows, count)

        def add_stored(stop: Event) -> None:
            with closing(_stored(scope.sink, schema)) as pieces:
                for rows in _until(stop, pieces):
                    add("stored", held, rows, rows.num_rows)

        _at_once(add_source, add_stored)
    suspected, left_out = _suspected(wanted, held)
    return _Overview(schema, at, read["source"], suspected, left_out)


@contextmanager
def _snapshot(scope: _Scope) -> Iterator[Readable]:
    """The table as of one moment. Whoever fails inside leaves the connection to be closed."""
    name = scope.table.name
    with explained(f"Reading table {name}"):
        scope.reader.execute("begin isolation level repeatable read read only")
    readable = describe(scope.reader, scope.table, masking_of(scope.source))
    touch(scope.reader, name, readable.columns)
    yield readable
    with explained(f"Reading table {name}"):
        scope.reader.execute("commit")


def _at_once(*jobs: Callable[[Event], None]) -> None:
    """Run the jobs in threads of their own: their work is in C. When one fails, the others stop at their next piece."""
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
    """The source's rows as the store should hold them, and how many rows of the source they come from."""
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


def _suspected(wanted: Checksums, held: Checksums) -> tuple[npt.NDArray[np.bool_], int]:
    """The groups that differ, as far as their rows fit into memory, small ones first; and how many rows do not."""
    groups = wanted.differing(held)
    sizes = np.maximum(wanted.counts, held.counts)[groups].astype(np.int64)
    order = np.argsort(sizes, kind="stable")
    fit = min(SUSPECT_ROWS, int(SUSPECT_BYTES / max(wanted.row_bytes, held.row_bytes, 1.0)))
    kept = np.cumsum(sizes[order]) <= fit
    kept[:1] = True  # one is looked at however large its rows are
    suspected = np.zeros(GROUPS, np.bool_)
    suspected[groups[order[kept]]] = True
    return suspected, int(sizes[order[~kept]].sum())


def _look(scope: _Scope, overview: _Overview) -> _Picture:
    with _snapshot(scope) as readable:
        schema = readable.layout.schema
        if schema != overview.schema:
            raise _SchemaChanged
        blocks = [scope.sink.expected(schema, _EMPTY)]
        blocks += (_once(_in_groups(rows, schema, overview), schema) for rows, _ in _expected(scope, readable))
    return _Picture(schema, pa.concat_tables(blocks), say(scope.speaker, "", prefix="millrace-verify"))


def _in_groups(rows: pa.Table, schema: TableSchema, overview: _Overview) -> pa.Table:
    if not rows.num_rows:
        return rows
    return rows.filter(pa.array(overview.suspected[key_groups(rows, key_columns(schema, rows))]))


def _once(rows: pa.Table, schema: TableSchema) -> pa.Table:
    """Without a key the source may have the same row many times: a store holds it once."""
    keys: Any = key_texts(rows, key_columns(schema, rows)).dictionary_encode()
    if len(keys.dictionary) == rows.num_rows:
        return rows
    return rows.take(np.unique(np.asarray(keys.indices), return_index=True)[1])


def _compared(sink: Sink, picture: _Picture, overview: _Overview, suspects: Collection[str] | None) -> Comparison:
    schema = picture.schema
    if suspects is None:
        pieces = [_in_groups(rows, schema, overview) for rows in _stored(sink, schema)]
        return compare(schema, picture.rows, _joined(pieces, picture.rows))
    keys = frozenset(suspects)
    pieces = [_picked(rows, schema, keys) for rows in _stored(sink, schema, sorted(keys))]
    return compare(schema, _picked(picture.rows, schema, keys), _joined(pieces, picture.rows))


def _joined(pieces: Sequence[pa.Table], like: pa.Table) -> pa.Table:
    return pa.concat_tables(pieces) if pieces else like.slice(0, 0)


def _moved(before: _Picture, after: _Picture, keys: frozenset[str]) -> frozenset[str]:
    """Those of the keys whose row the source itself has changed between two looks."""
    return compare(before.schema, *(_picked(picture.rows, picture.schema, keys) for picture in (before, after))).keys


def _picked(rows: pa.Table, schema: TableSchema, keys: frozenset[str]) -> pa.Table:
    texts = key_texts(rows, key_columns(schema, rows))
    return rows.filter(pc.is_in(texts, pa.array(sorted(keys), pa.string())))


def _result(equal: Differences, found: Comparison, suspects: Counter[str]) -> Differences:
    wrong = found.only(frozenset(key for key, proofs in suspects.items() if proofs >= _PROOFS))
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
