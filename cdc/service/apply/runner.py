"""One sink's query, restarted when it fails."""

import logging
import math
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdc import backoff
from cdc.errors import MillraceError
from cdc.service.daemon.restarts import Attempts
from sinks.spark.query import SinkQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SinkRunner:
    """One sink's query and its restarts."""

    query: SinkQuery
    attempts: Attempts = field(default_factory=Attempts)
    started: float = 0.0
    restart_at: float | None = None
    never_ran: bool = False

    def start(self, spark: "SparkSession") -> None:
        """Start the query. A failure here counts like a later one."""
        self.started, self.restart_at = time.monotonic(), None
        try:
            self.query.start(spark)
        except MillraceError as error:
            self.failed(str(error))
            self.never_ran = True
            return
        if self.never_ran:  # else the failed batch is repeated, and its outcome sets the sink's state
            self.query.applier.status.state, self.never_ran = "starting", False

    def tend(self, spark: "SparkSession") -> None:
        """Restart it if it has ended and the delay is over."""
        if self.restart_at is not None:
            if time.monotonic() >= self.restart_at:
                self.start(spark)
            return
        failure = self.query.failure()
        if failure is not None:
            self.failed(failure)

    def failed(self, failure: str) -> None:
        """Record why it ended, and schedule the restart."""
        self.attempts = self.attempts.ended(time.monotonic() - self.started)
        # random: on a busy machine, queries that start together make each other exceed Spark's start timeout
        self.restart_at = time.monotonic() + backoff.spread(self.attempts.delay)
        status = self.query.applier.status
        if status.state == "stopped":  # by its retry policy
            self.restart_at = math.inf
            _log.error("sink %s stops until it is resumed: %s", self.query.settings.name, failure)
            return
        status.restarts += 1
        status.state, status.error = "failed", failure
        _log.error("sink %s failed, next start in %.0f s: %s", self.query.settings.name, self.attempts.delay, failure)
