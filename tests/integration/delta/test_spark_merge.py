"""The Delta sink with Spark: tables that both engines read, and batches that Spark's MERGE writes."""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from cdc.errors import Rejected
from cdc.model import Column, PgType, TableId, TableSchema
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.settings import DeltaSettings
from sinks.delta.write import writer
from tests.fix_delta import numbers
from tests.scenes.histories import (
    FLOAT8,
    INT4,
    INT8,
    INTEGERS,
    NUMERIC,
    TEXT,
    History,
    batch,
    change,
    cut,
    images,
    table,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
Open = Callable[..., delta.DeltaSink]


@pytest.fixture
def open_sink(spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """A sink that takes every batch beyond appends to Spark."""
    monkeypatch.setattr(writer, "REGION_LIMIT", -1)
    monkeypatch.setattr(writer, "SPARK_LIMIT", -1)

    def opened() -> delta.DeltaSink:
        names = ("items", "ints", "other")
        as_text = {f"public.{name}": ("at",) for name in names}
        settings = DeltaSettings.model_validate({"path": str(tmp_path), "as_text": as_text})
        return delta.open_sink(settings, SinkContext(tmp_path, lambda: spark))

    return opened


def test_spark_merges_as_the_rewrite_does(open_sink: Open, tmp_path: Path) -> None:
    schema = table("ints")
    rng = random.Random(7)
    history = History(schema, INTEGERS, rng).write(40)
    sink = open_sink()
    sink.prepare(schema)
    batches = [batch(schema, rows) for rows in cut(history.rows, rng, size=60)]
    for current in batches:
        sink.apply(current)
    sink.apply(batches[0])
    assert sink.stored(schema).equals(sink.expected(schema, images(history.state())))
    operations = [commit["engineInfo"] for commit in DeltaTable(tmp_path / "public.ints").history()]
    assert any("Apache-Spark" in engine for engine in operations)


def test_spark_reads_every_type_and_the_filter_of_the_readers(
    spark: "SparkSession", open_sink: Open, tmp_path: Path
) -> None:
    columns = (
        Column("id", INT8, key=True),
        Column("small", PgType(21, "int2")),
        Column("amount", NUMERIC, ((38 << 16) | 10) + 4),
        Column("any amount", NUMERIC),
        Column("day", PgType(1082, "date")),
        Column("clock", PgType(1114, "timestamp")),
        Column("instant", PgType(1184, "timestamptz")),
        Column("raw", PgType(17, "bytea")),
        Column("ratio", FLOAT8),
    )
    schema = TableSchema(TableId("public", "typed"), columns, 1)
    digits = "-1234567890123456789012345678.0123456789"
    image = (
        f'{{"id":9007199254740993,"small":-7,"amount":{digits},"any amount":1.10,"day":"1500-02-28",'
        '"clock":"1900-01-01T00:00:00.000001","instant":"2024-01-31T10:00:00.5Z","raw":"aGk=","ratio":"NaN"}'
    )
    sink = open_sink()
    sink.prepare(schema)
    sink.apply(batch(schema, [change("u", '{"id":9007199254740993}', 5, image), change("d", '{"id":2}', 6)]))
    live = spark.read.format("delta").load(str(tmp_path / "public.typed")).where("NOT _millrace_deleted")
    text = [f"CAST(`{column.name}` AS STRING)" for column in columns]
    assert list(live.selectExpr(*text).collect()[0]) == [
        "9007199254740993", "-7", digits, "1.10", "1500-02-28",
        "1900-01-01 00:00:00.000001", "2024-01-31 10:00:00.5", "hi", "NaN",
    ]  # fmt: skip
    assert [kind for _, kind in live.dtypes][:7] == [
        "bigint", "smallint", "decimal(38,10)", "string", "date", "timestamp_ntz", "timestamp",
    ]  # fmt: skip


def test_two_tables_in_one_session_keep_their_commits_apart(
    spark: "SparkSession", open_sink: Open, tmp_path: Path
) -> None:
    """Commit settings are settings of a session: none of ours may reach another query, and none may skip a batch."""
    columns = (Column("id", INT4, key=True), Column("label", TEXT))
    tables = [TableSchema(TableId("public", name), columns, 1) for name in ("items", "other")]
    sink = open_sink()
    for version in (10, 20):
        for offset, schema in enumerate(tables):
            if version == 10:
                sink.prepare(schema)
            row = change("u", '{"id":1}', version + offset, f'{{"id":1,"label":"v{version}"}}')
            sink.apply(batch(schema, [row]))
    for offset, schema in enumerate(tables):
        assert sink.stored(schema).to_pylist() == [{"id": 1, "label": "v20"}]
        newest = DeltaTable(tmp_path / f"public.{schema.table.name}").history(1)[0]
        assert newest["userMetadata"] == f"millrace.lsn={21 + offset}"
    assert spark.conf.get("spark.databricks.delta.commitInfo.userMetadata", "unset") == "unset"
    assert spark.conf.get("spark.databricks.delta.write.txnAppId", "unset") == "unset"


def test_two_queries_that_merge_in_one_session_at_once_skip_no_batch(
    spark: "SparkSession", open_sink: Open, tmp_path: Path
) -> None:
    """Each has batches of its own numbering; a setting shared by the session would have Delta skip the other's."""
    columns = (Column("id", INT4, key=True), Column("label", TEXT))

    def run(name: str) -> list[object]:
        schema = TableSchema(TableId("public", name), columns, 1)
        sink = open_sink()
        sink.prepare(schema)
        for number in range(3):
            row = change("u", '{"id":1}', 10 + number, f'{{"id":1,"label":"{name} {number}"}}', table=f"public.{name}")
            new = change("u", f'{{"id":{5 + number}}}', 10 + number, f'{{"id":{5 + number},"label":"n"}}')
            sink.apply(batch(schema, [row, new]))
        return sink.stored(schema)["label"].to_pylist()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, ("items", "other"))
    assert first == ["items 2", "n", "n", "n"]
    assert second == ["other 2", "n", "n", "n"]


def test_with_engine_spark_every_batch_is_a_merge_with_deletion_vectors(spark: "SparkSession", tmp_path: Path) -> None:
    settings = DeltaSettings.model_validate({"path": str(tmp_path), "engine": "spark"})
    sink = delta.open_sink(settings, SinkContext(tmp_path, lambda: spark))
    columns = (Column("id", INT4, key=True), Column("label", TEXT), Column("big", TEXT))
    schema = TableSchema(TableId("public", "items"), columns, 1)
    sink.prepare(schema)
    sink.apply(numbers(schema, range(50), 10, "old", big="big"))
    rows = [change("u", f'{{"id":{one}}}', 20, f'{{"id":{one},"label":"new"}}', ["big"]) for one in (3, 4, 77)]
    with pytest.raises(Rejected, match="1 change"):
        sink.apply(batch(schema, [*rows, change("d", '{"id":5}', 21)]))
    stored = {row["id"]: (row["label"], row["big"]) for row in sink.stored(schema).to_pylist()}
    assert stored[3] == ("new", "big 3") and stored[6] == ("old 6", "big 6") and 5 not in stored and len(stored) == 49
    table = DeltaTable(tmp_path / "public.items")
    assert [one["operation"] for one in table.history(2)] == ["MERGE", "MERGE"]
    vectors = list((tmp_path / "public.items").glob("deletion_vector_*.bin"))
    assert vectors and sink.plan(schema) == b""
    sink.maintain(schema)
    assert all(path.exists() for path in vectors) and len(sink.stored(schema)) == 49
