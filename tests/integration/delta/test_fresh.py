"""The fresh view: a Delta table with what the log holds beyond it, before and while the sink catches up."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from deltalake import DeltaTable

from cdc.config.settings import Settings
from cdc.errors import ConfigError
from cdc.model import Column, TableId, TableSchema
from cdc.service.inspect.fresh import fresh
from cdc.service.state.sink_positions import consumer_name
from sinks.context import SinkContext
from sinks.delta import sink
from sinks.delta.fresh import Fresh
from sinks.delta.rows.changes import in_source_order
from sinks.delta.settings import DeltaSettings
from sinks.registry import open_sink
from tests.fix_log import FilledLog
from tests.fix_processes import RunProgram
from tests.scenes.histories import INT4, INTEGERS, PAIRS, TEXT, History, Row, batch, change, cut, images, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ITEMS = TableSchema(
    TableId("public", "items"), (Column("id", INT4, key=True), Column("label", TEXT), Column("big", TEXT)), 1
)


class Lake:
    """A log, a Delta sink behind it, and the view of both."""

    def __init__(self, log: FilledLog, settings: Settings) -> None:
        self.log = log
        self.settings = settings
        (found,) = settings.sinks
        assert isinstance(found, DeltaSettings)
        self.sink = sink.open_sink(found, SinkContext(settings.state))

    def merge(self, schema: TableSchema, rows: Sequence[Row], end: int | None = None) -> None:
        """What the sink's query does with rows; without `end` it dies before it notes how far it came."""
        self.sink.prepare(schema)
        self.sink.apply(batch(schema, rows))
        if end is not None:
            self.log.reader.commit("delta", end)  # type: ignore[arg-type]

    def fresh(self, name: str = "public.items") -> Fresh:
        return fresh(self.settings, name)

    def rows(self, name: str = "public.items") -> dict[int, Any]:
        return {row["id"]: row for row in self.fresh(name).arrow().to_pylist()}


@pytest.fixture
def lake(filled_log: FilledLog, settings_of: Callable[..., Settings], tmp_path: Path) -> Lake:
    as_text = {f"public.{name}": ["at"] for name in ("ints", "pairs")}
    sinks = [{"kind": "delta", "path": str(tmp_path / "lake"), "as_text": as_text}]
    return Lake(filled_log, settings_of(sinks=sinks))


def put(key: int, version: int, label: str, big: str | None = None) -> Row:
    values = f'{{"id":{key},"label":"{label}"' + ("" if big is None else f',"big":"{big}"') + "}"
    return change("u", f'{{"id":{key}}}', version, values, ["big"] if big is None else None)


def test_a_committed_change_is_seen_before_it_is_merged(lake: Lake) -> None:
    lake.log.record(ITEMS)
    first = [put(1, 10, "one", "x"), put(2, 11, "two", "x"), put(3, 12, "three", "x")]
    lake.merge(ITEMS, first, lake.log.append(first))
    end = lake.log.append([put(1, 20, "new", "y"), change("d", '{"id":2}', 21), put(4, 22, "four", "z")])
    seen = lake.fresh()
    assert seen.reached == end
    labels = {row["id"]: row["label"] for row in seen.arrow().to_pylist()}
    assert labels == {1: "new", 3: "three", 4: "four"}
    stored = DeltaTable(Path(str(lake.settings.sinks[0].path)) / "public.items")  # type: ignore[attr-defined]
    assert seen.arrow().schema.names == stored.to_pyarrow_table().schema.names


def test_a_partial_change_shows_the_large_column_of_the_table(lake: Lake) -> None:
    lake.log.record(ITEMS)
    first = [put(1, 10, "one", "large"), put(2, 10, "two", "large")]
    lake.merge(ITEMS, first, lake.log.append(first))
    lake.log.append([put(1, 20, "new"), put(2, 21, "newer", "other"), put(2, 22, "newest")])
    rows = lake.rows()
    assert (rows[1]["label"], rows[1]["big"]) == ("new", "large")
    assert (rows[2]["label"], rows[2]["big"]) == ("newest", "other")


