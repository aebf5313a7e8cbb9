"""One streaming query per sink: reads the log, folds each micro-batch and applies it; with its own checkpoint and pool.

A store that is down does not end its query (the applier waits), and does not affect other sinks.
"""

import fcntl
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from py4j.protocol import Py4JError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException

from cdc.config.settings import SinkSettings
from cdc.durable_files import open_or_make
from cdc.errors import EnvironmentFault
from cdc.model import ZERO_LSN, TableId
from cdc.ports import Consumer, LogReader, Offset
from sinks.apply.applier import Applier
from sinks.apply.errors import Stopped
from sinks.fold.spark import FOLDED
from sinks.spark.batch_reader import BatchReader
from sinks.spark.brief_errors import brief
from sinks.spark.task_job import SparkTaskJob
from sinks.tasks.applier import TaskApplier

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)
# To plan, compile and run ten rows: 284 ms of CPU with Spark's defaults, 246 ms without the first two; 60,000 rows
# cost a third less as well, since a plan that is used once is not worth compiling (docs/adr/0010-fold.md).
_CONF = {
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.codegen.wholeStage": "false",
    # Rows of the running sum on the heap before they are spilled: 4,096 of 50 kB, in two queries at once, ended a
    # driver of 600 MB.
    "spark.sql.windowExec.buffer.in.memory.threshold": "128",
    "spark.sql.execution.arrow.maxBytesPerBatch": "4m",  # a fragmented heap has no room for arrays of 64 MB
    "spark.sql.streaming.stopTimeout": "15s",  # the default is for ever, but a batch may hang in a store
}
_COLUMNS = (*FOLDED.names, "ordinal")


