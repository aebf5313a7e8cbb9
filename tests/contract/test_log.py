"""What every log promises, whatever it is made of: cdc.ports.LogWriter and LogReader.

Each test runs against every kind in tests/contract/logs.py.
"""

import json
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import cdc.log
from cdc.errors import LogCorrupt, LogError, LogFenced
from cdc.model import LOG_SCHEMA, PROGRESS_TABLE, ZERO_LSN, Column, Entry, Lsn, PgType, TableId, TableSchema
from cdc.ports import LogReader, LogWriter
from cdc.service.apply.direct_reader import DirectReader
from sinks.apply.batch_buffer import BatchBuffer
from tests.contract.logs import (
    DAY,
    LOGS,
    READ_ONLY,
    Bench,
    commits,
    entry,
    history,
    open_reader,
    open_writer,
    read_all,
    rows,
)
from tests.fix_processes import RunProgram, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


@pytest.fixture(params=sorted(LOGS))
def bench(request: pytest.FixtureRequest) -> Bench:
    return LOGS[request.param](request)


@pytest.fixture
def writer(bench: Bench) -> Iterator[LogWriter]:
    opened = open_writer(bench)
    yield opened
    with suppress(LogError):
        opened.close()


@pytest.fixture
def reader(bench: Bench, writer: LogWriter) -> LogReader:
    return open_reader(bench)


def test_every_kind_of_log_is_under_this_suite() -> None:
    assert {name.partition(" ")[0] for name in LOGS} == set(cdc.log.settings_kinds()) - READ_ONLY


# Appending and reading


def test_what_is_appended_is_read_back_in_order(writer: LogWriter, reader: LogReader) -> None:
    for number in range(1, 6):
        writer.append(entry(number))
    assert read_all(reader).equals(history(1, 2, 3, 4, 5))


def test_an_entry_is_visible_to_an_open_reader_as_soon_as_append_returns(writer: LogWriter, reader: LogReader) -> None:
    for number in range(1, 20):
        writer.append(entry(number))
        assert reader.head()[1] == entry(number).end


def test_slices_say_where_they_end(writer: LogWriter, reader: LogReader) -> None:
    for number in range(1, 4):
        writer.append(entry(number))
    slices = list(reader.read(reader.start()))
    assert [piece.end for piece in slices] == [110, 210, 310]
    assert slices[-1].offset == reader.head()[0]
    assert commits(pa.concat_tables([piece.rows for piece in reader.read(slices[0].offset)])) == [200] * 3 + [300] * 3
    assert [piece.end for piece in reader.read(slices[0].offset, slices[1].offset)] == [210]


def test_a_direct_reader_gives_every_change_and_ends_at_an_offset_of_the_log(
    writer: LogWriter, reader: LogReader
) -> None:
    number, text = PgType(23, "int4"), PgType(25, "text")
    writer.schemas.record(TableSchema(TableId("public", "items"), (Column("id", number, key=True), Column("n", text))))
    writer.append(entry(1))
    buffer = BatchBuffer(ZERO_LSN)
    buffer.add_member("store")
    direct = DirectReader(reader, buffer, reader.start(), ZERO_LSN)
    taken = buffer.take("store")
    for later in range(2, 6):
        writer.append(entry(later))
    while taken[-1].reached < entry(5).end:
        taken += buffer.take("store")
    assert direct.end() == entry(5).end
    assert taken[-1].offset == direct.position[0] == reader.head()[0]
    keys = {
        row["key"]: row["version"] for folded in taken for batch in folded.batches for row in batch.rows.to_pylist()
    }
    assert keys == {row["key"]: row["version"] for row in history(1, 2, 3, 4, 5).to_pylist()}


def test_an_empty_log_reads_as_nothing(writer: LogWriter, reader: LogReader) -> None:
    assert writer.progress().end == ZERO_LSN
    assert list(reader.read(reader.start())) == []
    assert reader.head() == (reader.start(), ZERO_LSN)


def test_an_entry_without_rows_moves_the_position(writer: LogWriter, reader: LogReader) -> None:
    writer.append(Entry(LOG_SCHEMA.empty_table(), Lsn(77)))
    assert writer.progress().end == 77
    assert reader.head()[1] == 77


