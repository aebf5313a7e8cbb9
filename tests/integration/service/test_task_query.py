"""A query whose batches Spark tasks apply, with a session of this machine in place of a cluster."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cdc.log
from cdc.config.settings import Settings
from cdc.model import Lsn
from sinks.spark.query import SinkQuery
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from tests.scenes.histories import change, table
from tests.scenes.task_jobs import task_applier

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
NAME = "tasks"


@pytest.fixture
def query(settings_of: Callable[..., Settings], filled_log: FilledLog, tmp_path: Path) -> Iterator[SinkQuery]:
    """Not started yet."""
    settings, stop = settings_of(sinks=[{"kind": "memory", "name": NAME}]), threading.Event()
    log = cdc.log.open_reader(settings)
    applier = task_applier(settings, NAME, log, tmp_path / "letters")
    query = SinkQuery(settings.sinks[0], log, applier, tmp_path / "checkpoints", stop)
    yield query
    stop.set()
    query.halt()


def assert_reaches(query: SinkQuery, end: Lsn) -> None:
    wait_until(lambda: query.failure() or query.applier.status.reached == end, 60, "the batch")
    assert query.failure() is None


def test_a_query_that_starts_at_the_end_of_the_log_begins_with_an_empty_batch_and_goes_on(
    query: SinkQuery, filled_log: FilledLog, spark: "SparkSession", tmp_path: Path
) -> None:
    filled_log.record(table())
    end = filled_log.append([change("c", '{"id":1}', 10, '{"id":1}')])
    filled_log.reader.commit(NAME, end, filled_log.reader.head()[0])
    query.share()  # its position in the log counts, as after a shared query
    query.start(spark)
    first = tmp_path / "checkpoints" / NAME / "commits" / "0"
    wait_until(lambda: query.failure() or first.exists(), 60, "the empty batch")
    assert query.failure() is None
    assert_reaches(query, filled_log.append([change("c", '{"id":2}', 20, '{"id":2}')]))