@dataclass(frozen=True, slots=True)
class CheckpointLock:
    """Locks a checkpoint for one process: two queries on one checkpoint would lose changes silently."""

    descriptor: int

    @classmethod
    def take(cls, path: Path) -> "CheckpointLock":
        """Raises EnvironmentFault naming the process that has the lock. The end of the process releases it."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = open_or_make(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(descriptor, 20, 0).decode() or "unknown"
            os.close(descriptor)
            raise EnvironmentFault(
                f"The checkpoint {path.stem!r} is in use by process {holder}.",
                "Two queries on one checkpoint lose changes: stop the other one, or give this sink another name.",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return cls(descriptor)

    def release(self) -> None:
        """Release the lock."""
        os.close(self.descriptor)


@dataclass(frozen=True, slots=True)
class ReadStart:
    """How a query reads the log. `after` is used only without a checkpoint; None is the oldest entry."""

    name: str
    after: Offset | None
    limit: int
    trigger_seconds: float = 0.0
    tables: Sequence[TableId] = ()
    planned: bool = False
    """Whether tasks read the log themselves: a micro-batch then has shares instead of rows."""


def stream(
    spark: "SparkSession",
    log: LogReader,
    reading: ReadStart,
    checkpoint: Path,
    batch: "Callable[[DataFrame, int], None]",
) -> "StreamingQuery":
    """Start a query over the log in a scheduler pool of its name."""
    session = spark.newSession()  # its settings must not affect other queries and Delta's merges
    for name, value in _CONF.items():
        session.conf.set(name, value)
    if reading.planned:
        frame = log.planned(session, reading.after, reading.limit)
    else:
        frame = log.packed(session, reading.after, reading.limit, _COLUMNS, reading.tables)
    spark.sparkContext.setLocalProperty("spark.scheduler.pool", reading.name)
    writer = frame.writeStream.queryName(reading.name).foreachBatch(batch)
    writer = writer.option("checkpointLocation", str(checkpoint.absolute()))
    return writer.trigger(processingTime=f"{reading.trigger_seconds} seconds").start()


def position(log: LogReader, name: str) -> Consumer:
    """The position of a registered consumer in the log."""
    return next(item for item in log.consumers() if item.name == name)


def stop_query(query: "StreamingQuery", name: str) -> None:
    """Stop a query, waiting for its batch up to the stop timeout."""
    try:
        query.stop()
    except (PySparkException, Py4JError, OSError):  # OSError: the JVM was killed
        _log.warning("query %s did not stop in time; it is abandoned", name)


class SinkQuery:
    """Runs one sink's own query; may be started again after a failure."""

    def __init__(
        self, settings: SinkSettings, log: LogReader, applier: Applier, checkpoints: Path, stop: threading.Event
    ) -> None:
        self.settings = settings
        self.applier = applier
        self._log = log
        self._folder = checkpoints / settings.name
        self._stop = stop
        self._shared_mark = checkpoints / f"{settings.name}.shared"
        self._lock: CheckpointLock | None = CheckpointLock.take(checkpoints / f"{settings.name}.lock")
        self._query: StreamingQuery | None = None
        self._reader: BatchReader | None = None
        self._leaving = False

    def start(self, spark: "SparkSession") -> None:
        """Start at the checkpoint; without one, at the oldest entry, or after what a shared query has applied."""
        self._log.commit(
            self.settings.name, ZERO_LSN
        )  # before reading: retention keeps the log for a registered consumer
        self._leaving = False
        after = None
        if self._shared_mark.exists():
            shutil.rmtree(self._folder, ignore_errors=True)  # the checkpoint is older than the position
            after = position(self._log, self.settings.name).offset
        own = self.settings
        by_tasks = isinstance(self.applier, TaskApplier)
        reading = ReadStart(own.name, after, own.max_batch_changes, own.trigger_seconds, own.tables, by_tasks)
        self._reader = BatchReader(self._log, self._folder)
        self._query = stream(spark, self._log, reading, self._folder, brief(self._batch))

    @property
    def has_own_query(self) -> bool:
        """Whether its own query was started, also if it failed, and not handed over since."""
        return self._query is not None

    @property
    def starting(self) -> bool:
        """Whether its source is still starting. Spark limits that to ten seconds, so queries start one at a time."""
        query = self._query
        return query is not None and query.isActive and query.status["message"].startswith("Initializing")

    @property
    def uses_own_checkpoint(self) -> bool:
        """Whether its own checkpoint, not the position in the log, says how far this sink is."""
        return not self._shared_mark.exists() and (
            self._folder.exists() or position(self._log, self.settings.name).reached > ZERO_LSN
        )

    def share(self) -> None:
        """From now on the position in the log says how far this sink is: the shared query may apply batches."""
        self._shared_mark.touch(mode=0o600)
        self._leaving = True

    def hand_over(self) -> None:
        """Stop its own query and delete its checkpoint; waits for the current batch."""
        query, self._query = self._query, None
        if query is not None:
            stop_query(query, self.settings.name)
        shutil.rmtree(self._folder, ignore_errors=True)

    def failure(self) -> str | None:
        """Why the query ended; None while it runs."""
        query = self._query
        if query is None or query.isActive:
            return None
        error = query.exception()
        return self.applier.status.error or (type(error).__name__ if error else "ended")

    def halt(self, deadline: float = 20.0) -> None:
        """Wait for the current batch, then stop. Set the process's stop event first."""
        self.applier.finish(deadline)
        if self._query is not None:
            stop_query(self._query, self.settings.name)
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def _batch(self, changes: "DataFrame", batch_id: int) -> None:
        if self._stop.is_set() or self._leaving:
            raise Stopped
        if batch_id and self._shared_mark.exists():
            self._shared_mark.unlink(missing_ok=True)  # the checkpoint has a batch: it counts from now on
        started = time.monotonic()
        if isinstance(self.applier, TaskApplier):
            self.applier.apply_by_tasks(SparkTaskJob(changes))
        else:
            assert self._reader is not None  # created before the query
            for folded in self._reader.read(changes, batch_id):
                self.applier.apply(folded.only(self.settings.tables))
        self.applier.status.add_batch_time(time.monotonic() - started)
        _log.debug("sink %s: batch %d", self.settings.name, batch_id)