def test_every_kind_of_value_survives(writer: LogWriter, reader: LogReader) -> None:
    odd = pa.Table.from_pylist(
        [
            {
                "table": 'public."a.b"',
                "op": "u",
                "key": '{"id":"é\\u0000 \\" 𝄞"}',
                "after": '{"id":1,"n":12345678901234567890.000}',
                "before": None,
                "unchanged": ["big", "größe"],
                "version": 2**63 - 1,
                "commit_lsn": 2**63 - 2,
                "ordinal": 0,
                "xid": 2**32 - 1,
                "commit_ts": DAY,
                "schema_id": 7,
            },
            {
                "table": "public.t",
                "op": "t",
                "version": 1,
                "commit_lsn": 2,
                "ordinal": 1,
                "xid": 3,
                "commit_ts": DAY,
                "schema_id": 1,
            },
        ],
        LOG_SCHEMA,
    )
    writer.append(Entry(odd, Lsn(2**63 - 1)))
    assert read_all(reader).to_pylist() == odd.to_pylist()


# Repeats, marks and restarts


def test_an_entry_that_was_appended_before_is_ignored(writer: LogWriter, reader: LogReader) -> None:
    for number in (1, 2, 1, 2, 3):
        writer.append(entry(number))
    assert read_all(reader).equals(history(1, 2, 3))


def test_a_reopened_log_goes_on_where_it_was(bench: Bench, writer: LogWriter, reader: LogReader) -> None:
    writer.append(entry(1, marks={"chunk": "a"}))
    writer.close()
    again = open_writer(bench)
    try:
        assert again.progress().end == 110
        assert again.progress().marks == {"chunk": "a"}
        again.append(entry(1))
        again.append(entry(2))
    finally:
        again.close()
    assert read_all(reader).equals(history(1, 2))


def test_marks_are_merged_and_the_newest_wins(bench: Bench, writer: LogWriter) -> None:
    writer.append(entry(1, marks={"a": "1", "b": "1"}))
    writer.append(entry(2))
    writer.append(entry(3, marks={"b": "2"}))
    assert writer.progress().marks == {"a": "1", "b": "2"}
    writer.close()
    again = open_writer(bench)
    again.close()
    assert again.progress().marks == {"a": "1", "b": "2"}


def test_chunks_that_share_an_lsn_are_told_apart_by_their_marks(writer: LogWriter, reader: LogReader) -> None:
    for chunk in ("1", "2", "2", "3"):
        writer.append(Entry(rows(99, int(chunk), op="r"), Lsn(100), {"chunk": chunk}))
    assert read_all(reader)["key"].to_pylist() == ['{"id": 1}', '{"id": 2}', '{"id": 3}']
    assert writer.progress().end == 100


def test_the_position_never_goes_back(writer: LogWriter, reader: LogReader) -> None:
    writer.append(entry(5))
    writer.append(Entry(rows(100, 1, op="r"), Lsn(110), {"late": "chunk"}))
    assert writer.progress().end == 510
    assert reader.head()[1] == 510
    assert commits(read_all(reader)) == [500] * 3 + [100]


# Crashes


def test_a_writer_killed_anywhere_loses_and_doubles_nothing(bench: Bench, run_program: RunProgram) -> None:
    marked: set[str] = set()
    for index, point in enumerate(bench.fail_points):
        first, last = 5 * index + 1, 5 * index + 5
        spooled = [first + 1, first + 2] if "spool" in point else [first + 2]
        story = [json.dumps(word) for word in (bench.data(), first, last, spooled)]
        child = run_program("-m", "tests.contract.log_child", *story, env={"MILLRACE_FAIL": f"{point}:kill@2"})
        assert child.wait() == -signal.SIGKILL, f"{point}: {child.said()}"
        acknowledged = [int(word) for word in child.output.read_text().split()[1:]]
        assert acknowledged
        kept = commits(read_all(open_reader(bench)))
        assert {100 * number for number in acknowledged} <= set(kept), point
        again = run_program("-m", "tests.contract.log_child", *story)
        assert again.wait() == 0, again.said()
        assert read_all(open_reader(bench)).equals(history(*range(1, last + 1))), point
        writer = open_writer(bench)
        writer.close()
        marked |= {str(number) for number in range(first, last + 1) if number % 2 and number not in spooled}
        assert set(writer.progress().marks) == marked, point


