"""Rows of a table from COPY to the log: the query, the images, and the log's other columns.

The images are made by the stream's code, so a row has the same bytes from either. Masks apply first: a dropped column
is not even queried.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa
from psycopg import sql

from cdc.capture.rows import byte_spans, copy_text
from cdc.capture.rows.layout import RowLayout, images, lay_out, recorded_as
from cdc.capture.rows.mask import Masking, Rule
from cdc.capture.source import catalog
from cdc.config.settings import SourceSettings, TableSettings
from cdc.errors import SourceRefused
from cdc.key_range import KeyRange
from cdc.model import LOG_SCHEMA, Lsn, Op, TableId, TableSchema
from cdc.ports import Schemas
from snapshots.tables.copy import CopyBlock, read_blocks

Connection = psycopg.Connection[tuple[Any, ...]]


def masking_of(source: SourceSettings) -> Masking:
    """The pipeline's masking rules, the same for stream and snapshots."""
    return Masking(
        {table.name: {name: Rule(rule) for name, rule in table.mask.items()} for table in source.tables if table.mask},
        {table.name: frozenset(table.columns) for table in source.tables if table.columns},
        source.mask_key.reveal().encode(),
    )


@dataclass(frozen=True)
class Readable:
    """How a table is read: its columns at the source, its layout in the log, and its row filter."""

    layout: RowLayout
    columns: tuple[str, ...]
    where: str
    partitioned: bool
    key: tuple[str, ...]
    """The key's columns in the order of its index, which may differ from the table's. Empty: the whole row is the key,
    and the table cannot be read in key order."""

    @property
    def table(self) -> TableId:
        """The table's name in the log."""
        return self.layout.schema.table

    def copy_query(
        self, relation: sql.Composable, *conditions: sql.Composable, tail: sql.Composable | None = None
    ) -> sql.Composed:
        """COPY of this table's columns from a relation that has them, with its row filter."""
        mine = [sql.SQL("({})").format(sql.SQL(self.where))] if self.where else []
        restricted = [*mine, *conditions]
        filtered = sql.SQL(" where {}").format(sql.SQL(" and ").join(restricted)) if restricted else sql.SQL("")
        return sql.SQL("copy (select {} from {}{}{}) to stdout").format(
            sql.SQL(", ").join(map(sql.Identifier, self.columns)), relation, filtered, tail or sql.SQL("")
        )

    def parse(self, block: CopyBlock) -> byte_spans.Block:
        """The columns of a block of COPY's lines, not masked yet: only for `cdc.capture.rows.layout.images`."""
        return copy_text.parse(block.lines, len(self.columns))

    def column_indexes(self, names: Sequence[str]) -> list[int]:
        """The indexes of these columns in a parsed block."""
        return [self.columns.index(name) for name in names]

    def recorded(self, schemas: Schemas) -> "Readable":
        """The same with its schema recorded in the registry: `layout.schema.id` is the schema id of its rows."""
        return replace(self, layout=recorded_as(self.layout, schemas.record(self.layout.schema)))


def describe(connection: Connection, table: TableSettings, masking: Masking) -> Readable:
    """How a table is read, from the catalog. Raises SourceRefused if it does not exist or cannot be published."""
    facts = next((found for found in catalog.tables(connection, [table.name]) if found.table == table.name), None)
    if facts is None:
        raise SourceRefused(f"Table {table.name} does not exist.", "Check source.tables, or create it.")
    if not facts.publishable:
        raise SourceRefused(f"{table.name} is a {facts.kind_name}: it has no changes.", "Remove it from source.tables.")
    schema = catalog.schema(connection, facts)
    kept = {field.index for field in lay_out(schema, masking).fields}
    queried = replace(schema, columns=tuple(column for at, column in enumerate(schema.columns) if at in kept))
    names = tuple(column.name for column in queried.columns)
    return Readable(lay_out(queried, masking), names, table.where, facts.kind == "p", facts.key)


def read_images(connection: Connection, readable: Readable, query: sql.Composable) -> Iterator[pa.Table]:
    """Blocks of (key, after) images of a COPY made by `copy_query`."""
    text = query.as_bytes(connection)
    for block in read_blocks(connection, text, f"Reading table {readable.table}"):
        key, after = images(readable.layout, readable.parse(block))
        yield pa.table([key, after], names=["key", "after"])


@dataclass(frozen=True, slots=True)
class ReadStamp:
    """The log columns that all rows of one snapshot or chunk share. See docs/architecture.md for `version`."""

    version: Lsn
    commit_lsn: Lsn
    commit_ts: datetime
    xid: int = 0


def truncation(schema: TableSchema, stamp: ReadStamp) -> pa.Table:
    """One row of the log that removes all rows of the table with a smaller version."""
    row = {
        "table": str(schema.table),
        "op": Op.TRUNCATE.value,
        "version": stamp.version,
        "commit_lsn": stamp.commit_lsn,
        "ordinal": 0,
        "xid": stamp.xid,
        "commit_ts": stamp.commit_ts,
        "schema_id": schema.id,
    }
    return pa.Table.from_pylist([row], schema=LOG_SCHEMA)


def removals(schema: TableSchema, ranges: Sequence[str], stamp: ReadStamp, first: int) -> pa.Table:
    """Rows of the log that remove all rows of these key ranges with a smaller version. A range over columns that are
    not in the schema's key is left out."""
    key = {column.name for column in schema.key or schema.columns}
    fit = [text for text in ranges if key.issuperset(KeyRange.parse(text).columns)]
    read = pa.table({"key": pa.array(fit, pa.string()), "after": pa.nulls(len(fit), pa.string())})
    rows = log_rows(schema, read, stamp, first)
    return rows.set_column(rows.column_names.index("op"), rows.schema.field("op"), pa.repeat(Op.REMOVE.value, len(fit)))


def log_rows(schema: TableSchema, read: pa.Table, stamp: ReadStamp, first: int) -> pa.Table:
    """Images (key, after) as rows of the log, with ordinals from `first` on; a `version` column overrides the
    stamp's."""
    count = read.num_rows
    columns: dict[str, Any] = {
        "table": pa.repeat(str(schema.table), count),
        "op": pa.repeat(Op.READ.value, count),
        "key": read["key"],
        "after": read["after"],
        "before": pa.nulls(count, pa.string()),
        "unchanged": pa.nulls(count, pa.list_(pa.string())),
        "version": read["version"] if "version" in read.column_names else pa.array(np.full(count, stamp.version)),
        "commit_lsn": pa.array(np.full(count, stamp.commit_lsn, np.int64)),
        "ordinal": pa.array(np.arange(first, first + count, dtype=np.int64)),
        "xid": pa.array(np.full(count, stamp.xid, np.int64)),
        "commit_ts": pa.repeat(pa.scalar(stamp.commit_ts, pa.timestamp("us", tz="UTC")), count),
        "schema_id": pa.array(np.full(count, schema.id, np.int32)),
    }
    return pa.table(columns, schema=LOG_SCHEMA)
