"""Millrace's own views as a contender: capture, and the process that computes the views.

The views process hands its rows to the capture process, which appends them to the log. So CPU is that of both, while
the source does nothing.
"""

import http.client
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from bench import cpu_meter
from bench.sinks.pipeline import Process, SinkEnvironment
from bench.views.peers import Arrivals
from bench.views.place import ViewPipeline
from bench.views.workloads import Workload
from cdc.model import Lsn, TableId
from cdc.ports import LogReader, Offset
from sinks.opensearch.mapping import index_name

_POLL_SECONDS = 0.002
_PROBE_SECONDS = 0.02
_INDEX_PREFIX = "bench-"
Figures = dict[str, Any]


def pipeline_of(environment: SinkEnvironment, workload: Workload) -> ViewPipeline:
    """A pipeline over the segment log with the view of a workload, not started."""
    home = environment.home / f"millrace-{workload.name}"
    return ViewPipeline(environment, "segments", home, tables=workload.tables, views=(workload.view,))


def catch_up(pipeline: ViewPipeline, workload: Workload, churn: Callable[[], int]) -> Figures:
    """`churn` makes the backlog while the view does not run. The first batch, with the start of the process, is not
    counted."""
    capture = pipeline.start("capture")
    loaded = pipeline.captured()
    views, log = pipeline.start("views"), pipeline.log()
    cpu_meter.wait(lambda: views.alive() and pipeline.computed(loaded), "the loaded rows", 1800)
    views.end()
    changes, target = churn(), pipeline.captured()
    views = pipeline.start("views")
    steps: list[Step] = []
    with LogArrivals(log, workload.view["name"], lambda commit: steps.append(_step(commit, views, capture))):
        cpu_meter.wait(lambda: views.alive() and pipeline.computed(target), "the backlog", 1800, 0.05)
    if len(steps) < 2:
        raise RuntimeError("all changes came in one batch: ask for more CHANGES")
    first, last = steps[0], steps[-1]
    counted = _changes_between(log, first.commit, last.commit, workload.tables)
    return {
        "events_per_s": round(counted / (last.monotonic - first.monotonic)),
        "cpu_us_per_event": round((last.cpu - first.cpu) / counted * 1e6, 1),
        "counted": counted,
        "changes": changes,
        "load": cpu_meter.load(),
    }


@dataclass(frozen=True, slots=True)
class Step:
    """Rows of the view in the log: the commit that they reflect, the time, and the CPU used so far."""

    commit: int
    monotonic: float
    cpu: float


def _step(commit: int, *processes: Process) -> Step:
    return Step(commit, time.monotonic(), sum(process.cpu() for process in processes))


def _reached(log: LogReader, name: str) -> int:
    return max((int(consumer.reached) for consumer in log.consumers() if consumer.name == name), default=0)


def _changes_between(log: LogReader, after: int, until: int, tables: Sequence[str]) -> int:
    names = pa.array(list(tables))
    count = 0
    for piece in log.read(log.seek(Lsn(after))):
        rows = piece.rows.filter(pc.is_in(piece.rows["table"], value_set=names))
        commits = rows["commit_lsn"].to_numpy()
        count += int(np.sum((commits > after) & (commits <= until)))
    return count


class LogArrivals(Arrivals):
    """Rows of a view in the log. `seen` gets the newest commit LSN of each piece of the log that has any."""

    def __init__(self, log: LogReader, view: str, seen: Callable[[int], None] | None = None) -> None:
        super().__init__()
        self._log, self._table, self._seen = log, pa.scalar(str(TableId("view", view))), seen
        self._offset: Offset = log.head()[0]

    def _run(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            for piece in self._log.read(self._offset):
                self._offset = piece.offset
                rows = piece.rows.filter(pc.equal(piece.rows["table"], self._table))
                if rows.num_rows:
                    self.note(pc.max(rows["commit_ts"]).cast(pa.int64()).as_py())
                    if self._seen:
                        self._seen(pc.max(rows["commit_lsn"]).as_py())


# -- into a store


@dataclass(frozen=True, slots=True)
class Probe:
    """A change of one order, and the place of its document."""

    dsn: str
    url: str
    index: str

    def age(self, order: int, text: str) -> float:
        """Seconds from the commit of a change until its document in OpenSearch has it, read by its id."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f"update public.orders set status = '{text}' where id = {order}".encode())
        committed = time.time()
        cpu_meter.wait(lambda: self._status(order) == text, f"order {order} in OpenSearch", 60, _PROBE_SECONDS / 10)
        return time.time() - committed

    def _status(self, order: int) -> str | None:
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        try:
            connection.request("GET", f"/{self.index}/_doc/{order}")
            found: Mapping[str, Any] = json.loads(connection.getresponse().read())
        finally:
            connection.close()
        source = found.get("_source")
        return None if source is None else source["status"]


def into_opensearch(pipeline: ViewPipeline, workload: Workload, scale: int, rate: float, seconds: float) -> Figures:
    """Documents only: probes one after the other, while the usual load goes on. The index is filled before."""
    environment = pipeline.environment
    view = TableId("view", workload.view["name"])
    url = environment.servers["opensearch"].address
    sink = {"kind": "opensearch", "name": "documents", "url": url, "prefix": _INDEX_PREFIX, "replicas": 0}
    pipeline.sinks = [sink]
    apply = pipeline.start("apply")
    probe = Probe(environment.database.dsn, url, index_name(_INDEX_PREFIX, view))
    ages: list[float] = []
    try:
        target, log = pipeline.captured(), pipeline.log()
        cpu_meter.wait(lambda: apply.alive() and _reached(log, "documents") >= target, "the documents", 1800, 0.5)
        load = threading.Thread(
            target=workload.commit_steadily, args=(environment.database.dsn, rate, seconds, scale, 900)
        )
        load.start()
        rng = random.Random(7)
        while load.is_alive():
            ages.append(probe.age(rng.randint(1, scale * 1_000), f"probe {len(ages)}"))
        load.join()
    finally:
        apply.end()
    return {"opensearch_latency_ms": cpu_meter.percentiles(ages), "opensearch_probes": len(ages)}