# Large transactions


def test_a_spooled_transaction_appears_at_once_and_whole(writer: LogWriter, reader: LogReader) -> None:
    writer.append(entry(1))
    spool = writer.spool()
    for start in range(0, 30, 10):
        spool.write(rows(300, *range(start, start + 10)))
    assert commits(read_all(reader)) == [100] * 3
    writer.append(entry(2))
    spool.publish(Lsn(310))
    assert commits(read_all(reader)) == [100] * 3 + [200] * 3 + [300] * 30
    assert writer.progress().end == 310
    assert reader.head()[1] == 310


def test_a_discarded_spool_leaves_nothing(bench: Bench, writer: LogWriter, reader: LogReader) -> None:
    spool = writer.spool()
    spool.write(rows(300, 1, 2, 3))
    spool.discard()
    writer.append(entry(4))
    writer.close()
    open_writer(bench).close()
    assert commits(read_all(reader)) == [400] * 3


def test_a_spool_that_was_published_before_is_ignored(writer: LogWriter, reader: LogReader) -> None:
    for _ in range(2):
        spool = writer.spool()
        spool.write(rows(300, 1))
        spool.publish(Lsn(310))
    assert commits(read_all(reader)) == [300]


# Seeking


def test_seek_by_lsn_finds_what_ends_beyond_it(writer: LogWriter, reader: LogReader) -> None:
    for number in range(1, 5):
        writer.append(entry(number))
    for lsn, rest in ((0, [1, 2, 3, 4]), (109, [1, 2, 3, 4]), (110, [2, 3, 4]), (250, [3, 4]), (410, []), (999, [])):
        found = [piece.end for piece in reader.read(reader.seek(Lsn(lsn)))]
        assert found == [100 * number + 10 for number in rest], lsn


def test_seek_by_time_finds_what_was_committed_since(writer: LogWriter, reader: LogReader) -> None:
    for number in range(1, 5):
        writer.append(entry(number))
    for seconds, rest in ((0, [1, 2, 3, 4]), (200, [2, 3, 4]), (201, [3, 4]), (500, [])):
        found = [piece.end for piece in reader.read(reader.seek(DAY + timedelta(seconds=seconds)))]
        assert found == [100 * number + 10 for number in rest], seconds


# Consumers


def test_consumers_are_registered_move_forward_only_and_are_forgotten(writer: LogWriter, reader: LogReader) -> None:
    for number in range(1, 4):
        writer.append(entry(number))
    reader.commit("lake", ZERO_LSN)
    reader.commit("cache", Lsn(210))
    reader.commit("cache", Lsn(110))
    assert {item.name: item.reached for item in reader.consumers()} == {"cache": 210, "lake": 0}
    cache = next(item for item in reader.consumers() if item.name == "cache")
    assert [piece.end for piece in reader.read(cache.offset)] == [310]
    reader.forget("cache")
    assert [item.name for item in reader.consumers()] == ["lake"]


def test_lag_is_counted_in_bytes_entries_and_seconds(writer: LogWriter, reader: LogReader) -> None:
    for number in range(1, 4):
        writer.append(entry(number))
    reader.commit("behind", Lsn(110))
    reader.commit("abreast", Lsn(310))
    lags = {lag.consumer: lag for lag in reader.lags()}
    assert (lags["behind"].bytes, lags["behind"].entries) == (200, 2)
    assert lags["behind"].seconds > 0
    assert (lags["abreast"].bytes, lags["abreast"].entries, lags["abreast"].seconds) == (0, 0, 0.0)


