"""A query in trouble: a crash between the pieces of a large transaction, a checkpoint that is lost or has no room."""

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from cdc.errors import SinkError
from cdc.ports import Batch
from cdc.service.apply.runner import SinkRunner
from sinks.context import SinkContext
from sinks.delta.settings import DeltaSettings
from sinks.delta.sink import DeltaSink
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from tests.fix_servers import MakeDisk
from tests.integration.service.test_query import ITEMS, Fickle, Pipeline, reach, row
from tests.scenes.histories import INTEGERS, History, cut, images

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


class Breaking(Fickle):
    """Breaks once, after so many batches."""

    left = 2

    def apply(self, batch: Batch) -> None:
        self.left -= 1
        if self.left == 0:
            raise SinkError("broken in the middle")
        super().apply(batch)


@pytest.fixture
def pipeline(spark: "SparkSession", filled_log: FilledLog, state_dir: Path) -> Iterator[Pipeline]:
    filled_log.record(ITEMS)
    made = Pipeline(spark, filled_log, state_dir)
    yield made
    made.halt()


def tend(pipeline: Pipeline, spark: "SparkSession", end: int) -> None:
    """Start the query again as the apply process does, until it has reached an LSN."""
    runner = SinkRunner(pipeline.query)

    def reached() -> bool:
        runner.tend(spark)
        return pipeline.applier.status.reached >= end

    wait_until(reached, 90, f"reached {end}")


def test_a_break_between_the_pieces_of_a_large_transaction_ends_in_the_right_state(
    pipeline: Pipeline, spark: "SparkSession", monkeypatch: pytest.MonkeyPatch
) -> None:
    """The position moves only with the last piece, so the whole transaction comes again, and repeats change nothing."""
    monkeypatch.setattr("sinks.spark.batch_reader._PIECE_BYTES", 1000)
    monkeypatch.setattr("cdc.log.spark.packed_rows.LARGEST", 1000)
    breaking = Breaking("store", pipeline.sink._store)
    pipeline.sink = breaking
    pipeline.start()
    history = History(ITEMS, INTEGERS, random.Random(5)).write(120)
    end = pipeline.log.append(history.rows)
    wait_until(lambda: breaking.left <= 0, 60, "the sink broke")
    assert pipeline.applier.status.reached < end
    tend(pipeline, spark, end)
    pipeline.check(ITEMS, history.state())


def test_a_full_disk_under_the_checkpoint_stops_the_query_and_room_lets_it_go_on(
    spark: "SparkSession", filled_log: FilledLog, small_disk: MakeDisk
) -> None:
    disk = small_disk(4)
    filled_log.record(ITEMS)
    pipeline = Pipeline(spark, filled_log, disk)
    pipeline.start()
    reach(pipeline, filled_log.append([row(1, 10, "one")]))
    filler = disk / "filler"
    with pytest.raises(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    end = filled_log.append([row(1, 20, "two")])
    wait_until(lambda: pipeline.query.failure() is not None, 60, "the query failed")
    filler.unlink()
    tend(pipeline, spark, end)
    pipeline.check(ITEMS, {'{"id":1}': '{"id":1,"label":"two","big":"two"}'})
    pipeline.halt()


def test_a_lost_checkpoint_skips_nothing_and_brings_nothing_back_in_delta(
    spark: "SparkSession", filled_log: FilledLog, state_dir: Path, tmp_path: Path
) -> None:
    """Batch numbers begin again at 0, and the table remembers transactions of the same writer: no data is ignored."""
    filled_log.record(ITEMS)
    pipeline = Pipeline(spark, filled_log, state_dir)
    as_text = {ITEMS.table: ("at",)}  # the history holds infinity and BC
    lake = DeltaSink(DeltaSettings(path=str(tmp_path / "lake"), as_text=as_text), SinkContext(state_dir))
    pipeline.other = lake
    pipeline.start()
    history = History(ITEMS, INTEGERS, random.Random(21)).write(60)
    pieces = list(cut(history.rows, random.Random(21), 20))
    for rows in pieces[:2]:
        reach(pipeline, filled_log.append(rows))
    pipeline.restart(lambda: shutil.rmtree(state_dir / "checkpoints" / "store"))
    wait_until(lambda: pipeline.applier.status.changes.get("public.items"), 90, "the log read again from its start")
    for rows in pieces[2:]:
        end = filled_log.append(rows)
    reach(pipeline, end)
    assert lake.stored(ITEMS).to_pylist() == lake.expected(ITEMS, images(history.state())).to_pylist()
    pipeline.halt()
