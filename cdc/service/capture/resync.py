"""Resync: a new slot and snapshot into the same log and stores, when the slot or the WAL that it needs is lost.

After the snapshot of every table comes a truncate of each, at the snapshot's version: it removes exactly the rows that
the snapshot did not have, which were deleted unseen. The stores keep their rows meanwhile. A resync that is interrupted
starts again at the next start.
"""

from collections.abc import Mapping
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import psycopg
import pyarrow as pa

import cdc.log
from cdc.capture.source.connect import explained
from cdc.capture.source.slot import MOST_PADDING, START_OVER, SlotCreated
from cdc.config.settings import Settings
from cdc.errors import PositionMismatch
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry, Lsn, Op, format_lsn, parse_lsn
from cdc.ports import LogWriter

MARK = "resync"
_REQUESTED, _DONE = "wanted", "done"
_PADDING_BYTES, _PADDING_OVERHEAD = 4 << 20, 1024


def request(settings: Settings) -> None:
    """Make the next start of capture a resync. Raises LogFenced while the pipeline runs."""
    with closing(cdc.log.open_writer(settings)) as log:
        log.append(Entry(LOG_SCHEMA.empty_table(), log.progress().end, {MARK: _REQUESTED}))


def requested(log: LogWriter) -> bool:
    """Whether a resync was requested and is not finished."""
    return log.progress().marks.get(MARK) == _REQUESTED


def whole(settings: Settings) -> Settings:
    """The settings with `snapshot: initial` for every table that has a snapshot at all."""
    tables = tuple(
        table if table.snapshot == "never" else table.model_copy(update={"snapshot": "initial"})
        for table in settings.source.tables
    )
    return settings.model_copy(update={"source": settings.source.model_copy(update={"tables": tables})})


def pass_log_end(connection: psycopg.Connection[tuple[Any, ...]], log: LogWriter) -> None:
    """Have the server's WAL pass the log's end, or the stores would ignore its rows as older.

    That is needed after a failover that lost WAL. Raises PositionMismatch if too much is missing.
    """
    end = log.progress().end
    while (missing := end - _position(connection)) >= 0:
        if missing > MOST_PADDING:
            raise PositionMismatch(
                f"The log reaches {format_lsn(end)}, and the server's WAL ends {missing:,} bytes before: the stores "
                "have newer versions and would ignore every row of it.",
                START_OVER,
            )
        size = min(missing + _PADDING_OVERHEAD, _PADDING_BYTES)
        with explained("Writing WAL up to the log's end"):
            connection.execute("select pg_logical_emit_message(true, 'millrace.padding', repeat('x', %s))", (size,))


def _position(connection: psycopg.Connection[tuple[Any, ...]]) -> Lsn:
    with explained("Asking for the server's position"):
        row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    return ZERO_LSN if row is None else parse_lsn(row[0])


def ending(settings: Settings, log: LogWriter, made: SlotCreated, first: int) -> tuple[pa.Table, Mapping[str, str]]:
    """For the snapshot's last entry: truncates that remove the rows it did not have, and the mark that resync is
    done."""
    truncated = {str(table.name) for table in settings.source.tables if table.snapshot != "never"}
    schemas = [schema for schema in log.schemas.newest() if str(schema.table) in truncated]
    count = len(schemas)
    columns: dict[str, pa.Array[Any]] = {
        "table": pa.array([str(schema.table) for schema in schemas], pa.string()),
        "op": pa.array([Op.TRUNCATE.value] * count, pa.string()),
        "version": pa.array([made.restart_lsn] * count, pa.int64()),
        "commit_lsn": pa.array([made.consistent_point - 1] * count, pa.int64()),
        "ordinal": pa.array(range(first, first + count), pa.int64()),
        "xid": pa.array([0] * count, pa.int64()),
        "commit_ts": pa.array([datetime.now(UTC)] * count, LOG_SCHEMA.field("commit_ts").type),
        "schema_id": pa.array([schema.id for schema in schemas], pa.int32()),
    }
    arrays = [columns.get(field.name, pa.nulls(count, field.type)) for field in LOG_SCHEMA]
    return pa.Table.from_arrays(arrays, schema=LOG_SCHEMA), {MARK: _DONE}
