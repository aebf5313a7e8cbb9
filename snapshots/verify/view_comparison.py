"""Verifies that a store holds a view, by computing the whole view again from the source's tables.

All tables are read in one snapshot, and the view is computed from them at once, by other code than that which keeps it
up to date. As with tables, a difference counts only if it was found several times in a row, and the row of that key
was the same before and after: it may only not have arrived yet.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing

import pyarrow as pa

from cdc.arrays import AnyArray
from cdc.capture.source.connect import connect, explained
from cdc.config.settings import SourceSettings, TableSettings
from cdc.json_text.columns import members
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import ShapesTables, Sink, StoredPieces
from snapshots.tables.catalog import lock_for_read
from snapshots.tables.rows import describe, masking_of, read_images
from snapshots.tables.wal_messages import write_message
from snapshots.verify.comparison import PROOFS, Connection, Differences, WaitFor, proven, whole_table
from snapshots.verify.row_comparison import NO_DIFFERENCE, compare

Compute = Callable[[Mapping[TableId, pa.Table]], pa.Table]
"""Computes a view from its tables, which have `_id` (the key) and cells: the keys and rows of the view."""
KEY = "_id"


def verify_view(
    source: SourceSettings,
    columns: Mapping[TableId, Sequence[str]],
    compute: Compute,
    schema: TableSchema,
    sink: Sink,
    *,
    wait: WaitFor = lambda lsn: None,
    looks: int = 12,
) -> Differences:
    """Compare a view in a store with the view computed from the source. Needs memory for the tables' columns."""
    stored = sink.stored_schema(schema) if isinstance(sink, ShapesTables) else schema
    expected, at, rows = _expected(source, columns, compute, schema, sink)
    suspects: Counter[str] = Counter()
    found = NO_DIFFERENCE
    for look in range(looks):
        wait(at)
        found = compare(stored, expected, _stored(sink, schema, expected))
        if look:
            found = found.only(frozenset(suspects))
        if not found.keys:
            break
        again, at, rows = _expected(source, columns, compute, schema, sink)
        changed = compare(stored, expected, again).keys
        suspects = Counter({key: 0 if key in changed else suspects[key] + 1 for key in found.keys})
        expected = again
        if min(suspects.values()) >= PROOFS:
            break
    return proven(Differences(sink.name, schema.table, rows, at), found, suspects)


def source_tables(
    connection: Connection, source: SourceSettings, columns: Mapping[TableId, Sequence[str]]
) -> dict[TableId, pa.Table]:
    """The needed columns of these tables, in one snapshot."""
    captured = {table.name: table for table in source.tables}
    with explained("Reading the tables of a view"):
        connection.execute("begin isolation level repeatable read read only")
    found = {table: _cells(connection, captured[table], source, names) for table, names in columns.items()}
    with explained("Reading the tables of a view"):
        connection.execute("commit")
    return found


def _expected(
    source: SourceSettings, columns: Mapping[TableId, Sequence[str]], compute: Compute, schema: TableSchema, sink: Sink
) -> tuple[pa.Table, Lsn, int]:
    """The rows that the store should have, an LSN not before any of them, and how many there are."""
    with connect(source, "millrace verify") as reader:
        tables = source_tables(reader, source, columns)
        at = write_message(reader, "", prefix="millrace-verify")
    whole = compute(tables).rename_columns(["key", "after"])
    return sink.expected(schema, whole), at, whole.num_rows


def _stored(sink: Sink, schema: TableSchema, like: pa.Table) -> pa.Table:
    if not isinstance(sink, StoredPieces):
        return sink.stored(schema)
    with closing(sink.stored_pieces(schema)) as pieces:  # type: ignore[type-var]
        return pa.concat_tables([like.slice(0, 0), *pieces])


def _cells(connection: Connection, table: TableSettings, source: SourceSettings, names: Sequence[str]) -> pa.Table:
    readable = describe(connection, table, masking_of(source))
    lock_for_read(connection, table.name, readable.columns)
    empty = pa.schema([(KEY, pa.string()), *((name, pa.string()) for name in names)]).empty_table()
    blocks = [_cut(images, names) for images in read_images(connection, readable, whole_table(readable))]
    return pa.concat_tables([empty, *blocks]).combine_chunks()


def _cut(images: pa.Table, names: Sequence[str]) -> pa.Table:
    raw = members(images.column("after").combine_chunks())
    found: dict[str, AnyArray] = {KEY: images.column("key").cast(pa.string())}
    for name in names:
        found[name] = raw[name].json().cast(pa.string()) if name in raw else pa.nulls(images.num_rows, pa.string())
    return pa.table(found)
