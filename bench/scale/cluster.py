"""A pipeline whose tasks run on a Spark standalone cluster of this machine, over a log that was filled beforehand."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import yaml

import cdc.log
from bench import cpu_meter
from bench.environment import Workspace, workspace
from bench.sinks.batches import TABLE, batch_of
from bench.sinks.pipeline import Positions, Process
from cdc.model import LOG_SCHEMA, Entry, Lsn
from cdc.service.daemon import process as part
from deploy.local.cluster import spark
from deploy.local.cluster.spark import MASTER, SparkMaster, SparkWorker
from deploy.local.opensearch import OpenSearch
from deploy.local.redis import Redis
from deploy.local.server import Running

_ENTRY_ROWS = 2_000
_CORES = 2


@dataclass(frozen=True, slots=True)
class ClusterEnvironment:
    """The stores, and a cluster whose workers are started when they are needed."""

    place: Workspace
    servers: Mapping[str, Running]

    def workers(self, count: int) -> list[Running]:
        """So many running workers of two cores each."""
        names = [SparkWorker(number).name for number in range(1, count + 1)]
        running = self.place.up(MASTER, *names)
        return [running[name] for name in names]

    def spark(self, tasks: int) -> dict[str, Any]:
        """The section `spark` of a pipeline with so many tasks per batch."""
        master = self.place.up(MASTER)[MASTER].address
        conf = {"spark.authenticate": "true", "spark.default.parallelism": str(tasks)}
        secret = spark.secret(self.place.private()).reveal()
        return {"master": master, "memory": "1g", "conf": conf, "secrets": {"spark.authenticate.secret": secret}}


@contextlib.contextmanager
def cluster_environment(workers: int) -> Iterator[ClusterEnvironment]:
    """Start the stores; stop and remove everything at the end."""
    nodes = [SparkWorker(number, _CORES) for number in range(1, workers + 1)]
    with workspace("scale", Redis(), OpenSearch(), SparkMaster(), *nodes) as place:
        yield ClusterEnvironment(place, place.up("redis", "opensearch"))


def fill_log(state: Path, changes: int, keys: int = 0) -> Lsn:
    """A segment log with updates of random keys, as capture would have written them; returns its end. With `keys` 0
    each change has a key of its own: a fold leaves as many rows as there are changes, however large the batch."""
    state.mkdir(mode=0o700, parents=True)
    config = state.parent / "fill.yaml"
    config.write_text(yaml.safe_dump({"state": str(state)}), encoding="utf-8")
    writer = cdc.log.open_writer(part.settings_from(config))
    writer.schemas.record(TABLE)
    random = np.random.default_rng(7)
    end = Lsn(1_000)
    try:
        for begin in range(0, changes, _ENTRY_ROWS):
            own = np.arange(begin, begin + _ENTRY_ROWS)
            ids = random.choice(keys, _ENTRY_ROWS, replace=False) if keys else own
            writer.append(Entry(_log_rows(ids, int(end) + 1), Lsn(int(end) + 10)))
            end = Lsn(int(end) + 10)
    finally:
        writer.close()
    return end


def _log_rows(ids: "np.typing.NDArray[np.int64]", version: int) -> pa.Table:
    folded = batch_of(ids, version).rows
    count = folded.num_rows
    columns: dict[str, Any] = {name: folded[name] for name in folded.column_names if name in LOG_SCHEMA.names}
    columns |= {
        "op": pa.array(["u"] * count),
        "before": pa.nulls(count, pa.string()),
        "commit_lsn": pa.array(np.full(count, version + 1)),
        "ordinal": pa.array(np.arange(count)),
        "xid": pa.array(np.full(count, 7)),
        "commit_ts": pa.array([datetime.now(UTC)] * count, pa.timestamp("us", tz="UTC")),
    }
    return pa.table([columns[name] for name in LOG_SCHEMA.names], names=LOG_SCHEMA.names).cast(LOG_SCHEMA)


@dataclass(frozen=True, slots=True)
class ClusterRun:
    """One catch-up: changes after the first batch, seconds, and CPU seconds of driver and executors."""

    changes: int
    seconds: float
    driver: float
    executors: float
    batches: int

    @property
    def rate(self) -> int:
        """Changes per second."""
        return round(self.changes / self.seconds)

    def figures(self) -> dict[str, float]:
        """For the results."""
        return {
            "changes": self.changes,
            "batches": self.batches,
            "changes_per_s": self.rate,
            "driver_cpu_us_per_change": round(self.driver / self.changes * 1e6, 2),
            "executor_cpu_us_per_change": round(self.executors / self.changes * 1e6, 2),
            "share_outside_driver": round(self.executors / (self.driver + self.executors), 3),
            "load": cpu_meter.load(),
        }


def catch_up(
    environment: ClusterEnvironment, folder: Path, section: Mapping[str, Any], tasks: int, end: Lsn
) -> ClusterRun:
    """Apply a filled log to one store from its beginning. The first batch, with the start of everything, does not
    count."""
    workers = environment.workers(max(1, -(-tasks // _CORES)))
    config = folder / "apply.yaml"
    config.touch(mode=0o600)
    sections = {"state": str(folder / "state"), "sinks": [dict(section)], "spark": environment.spark(tasks)}
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    log = cdc.log.open_reader(part.settings_from(config))
    apply = Process("apply", config)
    apply.start()
    try:
        with Positions(log, [str(section["name"])]) as positions:
            steps = positions.steps[str(section["name"])]
            cpu_meter.wait(lambda: apply.alive() and steps, "the first batch", 600, 0.005)
            used = apply.cpu(), sum(cpu_meter.tree_cpu(worker.pid) for worker in workers)
            begun = len(steps)
            first = steps[begun - 1]
            cpu_meter.wait(lambda: apply.alive() and positions.reached() >= end, "the last batch", 1800, 0.01)
            driver = apply.cpu() - used[0]
            executors = sum(cpu_meter.tree_cpu(worker.pid) for worker in workers) - used[1]
    finally:
        apply.end()
    changes = (int(end) - first.reached) // 10 * _ENTRY_ROWS
    if not changes:
        raise RuntimeError("all changes came in one batch: ask for more CHANGES")
    return ClusterRun(changes, steps[-1].monotonic - first.monotonic, driver, executors, len(steps) - begun)
