"""From the log through Spark into a sink: one streaming query."""

import logging
import random
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from cdc.errors import EnvironmentFault, Lost, Rejected, RejectedItem, StoreRefused
from cdc.model import TableSchema
from cdc.ports import Batch, LogReader, Sink
from cdc.service.apply.runner import SinkRunner
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.fold.folded import Folded
from sinks.memory import MemorySettings, MemorySink, Store
from sinks.spark import batch_reader
from sinks.spark.brief_errors import BatchFailed, brief
from sinks.spark.query import SinkQuery
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from tests.scenes.histories import INTEGERS, History, change, cut, images, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.spark
ITEMS = table()


class Fickle(MemorySink):
    """A memory sink that can be down, and that refuses rows whose label says so."""

    down = False
    broken = False
    picky = True

    def apply(self, batch: Batch) -> None:
        if self.broken:
            raise StoreRefused("the store refuses these credentials.")
        if self.down:
            raise Lost("the store is down.")
        poison = [row for row in batch.rows.to_pylist() if self.picky and "poison" in (row["after"] or "")]
        refused = [RejectedItem(row["table"], row["key"], row["version"], "poison") for row in poison]
        keys = {item.key for item in refused}
        kept = pa.array([key not in keys for key in batch.rows.column("key").to_pylist()], pa.bool_())
        super().apply(replace(batch, rows=batch.rows.filter(kept)))
        if refused:
            raise Rejected(refused)


