"""All sinks of the pipeline: started and stopped one by one, as the pipeline file and the pauses require."""

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from cdc.config.settings import Settings
from cdc.ports import LogReader
from cdc.service.apply.shared_queries import SharedQueries
from cdc.service.apply.sink_worker import GRACE, SinkWorker, Spark, requests_of
from cdc.service.state.pauses import Paused

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class SinkWorkers:
    """Every sink of the pipeline. For one thread."""

    settings: Settings
    log: LogReader
    spark: Spark
    ready: "Callable[[], SparkSession | None]"
    """Starts Spark if need be, without waiting for it: None until it runs."""
    _workers: dict[str, SinkWorker] = field(default_factory=dict)
    _ending: dict[str, threading.Thread] = field(default_factory=dict)
    _paused: Paused = field(default_factory=Paused)
    _shared: SharedQueries = field(init=False)

    def __post_init__(self) -> None:
        direct = not self.settings.spark.on_cluster
        self._shared = SharedQueries(self.log, self.settings.state / "checkpoints", direct=direct)

    def follow(self, settings: Settings, paused: Paused) -> None:
        """Stop sinks that were paused, removed or changed, and start missing ones."""
        self.settings, self._paused = settings, paused
        wanted = {sink.name: sink for sink in settings.sinks if sink.name not in paused.sinks}
        for name, worker in list(self._workers.items()):
            worker.follow(settings, paused)
            if wanted.get(name) != worker.sink:
                self._end(name)
        self._ending = {name: thread for name, thread in self._ending.items() if thread.is_alive()}
        for name, sink in wanted.items():
            if name not in self._workers and name not in self._ending:
                requests = requests_of(settings, sink, paused)
                self._workers[name] = SinkWorker(settings, sink, self.log, self.spark, requests)

    def run_queries(self) -> None:
        """Start queries, and restart failed ones. Starts Spark, unless there is no sink, and does not wait for it."""
        if not self._workers:
            return
        spark = self.ready()
        waiting = self._shared.update(self._workers, spark)
        if spark is None:
            return
        starting = any(worker.runner.query.starting for worker in self._workers.values())
        for name, worker in self._workers.items():
            if name not in waiting and not (worker.needs_start and starting):
                starting |= worker.needs_start
                worker.run_query(spark)

    def facts(self) -> Mapping[str, Mapping[str, object]]:
        """By sink, for the status."""
        facts = {name: worker.facts() for name, worker in self._workers.items()}
        for sink in self.settings.sinks:
            if sink.name in self._paused.sinks:
                facts[sink.name] = {"state": "pausing" if sink.name in self._ending else "paused", "held": []}
        return facts

    def close(self) -> None:
        """Stop all sinks; each finishes its batch."""
        for worker in self._workers.values():
            worker.stop.set()
        ending = [threading.Thread(target=worker.end, daemon=True) for worker in self._workers.values()]
        for thread in ending:
            thread.start()
        self._shared.close()
        for thread in (*ending, *self._ending.values()):
            thread.join(2 * GRACE)

    def _end(self, name: str) -> None:
        worker = self._workers.pop(name)
        _log.info("sink %s stops and keeps its position", name)
        self._ending[name] = threading.Thread(target=worker.end, name=f"end-{name}", daemon=True)
        self._ending[name].start()
