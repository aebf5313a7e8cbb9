"""The Delta sink behind its applier: tables without rows, and several tables in one batch."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from cdc.errors import Lost
from cdc.model import Column, TableId, TableSchema
from cdc.ports import Batch
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.context import SinkContext
from sinks.delta import sink
from sinks.delta.settings import DeltaSettings
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from tests.fix_log import FilledLog
from tests.scenes.histories import INT4, TEXT, Row, change, log_table

COLUMNS = (Column("id", INT4, key=True), Column("label", TEXT))
Open = Callable[..., Applier]


@pytest.fixture
def open_applier(filled_log: FilledLog, lake: Path, state_dir: Path) -> Open:
    def opened(open_sink: Callable[[], Any] | None = None, tables: Sequence[TableId] = ()) -> Applier:
        settings = DeltaSettings(path=str(lake))
        return Applier(
            "delta",
            open_sink=open_sink or partial(sink.open_sink, settings, SinkContext(state_dir)),
            log=filled_log.reader,
            letters=DeadLetters(state_dir / "letters"),
            stop=threading.Event(),
            tables=tables,
        )

    return opened


def schema_of(name: str, *more: Column) -> TableSchema:
    return TableSchema(TableId("public", name), (*COLUMNS, *more), 1)


def deliver(applier: Applier, log: FilledLog, rows: Sequence[Row]) -> None:
    applier.apply(gather(ranked(log_table(rows)), log.reader.schemas))


def put(table: str, key: int, version: int, label: str) -> Row:
    image = f'{{"id":{key},"label":"{label}"}}'
    return change("u", f'{{"id":{key}}}', version, image, table=f"public.{table}")


def test_a_table_without_rows_is_there_for_its_readers(open_applier: Open, filled_log: FilledLog, lake: Path) -> None:
    filled_log.record(schema_of("empty"))
    filled_log.record(schema_of("other"))
    applier = open_applier(tables=[TableId("public", "empty"), TableId("public", "late")])
    applier.open_store()
    assert DeltaTable(lake / "public.empty").to_pyarrow_table().column_names[:2] == ["id", "label"]
    assert not (lake / "public.other").exists(), "not a table of this sink"
    filled_log.record(schema_of("late"))
    deliver(applier, filled_log, [])
    assert DeltaTable(lake / "public.late").to_pyarrow_table().num_rows == 0


def test_rows_of_an_older_schema_fit_a_table_that_was_made_for_the_newest(
    open_applier: Open, filled_log: FilledLog, lake: Path
) -> None:
    filled_log.record(schema_of("items", Column("old", TEXT)))
    filled_log.record(schema_of("items", Column("new", INT4)))
    applier = open_applier()
    applier.open_store()
    row = change("u", '{"id":1}', 10, '{"id":1,"label":"a","old":"o"}', schema_id=1)
    deliver(applier, filled_log, [row])
    deliver(applier, filled_log, [change("u", '{"id":2}', 20, '{"id":2,"label":"b","new":7}', schema_id=2)])
    rows = DeltaTable(lake / "public.items").to_pyarrow_table(columns=["id", "old", "new"]).sort_by("id").to_pylist()
    assert rows == [{"id": 1, "old": "o", "new": None}, {"id": 2, "old": None, "new": 7}]


def test_a_table_that_has_no_key_keeps_no_other_waiting(open_applier: Open, filled_log: FilledLog, lake: Path) -> None:
    filled_log.record(TableSchema(TableId("public", "keyless"), (Column("n", INT4),), 1, identity="n"))
    filled_log.record(schema_of("items"))
    applier = open_applier()
    applier.open_store()
    assert applier.status.state == "running"
    assert DeltaTable(lake / "public.items").version() == 0


def test_tables_of_one_batch_are_committed_side_by_side(
    open_applier: Open, filled_log: FilledLog, lake: Path, state_dir: Path
) -> None:
    """Every table waits in its commit until all have come there: one after the other, they would wait for ever."""
    names = [f"t{number}" for number in range(4)]
    for name in names:
        filled_log.record(schema_of(name))
    meeting = threading.Barrier(len(names))

    class Meeting(sink.DeltaSink):
        def apply(self, batch: Batch) -> None:
            meeting.wait(timeout=30)
            super().apply(batch)

    settings = DeltaSettings(path=str(lake))
    applier = open_applier(lambda: Meeting(settings, SinkContext(state_dir)))
    deliver(applier, filled_log, [put(name, 1, 10, name) for name in names])
    for name in names:
        assert DeltaTable(lake / f"public.{name}").to_pyarrow_table()["label"].to_pylist() == [name]
    assert applier.status.changes == {f"public.{name}": 1 for name in names}


def test_a_table_that_fails_once_is_tried_again_beside_the_others(
    open_applier: Open, filled_log: FilledLog, lake: Path, state_dir: Path
) -> None:
    names = ["a", "b", "c"]
    for name in names:
        filled_log.record(schema_of(name))
    failed: list[str] = []

    class Failing(sink.DeltaSink):
        def apply(self, batch: Batch) -> None:
            super().apply(batch)
            if batch.schema.table.name == "b" and not failed:
                failed.append("b")
                raise Lost("the answer was lost")

    settings = DeltaSettings(path=str(lake))
    applier = open_applier(lambda: Failing(settings, SinkContext(state_dir)))
    deliver(applier, filled_log, [put(name, 1, 10, name) for name in names])
    assert failed == ["b"]
    for name in names:
        assert DeltaTable(lake / f"public.{name}").to_pyarrow_table().num_rows == 1
    assert applier.status.state == "running"
