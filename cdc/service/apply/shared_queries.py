"""Decides which sinks share a query: those at about the same position. A sink that has caught up joins later."""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.errors import LogFull, MillraceError
from cdc.log.batch_size import USUAL_CHANGES
from cdc.model import ZERO_LSN
from cdc.ports import LogReader
from cdc.service.apply.direct_reader import DirectReader
from cdc.service.apply.sink_worker import SinkWorker
from cdc.service.daemon.restarts import Attempts
from cdc.service.state.sink_positions import by_name
from sinks.apply.batch_schedule import sinks_to_share
from sinks.spark.query import ReadStart
from sinks.spark.shared_query import NAME, SharedQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)


class SharedQueries:
    """At most one shared query, restarted when it fails. For one thread.

    With `direct` its sinks apply the log from the first moment on, also before Spark runs and until the query's first
    batch. On a cluster the driver must not: there the rows are for the executors.
    """

    def __init__(self, log: LogReader, checkpoints: Path, *, direct: bool) -> None:
        self._log = log
        self._checkpoints = checkpoints
        self._direct = direct
        self._query: SharedQuery | None = None
        self._reader: DirectReader | None = None
        self._reading = ReadStart(NAME, None, 0)
        self._members: frozenset[str] = frozenset()
        self._attempts = Attempts()
        self._started = 0.0
        self._due = 0.0

    def update(self, workers: Mapping[str, SinkWorker], spark: "SparkSession | None") -> frozenset[str]:
        """Start, join or end the shared query. Returns the sinks that wait for its restart: start no query for them.

        While Spark starts (None), only a direct reader can run.
        """
        sharing = {name: worker for name, worker in workers.items() if worker.may_share}
        if self._query is not None:
            self._check(self._query, sharing)
        if self._query is None and len(sharing) > 1:
            if time.monotonic() < self._due:
                return self._members & sharing.keys()
            if spark is not None or self._direct:
                self._begin(sharing)
        elif self._query is not None:
            self._join(self._query, sharing)
        if self._query is not None and not self._query.started and spark is not None:
            self._start(self._query, sharing, spark)
        return frozenset()

    def close(self) -> None:
        """Stop the query; each sink still applies its present batch."""
        if self._query is not None:
            _end(self._query, self._reader)
            self._query = None

    def _check(self, query: SharedQuery, workers: Mapping[str, SinkWorker]) -> None:
        failure = query.failure() or (self._reader.error if self._reader else None)
        if failure is not None:
            self._give_up(query, workers, failure)
        elif not any(worker.shares for worker in workers.values()):
            self._forget(query)

    def _give_up(self, query: SharedQuery, workers: Mapping[str, SinkWorker], failure: str) -> None:
        self._failed(failure)
        for worker in workers.values():
            worker.leave_shared(failure)
        self._forget(query)

    def _forget(self, query: SharedQuery) -> None:
        reader, self._query, self._reader = self._reader, None, None
        ending = threading.Thread(target=_end, args=(query, reader), name="end-shared-query", daemon=True)
        ending.start()

    def _failed(self, failure: str) -> None:
        self._attempts = self._attempts.ended(time.monotonic() - self._started)
        self._due = time.monotonic() + self._attempts.delay
        _log.error("the shared query failed, next start in %.0f s: %s", self._attempts.delay, failure)

    def _begin(self, workers: Mapping[str, SinkWorker]) -> None:
        """Choose the sinks, and have them take batches."""
        try:
            for name in workers:
                self._log.commit(name, ZERO_LSN)  # registered before it reads: retention waits for it
        except LogFull as error:
            self._failed(str(error))
            return
        consumers = by_name(self._log.consumers())
        ready = {name for name, worker in workers.items() if worker.can_start_shared(consumers[name])}
        self._members = sinks_to_share({lag.consumer: lag for lag in self._log.lags() if lag.consumer in ready})
        if not self._members:
            return
        last = min((consumers[name] for name in self._members), key=lambda consumer: consumer.order)
        limit = min(workers[name].sink.max_batch_changes or USUAL_CHANGES for name in self._members)
        self._started, self._reading = time.monotonic(), ReadStart(NAME, last.offset, limit)
        query = SharedQuery(self._log, self._checkpoints, last.reached)
        for name in self._members:
            query.buffer.add_member(name)
            workers[name].join_shared(query.buffer)
        self._query = query
        if self._direct:
            self._reader = DirectReader(self._log, query.buffer, last.offset, last.reached)
            query.wanted = self._reader.hand_over
        _log.info("%s share a query", ", ".join(sorted(self._members)))

    def _start(self, query: SharedQuery, workers: Mapping[str, SinkWorker], spark: "SparkSession") -> None:
        """Have Spark read the log, from where the direct reader is now."""
        reading = self._reading if self._reader is None else replace(self._reading, after=self._reader.position[0])
        self._started = time.monotonic()
        try:
            query.start(spark, reading)
        except MillraceError as error:
            self._give_up(query, workers, str(error))

    @staticmethod
    def _join(query: SharedQuery, workers: Mapping[str, SinkWorker]) -> None:
        for name, worker in workers.items():
            if worker.own_position and query.buffer.join(name, worker.own_position):
                _log.info("sink %s has caught up and shares the query again", name)
                worker.join_shared(query.buffer)


def _end(query: SharedQuery, reader: DirectReader | None) -> None:
    if reader is not None:
        reader.stop()
    query.halt()