def test_what_the_sink_has_merged_but_not_noted_is_not_taken_back(lake: Lake) -> None:
    """The log beyond the noted position holds changes that are older than what the table has by now."""
    lake.log.record(ITEMS)
    first, second = [put(1, 10, "one", "x")], [put(1, 20, "two", "x"), put(2, 21, "other", "x")]
    third = [put(1, 30, "three", "x"), change("d", '{"id":2}', 31)]
    lake.merge(ITEMS, first, lake.log.append(first))
    for rows in (second, third):
        lake.log.append(rows)
        lake.merge(ITEMS, rows)
    assert {key: row["label"] for key, row in lake.rows().items()} == {1: "three"}


def test_a_truncate_in_the_log_empties_the_view_before_the_table(lake: Lake) -> None:
    lake.log.record(ITEMS)
    first = [put(1, 10, "one", "x"), put(2, 11, "two", "x")]
    lake.merge(ITEMS, first, lake.log.append(first))
    lake.log.append([change("t", None, 20), put(3, 21, "three", "x"), put(2, 22, "half")])
    assert {key: row["label"] for key, row in lake.rows().items()} == {3: "three"}, "2 has no row to be filled from"


def test_a_table_that_no_row_was_merged_into_is_read_from_the_log(lake: Lake) -> None:
    lake.log.record(ITEMS)
    lake.log.append([put(1, 10, "one", "x"), put(2, 11, "two", "x"), change("d", '{"id":2}', 12)])
    assert {key: row["label"] for key, row in lake.rows().items()} == {1: "one"}


def test_a_column_that_the_table_does_not_have_yet_is_in_the_view(lake: Lake) -> None:
    lake.log.record(ITEMS)
    first = [put(1, 10, "one", "x"), put(2, 10, "two", "x")]
    lake.merge(ITEMS, first, lake.log.append(first))
    wider = lake.log.record(TableSchema(ITEMS.table, (*ITEMS.columns, Column("extra", INT4)), 2))
    row = change("u", '{"id":1}', 20, '{"id":1,"label":"new","extra":7}', ["big"], schema_id=wider.id)
    lake.log.append([put(2, 19, "old shape", "y"), row])
    rows = lake.rows()
    assert (rows[1]["label"], rows[1]["big"], rows[1]["extra"]) == ("new", "x", 7)
    assert (rows[2]["label"], rows[2]["extra"]) == ("old shape", None)


def test_a_table_that_is_held_back_is_read_from_where_it_is_held(lake: Lake) -> None:
    lake.log.record(ITEMS)
    first = [put(1, 10, "one", "x")]
    held = lake.log.append(first)
    lake.merge(ITEMS, first, held)
    lake.log.reader.commit(consumer_name("delta", ITEMS.table), held)
    passed_over = lake.log.append([put(1, 20, "two", "x"), put(2, 21, "other", "x")])
    lake.log.reader.commit("delta", passed_over)
    assert {key: row["label"] for key, row in lake.rows().items()} == {1: "two", 2: "other"}


def test_a_declared_rename_that_the_table_has_not_seen_yet_is_in_the_view(
    filled_log: FilledLog, settings_of: Callable[..., Settings], tmp_path: Path
) -> None:
    renamed = {"public.items": {"label": "name"}}
    lake = Lake(
        filled_log,
        settings_of(sinks=[{"kind": "delta", "path": str(tmp_path / "lake"), "renamed_columns": renamed}]),
    )
    filled_log.record(ITEMS)
    first = [put(1, 10, "one", "x"), put(2, 11, "two", "x")]
    lake.merge(ITEMS, first, filled_log.append(first))
    wanted = (ITEMS.columns[0], Column("name", TEXT), ITEMS.columns[2])
    newer = filled_log.record(TableSchema(ITEMS.table, wanted, 2))
    filled_log.append([change("u", '{"id":1}', 20, '{"id":1,"name":"new"}', ["big"], schema_id=newer.id)])
    rows = lake.rows()
    assert (rows[1]["name"], rows[1]["big"]) == ("new", "x")
    assert rows[2]["name"] == "two"


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "schema, keys", [(table("ints"), INTEGERS), (table("pairs", [("id", INT4), ("part", TEXT)]), PAIRS)],
    ids=["ints", "pairs"],
)  # fmt: skip
def test_at_every_moment_the_view_is_the_source(
    lake: Lake, seed: int, schema: TableSchema, keys: list[dict[str, str]]
) -> None:
    lake.log.record(schema)
    rng = random.Random(seed)
    history = History(schema, keys, rng)
    waiting: list[tuple[list[Row], int]] = []
    for _ in range(6):
        known = len(history.rows)
        history.write(8)
        for rows in cut(history.rows[known:], rng):
            waiting.append((rows, lake.log.append(rows)))
        for _ in range(rng.randint(0, len(waiting))):
            rows, end = waiting.pop(0)
            lake.merge(schema, rows, end if rng.random() < 0.7 else None)
        seen = lake.fresh(str(schema.table))
        found = in_source_order(schema, seen.layout, seen.arrow())
        assert found.equals(lake.sink.expected(schema, images(history.state())))