def test_a_reader_among_entries_that_share_an_lsn_is_where_its_offset_says(
    writer: LogWriter, reader: LogReader
) -> None:
    for chunk in range(3):
        writer.append(Entry(rows(99, chunk, op="r"), Lsn(100), {"chunk": str(chunk)}))
    second = list(reader.read(reader.start()))[1]
    reader.commit("lake", second.end, second.offset)
    reader.commit("lake", second.end)
    reader.commit("cache", second.end)
    places = {item.name: item for item in reader.consumers()}
    assert [piece.rows["key"].to_pylist() for piece in reader.read(places["lake"].offset)] == [['{"id": 2}']]
    assert places["cache"].order < places["lake"].order
    lags = {lag.consumer: lag for lag in reader.lags()}
    assert [(lags[name].bytes, lags[name].entries) for name in ("lake", "cache")] == [(0, 1), (0, 2)]


# One writer


def test_of_two_writers_only_one_can_append(bench: Bench, writer: LogWriter, reader: LogReader) -> None:
    writer.append(entry(1))
    try:
        second = open_writer(bench)
    except LogFenced:
        writer.append(entry(2))
    else:
        with pytest.raises(LogFenced):
            writer.append(entry(2))
        second.append(entry(2))
        second.close()
    assert read_all(reader).equals(history(1, 2))


def test_threads_may_append_through_one_writer(writer: LogWriter, reader: LogReader) -> None:
    failures: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for number in range(10):
                writer.append(Entry(rows(50, number), Lsn(60), {f"{name}.{number}": "done"}))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"worker{index}",)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert read_all(reader).num_rows == 30


# Schemas


def test_schemas_count_per_table_and_are_seen_by_readers(writer: LogWriter, reader: LogReader) -> None:
    number, text = PgType(23, "int4"), PgType(25, "text")
    first = TableSchema(TableId("public", "items"), (Column("id", number, key=True),))
    second = TableSchema(first.table, (*first.columns, Column("name", text)))
    other = TableSchema(TableId("weird schema", 'a."b/c'), first.columns)
    assert [writer.schemas.record(schema).id for schema in (first, first, second, other, second)] == [1, 1, 2, 1, 2]
    assert reader.schemas.get(first.table, 1).columns == first.columns
    assert reader.schemas.get(first.table, 2).columns == second.columns
    assert [(schema.table, schema.id) for schema in reader.schemas.newest()] == [(first.table, 2), (other.table, 1)]
    with pytest.raises(LogCorrupt, match=r"Schema 9 of public\.items"):
        reader.schemas.get(first.table, 9)


# Maintenance


def test_maintenance_changes_nothing_that_a_reader_sees(writer: LogWriter, reader: LogReader) -> None:
    reader.commit("slow", ZERO_LSN)
    for number in range(1, 10):
        writer.append(entry(number))
    middle = reader.seek(Lsn(410))
    writer.maintain()
    assert read_all(reader).equals(history(*range(1, 10)))
    assert [piece.end for piece in reader.read(middle)] == [510, 610, 710, 810, 910]


# Spark


class Seen:
    """Collects what a streaming query brings, batch by batch."""

    def __init__(self) -> None:
        self.batches: list[pa.Table] = []

    def __call__(self, batch: "DataFrame", _: int) -> None:
        self.batches.append(batch.toArrow())

    def rows(self) -> pa.Table:
        """The changes, in log order, without the markers."""
        table = pa.concat_tables([LOG_SCHEMA.empty_table(), *(batch.cast(LOG_SCHEMA) for batch in self.batches)])
        changes = table.filter(pc.field("table") != PROGRESS_TABLE)
        return changes.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])

    def marks(self) -> list[int]:
        """The greatest marker of each batch."""
        found = []
        for batch in self.batches:
            markers = batch.filter(pc.field("table") == PROGRESS_TABLE)
            assert markers["op"].to_pylist() == ["m"] * markers.num_rows
            found.append(int(pc.max(markers["version"]).as_py()))
        return found


def drain(frame: "DataFrame", checkpoint: Path) -> Seen:
    """Run a query over all that is there now."""
    seen = Seen()
    writer = frame.writeStream.foreachBatch(seen).option("checkpointLocation", str(checkpoint))
    query = writer.trigger(availableNow=True).start()
    try:
        assert query.awaitTermination(120)
    finally:
        query.stop()
    return seen


