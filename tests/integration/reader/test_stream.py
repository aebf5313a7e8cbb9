"""Streams and batch reads over the segment log: what they give, where they begin and end, what stops them."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cdc.log
from cdc.log.segments.log import SegmentWriter
from cdc.model import format_lsn
from pyspark_millrace.source import MillraceSource
from tests.fix_capture import Rig
from tests.fix_processes import RunProgram, wait_until
from tests.scenes.table_changes import LARGE, ORDERS, ChangeReader, error_of, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

pytestmark = pytest.mark.spark
PAGE = Path(__file__).parents[3] / "docs" / "spark-reader.md"


@pytest.fixture
def reader(spark: "SparkSession", rig: Rig) -> ChangeReader:
    """Four orders in the log, from a snapshot."""
    rows = f"insert into orders select g, 'new', g, {LARGE} from generate_series(1, 4) g"
    rig.capture_tables(*ORDERS, rows, snapshot="initial")
    rig.begin()
    rig.follow()
    return ChangeReader(spark, rig)


def trim(rig: Rig, *, force: bool = False) -> None:
    """Retention, as if everything were old."""
    log = cdc.log.open_writer(rig.settings)
    assert isinstance(log, SegmentWriter)
    log.trim(hours=1e-9, gigabytes=100, force=force)
    log.close()


def test_the_example_of_the_documentation_runs(reader: ChangeReader, tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for name in ("millrace.yaml", "orders-changes.checkpoint", "orders-changes"):
        example = example.replace(f'"{name}"', repr(str(tmp_path / name)))
    exec(compile(example, str(PAGE), "exec"), {"spark": reader.spark})
    written = reader.spark.read.format("delta").load(str(tmp_path / "orders-changes"))
    assert [row[1] for row in rows_of(written, "id")] == [1, 2, 3, 4]


def test_a_read_between_two_points_has_what_committed_between_them(reader: ChangeReader, rig: Rig) -> None:
    rig.follow("update orders set status = 'a' where id = 1")
    low, moment = rig.now(), rig.ask("select clock_timestamp()::text")
    with rig.following() as following:  # several transactions may be one entry of the log
        rig.database.execute(*(f"update orders set status = 'b{number}' where id = 2" for number in range(5)))
        high = rig.now()
        rig.database.execute("update orders set status = 'c' where id = 3")
        following.reaches(rig.now())
    between = [("update_postimage", f"b{number}") for number in range(5)]
    assert rows_of(reader.batch(begin=format_lsn(low), until=format_lsn(high)), "status") == between
    assert rows_of(reader.batch(begin=moment), "status") == [*between, ("update_postimage", "c")]
    assert rows_of(reader.batch(until=moment), "status")[-1] == ("update_postimage", "a")
    assert reader.batch(begin="now").count() == 0


def test_a_query_that_runs_gets_changes_and_ends_at_a_new_column_and_goes_on_with_it(
    reader: ChangeReader, rig: Rig, tmp_path: Path
) -> None:
    writer = (
        reader.stream(begin=format_lsn(rig.now()))
        .writeStream.format("delta")
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
    )
    query: StreamingQuery = writer.start(str(tmp_path / "table"))
    try:
        wait_until(lambda: query.recentProgress, 60, "the query to have begun")
        rig.follow("update orders set status = 'seen' where id = 1")
        wait_until(lambda: (tmp_path / "table").exists() and reader.appended(tmp_path).count(), 60, "the update")
        rig.follow("alter table orders add column more text", "update orders set more = 'x' where id = 2")
        wait_until(lambda: not query.isActive, 60, "the query to end")
    finally:
        query.stop()
    said = "Table public.orders has changed since the query started: column more was added. Start the query again"
    assert said in str(query.exception())

    reader.append_new(tmp_path)
    rig.follow("alter table orders drop column amount", "update orders set note = 'y' where id = 3")
    reader.append_new(tmp_path)
    assert rows_of(reader.appended(tmp_path), "id", "status", "more", "_missing") == [
        ("update_postimage", 1, "seen", None, ["note"]),
        ("update_postimage", 2, "new", "x", ["note"]),
        ("update_postimage", 3, "new", None, []),
    ]
    assert "amount" not in reader.batch().columns
    first = rows_of(reader.batch(), "_missing")[0]
    assert first == ("insert", ["more"])


def test_what_cannot_be_a_row_stops_a_read_until_an_option_says_what_to_do(reader: ChangeReader, rig: Rig) -> None:
    rig.follow(
        "alter table orders add column at timestamptz", "insert into orders values (5, 'new', 1, '', 'infinity')"
    )
    assert "column at: value does not fit timestamp" in error_of(reader.batch().count)
    assert rows_of(reader.batch(mode="PERMISSIVE"), "id", "_missing")[-1] == ("insert", 5, ["at"])
    assert reader.batch(columns="id,status").count() == 5

    rig.follow("truncate orders", "insert into orders values (6)")
    chosen = {"columns": "id", "mode": "PERMISSIVE"}
    assert "Table public.orders, commit 0/" in (said := error_of(reader.batch(**chosen).count))
    assert "it was truncated. Set the option 'truncates' to emit or skip" in said
    assert rows_of(reader.batch(truncates="skip", **chosen), "id")[-2:] == [("insert", 5), ("insert", 6)]
    emitted = rows_of(reader.batch(truncates="emit", **chosen), "id", "_missing")
    assert emitted[-2:] == [("truncate", None, ["id"]), ("insert", 6, [])]

    rig.follow("update orders set status = 'paid' where id = 6")
    lacking = {"preimages": "required", "truncates": "skip", **chosen}
    assert "alter table public.orders replica identity full" in error_of(reader.batch(**lacking).count)


def test_retention_that_passed_a_checkpoint_stops_the_query_and_a_consumer_prevents_it(
    reader: ChangeReader, rig: Rig, tmp_path: Path
) -> None:
    reader.append_new(tmp_path)
    reader.append_new(tmp_path / "held", consumer="report")
    rig.follow("update orders set status = 'paid' where id = 1")
    rig.follow("update orders set status = 'sent' where id = 1")
    start = reader.log.start()
    trim(rig)
    assert reader.log.start() == start
    reader.append_new(tmp_path / "held", consumer="report")
    assert [row[1] for row in rows_of(reader.appended(tmp_path / "held"), "status")][-2:] == ["paid", "sent"]

    trim(rig, force=True)
    rig.follow("update orders set status = 'lost' where id = 1")
    said = error_of(lambda: reader.append_new(tmp_path))
    assert "Table public.orders cannot be read from offset " in said
    assert "Retention removed the changes after offset" in said
    assert "option 'consumer', or raise log.retention_hours" in said
    assert rows_of(reader.batch(), "status") == [("update_postimage", "lost")]
    assert "retention removed the changes up to 0/" in error_of(lambda: reader.batch(begin="0/1").count())


def test_a_driver_that_is_killed_is_followed_by_one_that_writes_the_rest_once(
    reader: ChangeReader, rig: Rig, run_program: RunProgram, tmp_path: Path
) -> None:
    for number in range(12):  # each an entry of the log of its own
        rig.follow(f"update orders set amount = {number}, status = 'at {number}' where id <= 2")
    driver = run_program("-m", "tests.integration.reader.driver", str(reader.config), str(tmp_path))
    commits = tmp_path / "table" / "_delta_log"
    wait_until(lambda: len([*commits.glob("*.json")]) >= 3 or not driver.running(), 120, "three micro-batches")
    assert driver.running(), driver.said()[-4000:]
    driver.kill()
    written = reader.appended(tmp_path).count()
    reader.append_new(tmp_path)
    assert 4 <= written < 28
    found = rows_of(reader.appended(tmp_path), "id", "status", "_row_version")
    assert found == rows_of(reader.batch(), "id", "status", "_row_version")
    assert len(found) == len(set(found)) == 28


def test_tasks_of_a_read_get_neither_the_password_of_the_source_nor_an_open_log(reader: ChangeReader) -> None:
    from pyspark.serializers import CloudPickleSerializer

    source = MillraceSource(dict(reader.options))
    schema = source.schema()
    password = str(reader.password).encode()
    assert password in reader.config.read_bytes()
    for found in (source, source.reader(schema), source.streamReader(schema)):
        assert password not in CloudPickleSerializer().dumps(found)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"table": "public.no"},
            r"Table public.no is not in the log of .*millrace.yaml. Its tables: public.orders",
        ),
        ({"pipeline": "/nowhere/millrace.yaml"}, "/nowhere/millrace.yaml does not exist"),
        ({"consumer": "lake"}, "'consumer': 'lake' is the name of a position of sink 'lake'"),
        ({"until": "now"}, "'until' of the format millrace is not allowed here"),
        ({"columns": "id,nothing"}, "table public.orders has no column 'nothing'"),
    ],
)
def test_a_stream_that_cannot_be_is_refused_before_it_begins(
    reader: ChangeReader, tmp_path: Path, options: dict[str, str], said: str
) -> None:
    reader.add_sink("lake")

    def start() -> None:
        reader.append_new(tmp_path, **options)

    assert re.search(said, error_of(start))
