"""Which sinks share a query: begun when two or more are level, joined by who catches up, begun again if it fails."""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from cdc.config.settings import SinkSettings
from cdc.errors import LogFull, MillraceError
from cdc.model import ZERO_LSN, Lsn
from cdc.ports import Consumer, LogReader
from cdc.service.daemon.restarts import Attempts
from cdc.service.state.sink_positions import by_name
from sinks.apply.batch_buffer import BatchBuffer
from sinks.apply.batch_schedule import crew
from sinks.spark.query import ReadStart
from sinks.spark.shared_query import NAME, SharedQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)


class SharingSink(Protocol):
    """A sink as far as sharing is concerned."""

    sink: SinkSettings

    @property
    def willing(self) -> bool:
        """Whether it may share a query."""

    @property
    def aboard(self) -> bool:
        """Whether a shared query brings its batches."""

    @property
    def level(self) -> Lsn:
        """How far a query of its own has brought it; 0 where there is none, or something is wrong with it."""

    def ready(self, position: Consumer) -> bool:
        """Whether the position kept with the log says how far it is, and nothing is wrong with it."""

    def board(self, ring: BatchBuffer) -> None:
        """Take batches from the ring, which has a place for it; a query of its own ends meanwhile."""

    def disembark(self, failure: str) -> None:
        """The shared query failed: wait for the next one."""


class SharedQueries:
    """At most one shared query. One thread calls."""

    def __init__(self, log: LogReader, checkpoints: Path) -> None:
        self._log = log
        self._checkpoints = checkpoints
        self._convoy: SharedQuery | None = None
        self._crew: frozenset[str] = frozenset()
        self._attempts = Attempts()
        self._started = 0.0
        self._due = 0.0

    def tend(self, sinks: Mapping[str, SharingSink], spark: "SparkSession") -> frozenset[str]:
        """Begin, join, end. Returns the sinks that wait for a shared query to begin again: start none for them."""
        willing = {name: sink for name, sink in sinks.items() if sink.willing}
        if self._convoy is not None:
            self._watch(self._convoy, willing)
        if self._convoy is None and len(willing) > 1:
            if time.monotonic() < self._due:
                return self._crew & willing.keys()
            self._begin(willing, spark)
        elif self._convoy is not None:
            self._take_aboard(self._convoy, willing)
        return frozenset()

    def close(self) -> None:
        """End the query; the sinks keep what they have in hand."""
        if self._convoy is not None:
            self._convoy.halt()
            self._convoy = None

    def _watch(self, convoy: SharedQuery, sinks: Mapping[str, SharingSink]) -> None:
        failure = convoy.failure()
        if failure is None and any(sink.aboard for sink in sinks.values()):
            return
        if failure is not None:
            self._failed(failure)
            for sink in sinks.values():
                sink.disembark(failure)
        self._convoy = None
        threading.Thread(target=convoy.halt, name="end-convoy", daemon=True).start()

    def _failed(self, failure: str) -> None:
        self._attempts = self._attempts.ended(time.monotonic() - self._started)
        self._due = time.monotonic() + self._attempts.delay
        _log.error("the shared query failed, next start in %.0f s: %s", self._attempts.delay, failure)

    def _begin(self, willing: Mapping[str, SharingSink], spark: "SparkSession") -> None:
        try:
            for name in willing:
                self._log.commit(name, ZERO_LSN)  # registered before it reads: retention waits for it
        except LogFull as error:
            self._failed(str(error))
            return
        places = by_name(self._log.consumers())
        ready = {name for name, sink in willing.items() if sink.ready(places[name])}
        self._crew = crew({lag.consumer: lag for lag in self._log.lags() if lag.consumer in ready})
        if not self._crew:
            return
        last = min((places[name] for name in self._crew), key=lambda place: place.order)
        limit = min(willing[name].sink.max_batch_changes for name in self._crew)
        convoy = SharedQuery(self._log, self._checkpoints, last.reached)
        self._started = time.monotonic()
        try:
            convoy.start(spark, ReadStart(NAME, last.offset, limit))
        except MillraceError as error:
            self._failed(str(error))
            return
        for name in self._crew:
            convoy.ring.board(name)
            willing[name].board(convoy.ring)
        self._convoy = convoy
        _log.info("%s share a query", ", ".join(sorted(self._crew)))

    @staticmethod
    def _take_aboard(convoy: SharedQuery, sinks: Mapping[str, SharingSink]) -> None:
        for name, sink in sinks.items():
            if sink.level and convoy.ring.join(name, sink.level):
                _log.info("sink %s has caught up and shares the query again", name)
                sink.board(convoy.ring)
