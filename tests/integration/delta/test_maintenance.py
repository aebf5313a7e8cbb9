"""Looking after a Delta table: old tombstones go, files are packed, and no row changes."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from cdc.model import Column, TableId, TableSchema
from sinks.delta.maintenance import MaintenancePolicy, maintain
from sinks.delta.schema import layout as delta_layout
from sinks.delta.write import writer
from tests.fix_delta import OpenLake, numbers, stored_table
from tests.scenes.histories import INT4, TEXT, batch, change

LABELLED = TableSchema(TableId("public", "items"), (Column("id", INT4, key=True), Column("label", TEXT)), 1)


def test_maintenance_forgets_old_tombstones_packs_files_and_changes_no_row(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LEAST_FILE", 100)
    sink = open_lake(LABELLED, keep_tombstones_hours=0.0001)
    for start in range(0, 400, 20):
        sink.apply(numbers(LABELLED, range(start, start + 20), 5))
    sink.apply(batch(LABELLED, [change("d", f'{{"id":{number}}}', 6) for number in range(0, 60, 3)]))
    before = sink.stored(LABELLED)
    files = len(stored_table(lake).file_uris())
    monkeypatch.setattr(writer, "LEAST_FILE", writer.MEGABYTE)
    cared = sink.maintain(LABELLED)
    assert (cared.purged, cared.yielded) == (20, 0)
    assert sink.stored(LABELLED).equals(before)
    assert len(stored_table(lake).file_uris()) == 1 < files
    assert stored_table(lake).to_pyarrow_table().num_rows == before.num_rows
    retention = stored_table(lake).metadata().configuration["delta.logRetentionDuration"]
    assert retention == "interval 24 hours"
    version = stored_table(lake).version()
    sink.maintain(LABELLED)
    assert stored_table(lake).version() == version, "a table in good order is left alone"


def test_young_tombstones_survive_maintenance(open_lake: OpenLake) -> None:
    sink = open_lake(LABELLED, keep_tombstones_hours=1_000_000.0)
    sink.apply(numbers(LABELLED, range(3), 5))
    sink.apply(batch(LABELLED, [change("d", '{"id":1}', 9)]))
    sink.maintain(LABELLED)
    sink.apply(numbers(LABELLED, range(3), 5))
    assert sink.stored(LABELLED)["id"].to_pylist() == [0, 2]


def test_a_deleted_row_is_in_no_file_once_history_has_passed(lake: Path, open_lake: OpenLake) -> None:
    sink = open_lake(LABELLED)
    sink.apply(numbers(LABELLED, range(10), 5))
    sink.apply(batch(LABELLED, [change("d", '{"id":7}', 6)]))
    layout = delta_layout.evolve(LABELLED, sink.store(LABELLED.table).schema()).layout
    at_once = MaintenancePolicy(timedelta(days=36_500), timedelta(0))
    store = sink.store(LABELLED.table)
    maintain(store.current(), layout, at_once, datetime.now(UTC), store.set_properties)
    left = [label for file in lake.rglob("*.parquet") if "_delta_log" not in str(file) for label in _labels(file)]
    assert len(left) == 10
    assert "row 7" not in left


def _labels(file: Path) -> list[Any]:
    return pq.read_table(file)["label"].to_pylist()
