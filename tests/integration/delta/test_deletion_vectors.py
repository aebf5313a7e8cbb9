"""Scattered changes of a large table: old rows are marked by deletion vectors, and every reader sees the same rows."""

import random
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import pyarrow as pa
import pytest

from cdc.errors import Rejected
from cdc.model import Column, TableId, TableSchema
from cdc.ports import Batch
from sinks.delta import sink as delta
from sinks.delta.deletion_vectors import new_files
from sinks.delta.deletion_vectors import writer as vector_writer
from sinks.delta.files.storage import LocalFolder
from sinks.delta.files.transaction_log import LiveFiles
from sinks.delta.rows import rewrite
from sinks.delta.write import writer
from tests import fix_delta
from tests.fix_delta import OpenLake, ends_as_the_source, mark_everywhere, stored_table
from tests.scenes.histories import INT4, INTEGERS, ODD_TEXTS, PAIRS, TEXT, batch, change, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ITEMS = TableSchema(
    TableId("public", "items"), (Column("id", INT4, key=True), Column("label", TEXT), Column("big", TEXT)), 1
)


@pytest.fixture(autouse=True)
def marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sink marks wherever it can, in files of a few hundred rows."""
    mark_everywhere(monkeypatch)
    monkeypatch.setattr(writer, "LEAST_FILE", 2000)


def numbers(ids: range, version: int, label: str = "row") -> Batch:
    return fix_delta.numbers(ITEMS, ids, version, label, big="big")


def loaded(open_lake: OpenLake, **settings: Any) -> delta.DeltaSink:
    sink = open_lake(ITEMS, **settings)
    for start in range(0, 5000, 500):
        sink.apply(numbers(range(start, start + 500), 5))
    return sink


def scanned(lake: Path) -> list[Any]:
    rows = pa.RecordBatchReader.from_stream(stored_table(lake).scan(columns=["id", "label"])).read_all()
    return sorted(rows.to_pylist(), key=lambda row: row["id"])


def last_actions(lake: Path) -> dict[str, list[dict[str, Any]]]:
    commit = lake / "public.items" / "_delta_log" / f"{stored_table(lake).version():020}.json"
    found: dict[str, list[dict[str, Any]]] = {}
    for line in commit.read_bytes().split(b"\n"):
        for kind, action in orjson.loads(line).items():
            found.setdefault(kind, []).append(action)
    return found


def test_scattered_changes_copy_no_row(lake: Path, open_lake: OpenLake) -> None:
    sink = loaded(open_lake)
    sink.apply(numbers(range(0, 5000, 250), 6, "new"))
    done = last_actions(lake)
    added = [add for add in done["add"] if "deletionVector" not in add]
    assert [orjson.loads(add["stats"])["numRecords"] for add in added] == [20]
    assert sum(add["deletionVector"]["cardinality"] for add in done["add"] if "deletionVector" in add) == 20
    rows = scanned(lake)
    assert len(rows) == 5000
    assert [row["id"] for row in rows if row["label"].startswith("new")] == list(range(0, 5000, 250))


def test_a_batch_marked_again_makes_no_commit(lake: Path, open_lake: OpenLake) -> None:
    sink = loaded(open_lake)
    given = numbers(range(0, 5000, 250), 6, "new")
    sink.apply(given)
    version = stored_table(lake).version()
    sink.apply(given)
    again = open_lake(ITEMS)
    again.apply(given)
    assert stored_table(lake).version() == version


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "schema, keys",
    [
        (table("ints"), INTEGERS),
        (table("odd_texts", [("id", TEXT)]), ODD_TEXTS),
        (table("pairs", [("id", INT4), ("part", TEXT)]), PAIRS),
    ],
    ids=["ints", "texts", "pairs"],
)
def test_marks_end_as_the_rewrite_does(
    open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch, seed: int, schema: TableSchema, keys: list[dict[str, str]]
) -> None:
    monkeypatch.setattr(new_files, "SMALL_FILES", 4)
    rng = random.Random(f"{seed}-{schema.table}")
    ends_as_the_source(open_lake(schema, as_text={str(schema.table): ("at",)}), schema, rng, keys)


def test_a_partial_row_keeps_its_large_column_and_one_without_its_row_is_rejected(open_lake: OpenLake) -> None:
    sink = loaded(open_lake)
    partial = [
        change("u", f'{{"id":{one}}}', 7, f'{{"id":{one},"label":"short"}}', ["big"]) for one in (7, 4321, 99_999)
    ]
    with pytest.raises(Rejected) as caught:
        sink.apply(batch(ITEMS, partial))
    assert [item.key for item in caught.value.items] == ['{"id":99999}']
    rows = {row["id"]: row for row in sink.stored(ITEMS).to_pylist()}
    assert (rows[7]["label"], rows[7]["big"]) == ("short", "big 7")
    assert rows[4321]["big"] == "big 4321"


def test_an_older_change_never_brings_a_deleted_row_back(open_lake: OpenLake) -> None:
    sink = loaded(open_lake)
    sink.apply(batch(ITEMS, [change("d", '{"id":7}', 9), change("d", '{"id":4000}', 9)]))
    sink.apply(numbers(range(0, 5000, 1), 8, "late"))
    assert set(range(5000)) - set(sink.stored(ITEMS)["id"].to_pylist()) == {7, 4000}


def test_small_files_are_taken_in_so_that_their_number_stays_bounded(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(new_files, "SMALL_FILES", 6)
    monkeypatch.setattr(writer, "LEAST_FILE", 20_000)
    sink = loaded(open_lake)
    files = len(stored_table(lake).file_uris())
    for version in range(6, 36):
        sink.apply(numbers(range(version, 5000, 500), version, f"v{version}"))
        assert len(stored_table(lake).file_uris()) <= files + 8
    newest = {one: version for version in range(6, 36) for one in range(version, 5000, 500)}
    expected = [f"v{newest[one]} {one}" if one in newest else f"row {one}" for one in range(5000)]
    assert [row["label"] for row in scanned(lake)] == expected


def test_maintenance_folds_the_marks_in_and_changes_no_row(lake: Path, open_lake: OpenLake) -> None:
    sink = loaded(open_lake)
    for version in range(6, 26):
        sink.apply(numbers(range(version, 5000, 100), version, f"v{version}"))
    before = sink.stored(ITEMS)
    cared = sink.maintain(ITEMS)
    assert cared.rewritten > 0 and cared.yielded == 0
    assert sink.stored(ITEMS).equals(before)
    live = LiveFiles(LocalFolder(lake / "public.items"))
    assert live.follow(stored_table(lake).version())
    assert not [add for add in live.adds.values() if "deletionVector" in add]
    assert stored_table(lake).protocol().reader_features == ["deletionVectors"], "nothing more is asked of readers"
    sink.apply(numbers(range(0, 5000, 250), 50, "after"))
    assert any("deletionVector" in add for add in last_actions(lake)["add"])
    assert sink.stored(ITEMS).num_rows == 5000


def test_marks_survive_a_checkpoint_and_a_new_process(lake: Path, open_lake: OpenLake) -> None:
    sink = loaded(open_lake)
    sink.apply(numbers(range(0, 5000, 250), 6, "new"))
    stored_table(lake).create_checkpoint()
    again = open_lake(ITEMS)
    again.apply(numbers(range(0, 5000, 125), 7, "newer"))
    rows = scanned(lake)
    assert len(rows) == 5000
    assert sum(row["label"].startswith("newer") for row in rows) == 40
    assert stored_table(lake).transaction_version("millrace.lsn") == 8


def test_a_writer_between_look_and_commit_is_noticed(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, rival = loaded(open_lake), open_lake()
    real = rewrite.decide
    overtaken: list[int] = []

    def decide(*arguments: Any) -> Any:
        if not overtaken:
            overtaken.append(1)
            rival.apply(numbers(range(0, 5000, 250), 20, "rival"))
        return real(*arguments)

    monkeypatch.setattr(vector_writer, "decide", decide)
    sink.apply(numbers(range(0, 5000, 250), 10, "late"))
    rows = scanned(lake)
    assert len(rows) == 5000
    assert sum(row["label"].startswith("rival") for row in rows) == 20


def test_a_table_grows_a_column_after_its_rows_were_marked(open_lake: OpenLake) -> None:
    sink = loaded(open_lake)
    sink.apply(numbers(range(0, 5000, 250), 6, "new"))
    wider = TableSchema(ITEMS.table, (*ITEMS.columns, Column("extra", INT4)), 2)
    sink.prepare(wider)
    rows = [
        change("u", f'{{"id":{one}}}', 7, f'{{"id":{one},"label":"x","extra":{one}}}', ["big"])
        for one in range(0, 5000, 250)
    ]
    sink.apply(batch(wider, rows))
    stored = {row["id"]: row for row in sink.stored(wider).to_pylist()}
    assert stored[250] == {"id": 250, "label": "x", "big": "big 250", "extra": 250}
    assert stored[251]["extra"] is None


def test_a_table_with_a_feature_that_is_not_known_here_is_not_marked(lake: Path, open_lake: OpenLake) -> None:
    """Somebody keeps a change feed of the table: a commit of ours would leave the marked rows out of it."""
    sink = loaded(open_lake)
    stored_table(lake).alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    sink.apply(numbers(range(0, 5000, 250), 6, "new"))
    assert not any("deletionVector" in add for add in last_actions(lake)["add"])
    assert sum(row["label"].startswith("new") for row in scanned(lake)) == 20


def test_without_deletion_vectors_files_are_copied(lake: Path, open_lake: OpenLake) -> None:
    sink = loaded(open_lake, deletion_vectors=False)
    sink.apply(numbers(range(0, 5000, 250), 6, "new"))
    assert not any("deletionVector" in add for add in last_actions(lake)["add"])
    assert stored_table(lake).to_pyarrow_table().num_rows == 5000


@pytest.mark.spark
def test_spark_reads_marked_tables_and_its_own_marks_are_read_here(
    spark: "SparkSession", lake: Path, open_lake: OpenLake
) -> None:
    sink = loaded(open_lake)
    sink.apply(numbers(range(0, 5000, 3), 6, "new"))
    path = str(lake / "public.items")
    frame = spark.read.format("delta").load(path)
    assert frame.count() == 5000
    assert frame.where("label like 'new%'").count() == len(range(0, 5000, 3))
    spark.sql(f"DELETE FROM delta.`{path}` WHERE id = 4998")
    sink.apply(numbers(range(1, 5000, 3), 7, "newer"))
    assert spark.read.format("delta").load(path).count() == 4999
    assert sink.stored(ITEMS).num_rows == 4999


def test_more_marks_in_a_file_than_an_array_holds_are_read_back_as_they_were_written(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Arrays hold up to 4096 rows of 65536; beyond that a container is a bit set."""
    monkeypatch.setattr(writer, "LEAST_FILE", writer.MEGABYTE)
    sink = open_lake(ITEMS)
    sink.apply(numbers(range(12_000), 5))
    sink.apply(numbers(range(0, 12_000, 2), 6, "new"))
    marked = [add["deletionVector"]["cardinality"] for add in last_actions(lake)["add"] if "deletionVector" in add]
    assert marked == [6000]
    assert [row["label"] for row in scanned(lake)] == [f"{'row' if one % 2 else 'new'} {one}" for one in range(12_000)]
