"""The apply process: one Spark driver, one streaming query per sink, each with its own checkpoint and its own luck.

A store that is down keeps only its own query waiting. A query that fails is started again after a while; what ends
the whole process is the loss of Spark itself, and then the supervisor starts it again.
"""

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import cdc.log
from cdc.config import Settings, SinkSettings
from cdc.errors import MillraceError
from cdc.model import format_lsn
from cdc.ports import LogReader
from cdc.service import part, status
from cdc.service.reselect import SourceRows
from cdc.service.restarts import Attempts
from sinks import registry
from sinks.applier import Applier, Stopped
from sinks.context import SinkContext
from sinks.dead_letters import DeadLetters
from sinks.query import SinkQuery

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)
_INTERVAL = 0.5
_GRACE = 20.0
_ATTEND = 1.0


@dataclass(slots=True)
class Runner:
    """One sink's query and how often it had to be started again."""

    query: SinkQuery
    attempts: Attempts = field(default_factory=Attempts)
    started: float = 0.0
    restart_at: float | None = None
    never_ran: bool = False

    def start(self, spark: "SparkSession") -> None:
        """Start the query; a failure to start counts like one later on."""
        self.started, self.restart_at = time.monotonic(), None
        try:
            self.query.start(spark)
        except MillraceError as error:
            self._ended(str(error))
            self.never_ran = True
            return
        if self.never_ran:  # else the batch that failed comes again, and its outcome is the sink's state
            self.query.applier.status.state, self.never_ran = "starting", False

    def tend(self, spark: "SparkSession") -> None:
        """Start it again if it ended and its time has come."""
        if self.restart_at is not None:
            if time.monotonic() >= self.restart_at:
                self.start(spark)
            return
        failure = self.query.failure()
        if failure is not None:
            self._ended(failure)

    def _ended(self, failure: str) -> None:
        self.attempts = self.attempts.ended(time.monotonic() - self.started)
        self.restart_at = time.monotonic() + self.attempts.delay
        status_ = self.query.applier.status
        status_.state, status_.error = "failed", failure
        _log.error("sink %s failed, next start in %.0f s: %s", self.query.settings.name, self.attempts.delay, failure)


def run(settings: Settings, stop: threading.Event) -> None:
    """Apply until `stop` is set, then let each batch in hand end."""
    log = cdc.log.open_reader(settings)
    spark_later: list[SparkSession] = []
    runners = [_runner(settings, sink, log, stop, lambda: spark_later[0]) for sink in settings.sinks]
    publish = partial(_publish, settings, runners)
    publish("starting")
    with ThreadPoolExecutor(max_workers=len(runners) + 1, thread_name_prefix="sink") as pool:
        for runner in runners:
            pool.submit(_attend, runner.query.applier, stop)
        spark_later.append(spark_of(settings, settings.state / "spark"))
        try:
            _follow(runners, spark_later[0], publish, stop)
        finally:
            stop.set()
            publish("stopping")
            for runner in runners:
                runner.query.halt(_GRACE)
            spark_later[0].stop()
            publish("stopped")


def _follow(
    runners: list[Runner], spark: "SparkSession", publish: Callable[[str], None], stop: threading.Event
) -> None:
    for runner in runners:
        runner.start(spark)
    while not stop.wait(_INTERVAL):
        for runner in runners:
            runner.tend(spark)
        publish("running")


def _runner(
    settings: Settings,
    sink: SinkSettings,
    log: LogReader,
    stop: threading.Event,
    spark: "Callable[[], SparkSession]",
) -> Runner:
    applier = applier_of(settings, sink, log, SinkContext(settings.state, spark, stop_aware(stop)), stop)
    return Runner(SinkQuery(sink, log, applier, settings.state / "checkpoints", stop))


def applier_of(
    settings: Settings, sink: SinkSettings, log: LogReader, context: SinkContext, stop: threading.Event
) -> Applier:
    """A pipeline's applier for one of its sinks, for the live query and for a replay alike."""
    return Applier(
        sink.name,
        open_sink=partial(registry.open_sink, sink, context),
        log=log,
        letters=DeadLetters(settings.state / "dead-letters" / sink.name),
        stop=stop,
        reselect=SourceRows(settings.source),
    )


def stop_aware(stop: threading.Event) -> Callable[[float], None]:
    """Waiting that ends when the process does."""

    def wait(seconds: float) -> None:
        if stop.wait(seconds):
            raise Stopped

    return wait


def _attend(applier: Applier, stop: threading.Event) -> None:
    """Beside the batches: meet the store while Spark starts, so that an idle sink shows as running, and try dead
    letters again that somebody asked for."""
    while True:
        try:
            if applier.status.state in ("starting", "refused"):
                applier.greet()
            applier.retry_letters()
        except Stopped:
            return
        except MillraceError as error:
            _log.debug("sink %s: %s", applier.name, error)
        except Exception:
            _log.exception("sink %s could not be attended to", applier.name)
        if stop.wait(_ATTEND):
            return


def spark_of(settings: Settings, scratch: Path) -> "SparkSession":
    """The driver that a pipeline asks for. `scratch` must be its own: whatever lies there is removed."""
    from deploy.local.jars import spark_jars
    from sinks.session import spark_session

    shutil.rmtree(scratch, ignore_errors=True)  # a killed driver leaves its files behind
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    conf = {
        "spark.driver.memory": settings.spark.memory,
        "spark.local.dir": str(scratch.absolute()),
        "spark.scheduler.mode": "FAIR",
        **settings.spark.conf,
    }
    return spark_session("millrace", spark_jars(), conf, scratch.absolute(), settings.spark.master)


def _publish(settings: Settings, runners: list[Runner], state: str) -> None:
    sinks = {runner.query.settings.name: _facts(runner.query.applier) for runner in runners}
    status.publish(settings.state, "apply", {"state": state, "sinks": sinks})


def _facts(applier: Applier) -> Mapping[str, object]:
    said = asdict(applier.status)
    return {**said, "reached": format_lsn(applier.status.reached), "facts": dict(applier.facts)}


if __name__ == "__main__":
    sys.exit(part.main("apply", run))