@pytest.mark.spark
def test_a_stream_brings_every_change_once_and_ends_each_batch_with_its_position(
    writer: LogWriter, reader: LogReader, spark: "SparkSession", tmp_path: Path
) -> None:
    for number in range(1, 9):
        writer.append(entry(number))
    writer.maintain()
    seen = drain(reader.frame(spark, limit=9), tmp_path / "checkpoint")
    assert seen.rows().to_pylist() == history(*range(1, 9)).to_pylist()
    assert seen.marks()[-1] == 810
    assert seen.marks() == sorted(seen.marks())
    assert len(seen.batches) >= 2, "nine changes a batch must not let twenty-four through at once"


@pytest.mark.spark
def test_a_stream_restarts_after_its_last_batch(
    writer: LogWriter, reader: LogReader, spark: "SparkSession", tmp_path: Path
) -> None:
    writer.append(entry(1))
    writer.append(entry(2))
    assert drain(reader.frame(spark), tmp_path / "checkpoint").rows().equals(history(1, 2))
    writer.append(entry(3))
    writer.maintain()
    again = drain(reader.frame(spark), tmp_path / "checkpoint")
    assert again.rows().equals(history(3))
    assert again.marks() == [310]


@pytest.mark.spark
def test_a_batch_that_failed_comes_again_exactly(
    writer: LogWriter, reader: LogReader, spark: "SparkSession", tmp_path: Path
) -> None:
    writer.append(entry(1))
    writer.append(entry(2))

    def fail(batch: "DataFrame", _: int) -> None:
        batch.count()
        raise ValueError("the store said no")

    frame = reader.frame(spark)
    query = frame.writeStream.foreachBatch(fail).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    wait_until(lambda: not query.isActive, 60, "the query to fail")
    writer.append(entry(3))
    seen = drain(reader.frame(spark), tmp_path / "checkpoint")
    assert seen.rows().equals(history(1, 2, 3))


@pytest.mark.spark
def test_a_new_stream_may_begin_in_the_middle(
    writer: LogWriter, reader: LogReader, spark: "SparkSession", tmp_path: Path
) -> None:
    for number in range(1, 4):
        writer.append(entry(number))
    spool = writer.spool()
    spool.write(rows(400, *range(50)))
    spool.publish(Lsn(410))
    seen = drain(reader.frame(spark, after=reader.seek(Lsn(210))), tmp_path / "checkpoint")
    assert commits(seen.rows()) == [300] * 3 + [400] * 50
    assert seen.marks()[-1] == 410


@pytest.mark.spark
@pytest.mark.parametrize("largest", [1 << 20, 100], ids=["held", "too large to hold"])
def test_packed_batches_hold_the_rows_that_were_asked_for(
    writer: LogWriter,
    reader: LogReader,
    spark: "SparkSession",
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    largest: int,
) -> None:
    monkeypatch.setattr("cdc.log.spark.packed_rows.LARGEST", largest)
    writer.append(entry(1))
    writer.append(Entry(rows(200, 1, 2, table="public.others"), Lsn(210)))
    writer.append(entry(3))
    columns, found = ["table", "op", "key", "after", "version"], list[pa.Table]()

    def keep(batch: "DataFrame", _number: int) -> None:
        held = reader.unpacked(batch)
        assert isinstance(held, pa.Table) == (largest > 100)
        found.append(held if isinstance(held, pa.Table) else held.select(*columns).toArrow())

    frame = reader.packed(spark, None, 0, columns, [TableId("public", "items")])
    query = frame.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint")).foreachBatch(keep)
    query.trigger(availableNow=True).start().awaitTermination(120)
    held = pa.concat_tables(found)
    assert held.column_names == columns
    markers = held.filter(pc.field("table") == PROGRESS_TABLE).to_pylist()
    assert [(row["version"], row["after"]) for row in markers] == [(310, reader.head()[0])]
    changes = held.filter(pc.field("table") != PROGRESS_TABLE).sort_by([("version", "ascending"), ("key", "ascending")])
    assert changes.to_pylist() == history(1, 3).select(columns).to_pylist()