@pytest.mark.spark
def test_spark_sees_what_arrow_sees(spark: "SparkSession", lake: Lake) -> None:
    lake.log.record(ITEMS)
    first = [put(key, 10, f"row {key}", "x") for key in range(100)]
    lake.merge(ITEMS, first, lake.log.append(first))
    lake.log.append([put(1, 20, "new"), change("d", '{"id":2}', 21), put(200, 22, "more", "z")])
    seen = lake.fresh()
    frame = seen.spark(spark).orderBy("id")
    assert frame.toArrow().to_pylist() == seen.arrow().sort_by("id").to_pylist()
    assert frame.count() == 100


def test_a_view_of_history_is_refused(filled_log: FilledLog, settings_of: Callable[..., Settings]) -> None:
    filled_log.record(ITEMS)
    settings = settings_of(sinks=[{"kind": "delta", "path": "unused", "stored_as_scd_type": 2}])
    with pytest.raises(ConfigError, match="stored_as_scd_type"):
        fresh(settings, "public.items")
    with pytest.raises(ConfigError, match="not in the log"):
        fresh(settings_of(sinks=[{"kind": "delta", "path": "unused"}]), "public.nothing")


def test_the_command_writes_the_view_to_a_file(lake: Lake, run_program: RunProgram, tmp_path: Path) -> None:
    lake.log.record(ITEMS)
    first = [put(1, 10, "one", "x")]
    lake.merge(ITEMS, first, lake.log.append(first))
    lake.log.append([put(2, 20, "two", "x")])
    config = tmp_path / "millrace.yaml"
    path = str(lake.settings.sinks[0].path)  # type: ignore[attr-defined]
    config.write_text(yaml.safe_dump({"state": str(lake.settings.state), "sinks": [{"kind": "delta", "path": path}]}))
    output = tmp_path / "items.parquet"
    arguments = ["fresh", "public.items", "--config", str(config), "--output", str(output), "--json"]
    done = run_program("-m", "cdc.cli.main", *arguments)
    assert done.wait(60) == 0, done.said()
    said = json.loads(done.output.read_text())
    assert (said["rows"], said["changed"]) == (2, 1)
    rows: pa.Table = pq.read_table(output)
    assert set(rows["id"].to_pylist()) == {1, 2}


def test_the_view_of_a_shaped_table_is_shaped(
    filled_log: FilledLog, settings_of: Callable[..., Settings], tmp_path: Path
) -> None:
    """Also what left the filter in the log, before the table has it."""
    shape = {"where": "label <> 'gone'", "rename": {"id": "number"}, "compute": {"size": "length(big)"}, "target": "it"}
    settings = settings_of(sinks=[{"kind": "delta", "path": str(tmp_path / "lake"), "shape": {"public.items": shape}}])
    filled_log.record(ITEMS)
    sink = open_sink(settings.sinks[0], SinkContext(settings.state))
    first = [put(1, 10, "one", "abc"), put(2, 11, "two", "abcd")]
    end = filled_log.append(first)
    sink.prepare(ITEMS)
    sink.apply(batch(ITEMS, first))
    filled_log.reader.commit("delta", end)
    filled_log.append([put(1, 20, "new"), put(2, 21, "gone"), put(3, 22, "three", "x")])
    seen = fresh(settings, "public.items").arrow().select(["number", "label", "size"]).to_pylist()
    assert sorted(map(tuple, (row.values() for row in seen))) == [(1, "new", 3), (3, "three", 1)]
    assert (tmp_path / "lake" / "it").is_dir()
