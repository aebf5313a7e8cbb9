"""The Spark driver of a pipeline, and the applier of a sink: for live queries and for replays."""

import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.config.settings import Settings, SinkSettings
from cdc.model import ZERO_LSN, Lsn
from cdc.ports import LogReader
from cdc.service.apply.reselect import SourceRows
from cdc.service.state.batch_history import BatchHistory
from cdc.service.state.sink_positions import by_name
from sinks import registry
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.apply.errors import Stopped
from sinks.context import SinkContext
from sinks.fingerprints import FingerprintRecorder
from sinks.tasks.applier import TaskApplier
from sinks.tasks.unit_of_work import assignment_settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class Driver:
    """Starts Spark once, on the first call, from any thread."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._session: SparkSession | None = None
        self._background: threading.Thread | None = None
        self._error: Exception | None = None

    def __call__(self) -> "SparkSession":
        with self._lock:
            if self._session is None:
                self._session = spark_of(self._settings, self._settings.state / "spark")
            return self._session

    def ready(self) -> "SparkSession | None":
        """The session; None while Spark starts. The first call starts it in the background.

        Raises the error of a start that failed. For one thread.
        """
        if self._background is None:
            self._background = threading.Thread(target=self._start, name="spark-start", daemon=True)
            self._background.start()
        if self._error is not None:
            raise self._error
        return self._session

    def _start(self) -> None:
        try:
            self()
        except Exception as error:  # raised again by `ready`, in the thread that can report it
            self._error = error

    def stop(self) -> None:
        """Stop Spark, if it runs. While it starts, nothing is to be stopped: its JVM ends with this process."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._session is not None:
                self._session.stop()
        finally:
            self._lock.release()


def applier_of(
    settings: Settings,
    sink: SinkSettings,
    log: LogReader,
    context: SinkContext,
    stop: threading.Event,
    *,
    rows: SourceRows | None = None,
    watch: FingerprintRecorder | None = None,
    by_tasks: bool = False,
) -> Applier:
    """The applier of a sink. `rows` reads single rows from the source again, `watch` detects lost tables; `by_tasks`:
    its live batches are applied by Spark tasks."""
    kind = TaskApplier if by_tasks else Applier
    applier = kind(
        sink.name,
        open_sink=partial(registry.open_sink, sink, context),
        log=log,
        letters=DeadLetters(settings.state / "dead-letters" / sink.name),
        stop=stop,
        reselect=rows or SourceRows(settings.source),
        retry=sink.retry,
        tables=sink.tables,
        note=BatchHistory(settings.state, sink.name, partial(_position, log, sink.name)).record,
        watch=watch,
    )
    if isinstance(applier, TaskApplier):
        applier.settings = assignment_settings(settings, sink.name)
    return applier


def _position(log: LogReader, sink: str) -> Lsn:
    consumer = by_name(log.consumers()).get(sink)
    return consumer.reached if consumer else ZERO_LSN


def stop_aware(stop: threading.Event) -> Callable[[float], None]:
    """A sleep that raises Stopped once `stop` is set."""

    def wait(seconds: float) -> None:
        if stop.wait(seconds):
            raise Stopped

    return wait


def spark_of(settings: Settings, scratch: Path) -> "SparkSession":
    """The pipeline's Spark session. `scratch` must be used by nothing else: its content is removed."""
    from cdc.artifacts.jars import spark_jars
    from sinks.spark.session import spark_session

    shutil.rmtree(scratch, ignore_errors=True)  # a killed driver leaves its files
    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    conf = {
        "spark.driver.memory": settings.spark.memory,
        "spark.local.dir": str(scratch.absolute()),
        "spark.scheduler.mode": "FAIR",
        "spark.python.authenticate.socketTimeout": "60s",  # the default 15 s is too short when all sinks start at once
        **settings.spark.conf,
    }
    spark = settings.spark
    return spark_session("millrace", spark_jars(), conf, scratch.absolute(), spark.master, secrets=spark.secrets)