class Pipeline:
    """A query on a memory sink, and the pieces around it."""

    def __init__(self, spark: "SparkSession", log: FilledLog, state: Path, name: str = "store") -> None:
        self.stop = threading.Event()
        self.sink = Fickle(name, Store())
        self.letters = DeadLetters(state / "dead-letters" / name)
        self.log = log
        self._spark = spark
        self._state = state
        self._settings = MemorySettings(name=name)
        self.other: Sink | None = None
        """Opened instead, if a test sets it."""
        self.query = self._make()

    def _make(self) -> SinkQuery:
        self.applier = Applier(
            self._settings.name,
            open_sink=lambda: self.other or self.sink,
            log=self.log.reader,
            letters=self.letters,
            stop=self.stop,
        )
        return SinkQuery(self._settings, self.log.reader, self.applier, self._state / "checkpoints", self.stop)

    def start(self) -> None:
        self.query.start(self._spark)

    def restart(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.halt()
        meanwhile()
        self.stop.clear()
        self.query = self._make()
        self.start()

    def halt(self) -> None:
        self.stop.set()
        self.query.halt()

    def check(self, schema: TableSchema, state: dict[str, str]) -> None:
        assert self.sink.stored(schema).to_pylist() == self.sink.expected(schema, images(state)).to_pylist()


@pytest.fixture
def pipeline(spark: "SparkSession", filled_log: FilledLog, state_dir: Path) -> Iterator[Pipeline]:
    filled_log.record(ITEMS)
    made = Pipeline(spark, filled_log, state_dir)
    made.start()
    yield made
    made.halt()


def reach(pipeline: Pipeline, lsn: int) -> None:
    def there() -> bool:
        assert pipeline.query.failure() is None
        return pipeline.applier.status.reached >= lsn

    wait_until(there, 180, f"reached {lsn}")


def row(key: int, version: int, label: str, op: str = "u", partial: bool = False) -> dict[str, object]:
    big = "" if partial else f',"big":"{label}"'
    after = None if op == "d" else f'{{"id":{key},"label":"{label}"{big}}}'
    return change(op, f'{{"id":{key}}}', version, after, ["big"] if partial else None)


def test_a_random_history_ends_in_the_state_of_the_source(pipeline: Pipeline) -> None:
    rng = random.Random(7)
    history = History(ITEMS, INTEGERS, rng).write(150)
    for rows in cut(history.rows, rng, 40):
        end = pipeline.log.append(rows)
    reach(pipeline, end)
    pipeline.check(ITEMS, history.state())
    assert pipeline.log.reader.consumers()[0].reached == end


def test_a_batch_taken_in_pieces_ends_in_the_same_state(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinks.spark.batch_reader._PIECE_BYTES", 1000)
    monkeypatch.setattr("cdc.log.spark.packed_rows.LARGEST", 1000)
    pipeline.restart()
    history = History(ITEMS, INTEGERS, random.Random(11)).write(120)
    reach(pipeline, pipeline.log.append(history.rows))
    pipeline.check(ITEMS, history.state())
    assert pipeline.applier.status.batches > 1


def test_small_batches_need_no_job_of_spark_and_large_ones_are_read_by_tasks(
    pipeline: Pipeline, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    def jobs() -> int:
        query = pipeline.query._query
        assert query is not None
        return len(spark.sparkContext.statusTracker().getJobIdsForGroup(str(query.runId)))

    history = History(ITEMS, INTEGERS, random.Random(3)).write(120)
    pieces = list(cut(history.rows, random.Random(3), 30))
    reach(pipeline, pipeline.log.append(pieces[0]))
    first = jobs()
    for rows in pieces[1:-1]:
        reach(pipeline, pipeline.log.append(rows))
    assert (first, jobs()) == (1, 1)
    monkeypatch.setattr("sinks.spark.batch_reader._FEW_BYTES", 0)
    reach(pipeline, pipeline.log.append(pieces[-1]))
    assert jobs() == 2
    pipeline.check(ITEMS, history.state())


def test_a_batch_of_many_bytes_at_one_lsn_is_read_by_tasks(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a snapshot need no WAL, and those of a batch may be too large for the driver."""
    read: list[LogReader] = []
    collected = batch_reader._collected

    def by_tasks(changes: "DataFrame", log: LogReader) -> Iterator[Folded]:
        read.append(log)
        return collected(changes, log)

    monkeypatch.setattr(batch_reader, "_collected", by_tasks)
    reach(pipeline, pipeline.log.append([row(1, 10, "one")]))
    reach(pipeline, pipeline.log.append([row(1, 12, "two")]))
    assert len(read) == 1
    for number in range(3):
        reach(pipeline, pipeline.log.append([row(key, 14 + 2 * number, "x" * 1_000_000) for key in range(17)]))
        assert len(read) == 2 + number
    reach(pipeline, pipeline.log.append([row(1, 30, "small again")]))
    reach(pipeline, pipeline.log.append([row(1, 32, "and read here")]))
    assert len(read) == 5


def test_a_restarted_query_goes_on_where_it_was(pipeline: Pipeline) -> None:
    reach(pipeline, pipeline.log.append([row(1, 10, "one")]))
    pipeline.restart()
    reach(pipeline, pipeline.log.append([row(2, 20, "two")]))
    assert pipeline.applier.status.changes == {"public.items": 1}
    assert pipeline.sink.stored(ITEMS).num_rows == 2


def test_a_store_that_is_down_is_waited_for(pipeline: Pipeline) -> None:
    reach(pipeline, pipeline.log.append([row(1, 10, "one")]))
    pipeline.sink.down = True
    end = pipeline.log.append([row(1, 20, "two")])
    wait_until(lambda: pipeline.applier.status.state == "waiting", 30)
    assert pipeline.applier.status.error == "the store is down."
    pipeline.sink.down = False
    reach(pipeline, end)
    assert (pipeline.applier.status.state, pipeline.applier.status.error) == ("running", "")


def test_a_poison_row_is_set_aside_and_the_rest_flows(pipeline: Pipeline) -> None:
    reach(pipeline, pipeline.log.append([row(1, 10, "one"), row(2, 11, "poison"), row(3, 12, "three")]))
    assert pipeline.sink.stored(ITEMS).column("key").to_pylist() == ['{"id":1}', '{"id":3}']
    assert [(letter.key, letter.reason) for letter in pipeline.letters.list()] == [('{"id":2}', "poison")]
    assert pipeline.applier.status.dead_letters == 1


def test_a_later_change_of_a_parked_key_is_filled_from_the_letter_and_settles_it(pipeline: Pipeline) -> None:
    reach(pipeline, pipeline.log.append([row(1, 10, "old")]))
    reach(pipeline, pipeline.log.append([row(1, 20, "poison")]))
    # the server left `big` out: its value is the parked one, not the one that the store still has
    reach(pipeline, pipeline.log.append([row(1, 30, "new", partial=True)]))
    assert pipeline.letters.list()[0].version == 30
    pipeline.sink.picky = False
    reach(pipeline, pipeline.log.append([row(1, 40, "newest", partial=True)]))
    assert pipeline.letters.list() == []
    pipeline.check(ITEMS, {'{"id":1}': '{"id":1,"label":"newest","big":"poison"}'})


def test_a_letter_is_tried_again_when_asked(pipeline: Pipeline) -> None:
    reach(pipeline, pipeline.log.append([row(1, 10, "poison")]))
    pipeline.sink.picky = False
    assert pipeline.letters.ask_retry() == 1
    assert pipeline.applier.retry_dead_letters() == 0
    assert pipeline.letters.count() == 0
    pipeline.check(ITEMS, {'{"id":1}': '{"id":1,"label":"poison","big":"poison"}'})


def test_a_failed_query_is_started_again_and_does_the_batch_over(pipeline: Pipeline, spark: "SparkSession") -> None:
    reach(pipeline, pipeline.log.append([row(1, 10, "one")]))
    pipeline.sink.broken = True
    end = pipeline.log.append([row(1, 20, "two")])
    runner = SinkRunner(pipeline.query)
    wait_until(lambda: pipeline.query.failure() == "the store refuses these credentials.", 30)
    runner.tend(spark)
    assert pipeline.applier.status.state == "failed"
    assert runner.restart_at is not None
    pipeline.sink.broken = False

    def tended() -> bool:
        runner.tend(spark)
        return pipeline.applier.status.reached >= end

    wait_until(tended, 30)
    assert pipeline.applier.status.state == "running"


def test_spark_knows_an_interrupted_batch_by_few_words_and_does_not_drown_in_a_trace(spark: "SparkSession") -> None:
    jvm: Any = spark.sparkContext._jvm

    def interrupted(_changes: object, _number: int) -> None:
        jvm.Thread.currentThread().interrupt()
        jvm.Thread.sleep(1)

    with pytest.raises(BatchFailed) as raised:
        brief(interrupted)(spark.range(1), 1)
    text = "".join(traceback.format_exception(raised.value))
    spoken = jvm.org.apache.spark.sql.execution.streaming.runtime.StreamExecution.PROXY_ERROR()
    assert spoken.findFirstIn(text).isDefined()
    with pytest.raises(BatchFailed, match=r"^java\.lang\.NullPointerException$"):
        brief(lambda _changes, _number: jvm.java.util.Objects.requireNonNull(None))(spark.range(1), 1)


def test_py4j_says_nothing_of_a_batch_that_a_stop_interrupted(caplog: pytest.LogCaptureFixture) -> None:
    interrupted = "py4j.protocol.Py4JJavaError: An error occurred while calling Spark: java.lang.InterruptedException"
    for reason in (interrupted, "java.lang.NullPointerException"):
        try:
            raise BatchFailed(reason)
        except BatchFailed:
            logging.getLogger("py4j.clientserver").exception("in the proxy")
    said = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [str(error) for error in said] == ["java.lang.NullPointerException"]


def test_a_second_query_on_the_same_checkpoint_is_refused(pipeline: Pipeline) -> None:
    with pytest.raises(EnvironmentFault, match="in use by process"):
        pipeline._make()
