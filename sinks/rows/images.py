"""Rows as JSON images, and their shape under a schema."""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from cdc.json_text.members import build, members
from cdc.model import TableSchema

STORED_ROW_MISSING = "stored row missing"
"""Why a sink rejects a partial row: the store has no row from which to take the missing columns."""

IMAGES = pa.schema([pa.field("key", pa.string()), pa.field("after", pa.string())])
"""What the JSON stores give to `verify`: the store's key of the row, and the row arranged by the schema."""


def arranged(schema: TableSchema, image: str) -> str:
    """The row with exactly the schema's columns in their order. A column that was added after the row was written
    is null, as it is in the source unless it was given a default."""
    values = members(image)
    return build({column.name: values.get(column.name, "null") for column in schema.columns})


def ordered(rows: Iterable[tuple[str, str]]) -> pa.Table:
    """Pairs of key and image as a table, ordered by key."""
    pairs = sorted(rows)
    columns = {"key": [key for key, _ in pairs], "after": [image for _, image in pairs]}
    return pa.table(columns, schema=IMAGES)


def expected(schema: TableSchema, images: pa.Table) -> pa.Table:
    """`Sink.expected` for stores that keep the image itself."""
    return ordered((key, arranged(schema, row)) for key, row in zip(*columns(images, "key", "after"), strict=True))


def columns(rows: pa.Table, *names: str) -> list[list[Any]]:
    """Columns as Python lists."""
    return [rows.column(name).to_pylist() for name in names]


def partial_first(rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The partial rows and the complete ones."""
    lengths = rows.column("unchanged").combine_chunks()
    partial = pc.fill_null(pc.greater(pc.list_value_length(lengths), pa.scalar(0)), pa.scalar(False))
    if not pc.any(partial).as_py():
        return rows.slice(0, 0), rows
    return rows.filter(partial), rows.filter(pc.invert(partial))


def not_before(rows: pa.Table, version: int) -> pa.Table:
    """The rows that a truncate of this version does not remove."""
    return rows.filter(pc.greater_equal(rows.column("version"), pa.scalar(version))) if version else rows
