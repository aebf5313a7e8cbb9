"""Rows of a view `totals`: what a view hands over to capture."""

import json
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from cdc.model import LOG_SCHEMA, Column, PgType, TableId, TableSchema
from views.output_files import OutputFile

DAY = datetime(2026, 3, 1, tzinfo=UTC)
TABLE = TableId("view", "totals")
TOTALS = TableSchema(
    TABLE, (Column("id", PgType(23, "int4"), key=True), Column("total", PgType(1700, "numeric"))), identity="d"
)


def rows(lsn: int, *totals: int, op: str = "u") -> pa.Table:
    """One row per total, with ids 1, 2, …, as of this LSN."""
    found = [
        {
            "table": str(TABLE),
            "op": op,
            "key": json.dumps({"id": number}, separators=(",", ":")),
            "after": json.dumps({"id": number, "total": total}, separators=(",", ":")),
            "version": lsn,
            "commit_lsn": lsn,
            "ordinal": number,
            "xid": 0,
            "commit_ts": DAY + timedelta(seconds=lsn),
            "schema_id": 0,
        }
        for number, total in enumerate(totals, 1)
    ]
    return pa.Table.from_pylist(found, LOG_SCHEMA)


def output(before: str, after: str, lsn: int, *totals: int) -> OutputFile:
    """Totals as of an LSN, between two marks."""
    return OutputFile("totals", before, after, TOTALS, rows(lsn, *totals))
