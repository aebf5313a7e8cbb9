"""The first snapshot into a real log from a real Postgres: exact, complete, parallel, and refusing what it cannot read."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import cdc.log
from cdc.capture import slot as slots
from cdc.config import Settings
from cdc.errors import SourceLost, SourceRefused
from cdc.model import TableId
from cdc.ports import LogWriter
from snapshots import plan
from snapshots.initial import EXACT_MARK, STATE_MARK, SnapshotProgress, run_initial
from snapshots.plan import mark_name, planned
from tests.fix_servers import Database

MakeSettings = Callable[..., Settings]


def pipeline(make: MakeSettings, database: Database, *tables: Any, **source: Any) -> Settings:
    server = database.server
    section = {
        "host": server.host,
        "port": server.port,
        "database": database.name,
        "user": "postgres",
        "password": server.password,
        "slot": database.name,
        "tables": list(tables),
        **source,
    }
    return make(source=section)


def take_snapshot(settings: Settings, report: Callable[[SnapshotProgress], None] = lambda progress: None) -> pa.Table:
    """Make the slot, read everything, and give back what the log then holds."""
    writer = cdc.log.open_writer(settings)
    try:
        with slots.create(settings.source, 30, lambda text: None) as made:
            run_initial(settings, made, writer, report)
    finally:
        writer.close()
    return logged(settings)


def logged(settings: Settings) -> pa.Table:
    reader = cdc.log.open_reader(settings)
    slices = [part.rows for part in reader.read(reader.start())]
    return pa.concat_tables(slices)


def images(rows: pa.Table) -> dict[str, dict[str, Any]]:
    return {key: json.loads(after) for key, after in zip(rows["key"].to_pylist(), rows["after"].to_pylist(), strict=True)}


def test_every_row_is_in_the_log_once_with_the_slots_versions(database: Database, settings_of: MakeSettings) -> None:
    database.execute(
        "create table item (id int primary key, name text, price numeric)",
        "insert into item select g, 'n' || g, g / 10.0 from generate_series(1, 1000) g",
    )
    settings = pipeline(settings_of, database, "public.item")
    writer = cdc.log.open_writer(settings)
    with slots.create(settings.source, 30, lambda text: None) as made:
        run_initial(settings, made, writer)
    marks = writer.progress().marks
    assert writer.progress().end == made.consistent_point
    writer.close()
    rows = logged(settings)
    assert rows.num_rows == 1000
    assert set(rows["op"].to_pylist()) == {"r"}
    assert set(rows["version"].to_pylist()) == {made.restart_lsn}
    assert set(rows["commit_lsn"].to_pylist()) == {made.consistent_point - 1}
    assert rows["ordinal"].to_pylist() == list(range(1000))
    assert images(rows)['{"id":7}'] == {"id": 7, "name": "n7", "price": 0.7}
    assert json.loads(marks[STATE_MARK]) == {"state": "done", "rows": 1000}
    assert EXACT_MARK in marks
