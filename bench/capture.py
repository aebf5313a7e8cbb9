"""From the WAL into a log, side by side on the same work: pg_recvlogical, Millrace twice, Debezium.

    python -m bench.capture        (ROWS, CHANGES, SECONDS, TPS, ONLY from the environment)

Each contender gets a freshly loaded table, a backlog of CHANGES row changes to catch up with, and then TPS one-row
transactions a second for SECONDS. CPU is the contender's own process, without its start and without broker or server.
"""

import contextlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import yaml

import cdc.log
from bench import meter, workload
from bench.peers import TABLE, Debezium, RecvLogical, TopicWatcher, execute
from bench.rival import Rival, Throughput
from bench.workload import Churned
from cdc.model import parse_lsn
from cdc.ports import LogReader
from cdc.service import part, status
from deploy.local import postgres
from deploy.local.connect import Connect
from deploy.local.folders import cache_folder
from deploy.local.kafka import Kafka
from deploy.local.postgres import Postgres
from deploy.local.servers import Servers

RESULTS = Path(__file__).parent / "results" / "capture.json"
_POSTGRES = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min", "wal_compression": "off"}
_WARM_UP = 5.0
"""Seconds of the steady phase that are left out."""


class Millrace:
    """The capture process, as the daemon runs it."""

    def __init__(self, kind: str, dsn: str, source: Mapping[str, Any], log: Mapping[str, Any], folder: Path) -> None:
        self.name = f"millrace_{kind}"
        self._dsn, self._folder = dsn, folder
        self._slot = f"bench_{kind}"
        self._log = log
        self._config = folder / "millrace.yaml"
        own = {**source, "slot": self._slot, "publication": self._slot, "heartbeat_seconds": 1.0,
               "tables": [{"name": TABLE, "snapshot": "never"}]}  # fmt: skip
        folder.mkdir(parents=True)
        self._config.write_text(yaml.safe_dump({"state": str(folder / "state"), "source": own, "log": dict(log)}))
        self._process: subprocess.Popen[bytes] | None = None
        self._idle_cpu = 0.0
        self._follower: LogFollower | TopicWatcher | None = None

    def begin(self) -> None:
        """Start it, note what starting costs, stop it."""
        pid = self._start()
        wanted = wal_end(self._dsn)
        meter.wait(lambda: self._facts().get("watermark", 0) >= wanted, "capture to stream", 60)
        self._idle_cpu = meter.cpu_seconds(pid)
        self._end()

    def catch_up(self, churned: Churned, target: int) -> Throughput:
        """From the first append that a reader sees to the last."""
        log = self._reader()
        base = log.head()[1]
        pid = self._start()
        meter.wait(lambda: log.head()[1] > base, "the first append", 120, 0.02)
        begun = time.monotonic()
        meter.wait(lambda: log.head()[1] >= target, "capture to catch up", 1800, 0.05)
        seconds = time.monotonic() - begun
        cpu = meter.cpu_seconds(pid) - self._idle_cpu
        found = sum(piece.rows.num_rows for piece in log.read(log.seek(base)))
        if found != churned.changes:
            raise RuntimeError(f"{self.name}: {found} changes in the log, {churned.changes} were made")
        return Throughput(churned.changes / seconds, cpu / churned.changes * 1e6, meter.peak_rss_mb(pid))

    def watch(self) -> None:
        """A consumer of the log: a topic's, or one that looks every two milliseconds."""
        if self._log["kind"] == "kafka":
            self._follower = TopicWatcher(self._log["bootstrap"], f"{self._log['prefix']}.{TABLE}")
        else:
            self._follower = LogFollower(self._reader())

    def latencies(self, expected: int) -> list[float]:
        """From the commit's time to the consumer."""
        return self._follower.stop(expected) if self._follower else []

    def finish(self) -> None:
        """Stop, and drop slot and publication."""
        self._end()
        execute(self._dsn, f"select pg_drop_replication_slot('{self._slot}')", f"drop publication {self._slot}")

    def _reader(self) -> LogReader:
        return cdc.log.open_reader(part.settings_from(self._config))

    def _facts(self) -> dict[str, Any]:
        facts = status.read(self._folder / "state", "capture")
        return facts if self._process is not None and facts.get("pid") == self._process.pid else {}

    def _start(self) -> int:
        said = (self._folder / "capture.log").open("ab")
        command = [sys.executable, "-m", "cdc.service.capture", "--config", str(self._config)]
        self._process = subprocess.Popen(command, stdout=said, stderr=said)
        return self._process.pid

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)


class LogFollower:
    """Notes the age of every row as a reader of the log first sees it."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._ages: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        after = self._log.head()[0]
        while not self._stop.wait(0.002):
            if self._log.head()[0] == after:
                continue
            for piece in self._log.read(after):
                now = time.time()
                after = piece.offset
                times: list[Any] = piece.rows.column("commit_ts").to_pylist()
                self._ages += [now - at.timestamp() for at in times]

    def stop(self, expected: int) -> list[float]:
        """Every age, once all have come."""
        try:
            meter.wait(lambda: len(self._ages) >= expected, "the last rows", 60)
        finally:
            self._stop.set()
            self._thread.join()
        return self._ages


def wal_end(dsn: str) -> int:
    """Where the WAL ends now."""
    with psycopg.connect(dsn) as connection:
        row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
    assert row is not None
    return int(parse_lsn(row[0]))


def measure(rival: Rival, dsn: str, rows: int, changes: int, seconds: float, tps: float) -> dict[str, object]:
    """One contender from a fresh table to its end."""
    workload.load(dsn, rows)
    before = meter.load()
    rival.begin()
    churned = workload.churn(dsn, changes, rows)
    throughput = rival.catch_up(churned, wal_end(dsn))
    rival.watch()
    done = workload.steady(dsn, tps, seconds, rows)
    ages = rival.latencies(done.transactions)
    rival.finish()
    warm = ages[int(min(_WARM_UP, seconds / 4) * tps) :]
    return {
        "changes_per_s": round(throughput.changes_per_s),
        "cpu_us_per_change": round(throughput.cpu_us_per_change, 1),
        "peak_rss_mb": throughput.peak_rss_mb,
        "latency_ms": meter.percentiles(warm) if warm else None,
        "load": {"before": before, "after": meter.load()},
    }


@contextlib.contextmanager
def servers() -> Iterator[tuple[Servers, Mapping[str, Any], Path]]:
    """Postgres, Kafka and Connect of our own, gone afterwards."""
    base = cache_folder() / "bench"
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    home = Path(tempfile.mkdtemp(prefix="capture-", dir=base))
    home.chmod(0o711)
    every = (Postgres(_POSTGRES), Kafka(), Connect({"offset.flush.interval.ms": "1000"}))
    own = Servers(home, {server.name: server for server in every}, tied=True)
    try:
        yield own, own.up(("postgres", "kafka")), home
    finally:
        own.down()
        shutil.rmtree(home, ignore_errors=True)


def contenders(own: Servers, running: Mapping[str, Any], home: Path) -> Mapping[str, Callable[[], Rival]]:
    """Made one after the other, so that no idle one takes CPU from another."""
    database = running["postgres"]
    dsn = postgres.dsn(database.port, postgres.passfile(own.private()), "bench")
    secret = postgres.password(own.private()).reveal()
    source = {"host": database.host, "port": database.port, "database": "bench", "user": "postgres", "password": secret}
    bootstrap = running["kafka"].address
    topic = {"kind": "kafka", "bootstrap": bootstrap, "prefix": "bench_millrace", "partitions": 1}

    def debezium() -> Rival:
        worker = own.up(("connect",))["connect"]
        return Debezium(dsn, source, bootstrap, worker.address, worker.pid)

    return {
        "pg_recvlogical": lambda: RecvLogical(dsn),
        "millrace_segments": lambda: Millrace("segments", dsn, source, {"kind": "segments"}, home / "segments"),
        "millrace_kafka": lambda: Millrace("kafka", dsn, source, topic, home / "kafka-log"),
        "debezium_kafka": debezium,
    }


def run() -> dict[str, object]:
    """Measure every contender (or those named in ONLY)."""
    sizes = {name: int(os.environ.get(name, usual)) for name, usual in (("ROWS", 1_000_000), ("CHANGES", 500_000))}
    seconds, tps = float(os.environ.get("SECONDS", "40")), float(os.environ.get("TPS", "500"))
    found: dict[str, dict[str, object]] = {}
    with servers() as (own, running, home):
        execute(postgres.dsn(running["postgres"].port, postgres.passfile(own.private())), "create database bench")
        dsn = postgres.dsn(running["postgres"].port, postgres.passfile(own.private()), "bench")
        for name, make in contenders(own, running, home).items():
            if name not in os.environ.get("ONLY", name):
                continue
            found[name] = measure(make(), dsn, sizes["ROWS"], sizes["CHANGES"], seconds, tps)
            print(f"{name:18} {json.dumps(found[name])}", flush=True)
    work = {"rows": sizes["ROWS"], "changes": sizes["CHANGES"], "seconds": seconds, "tps": tps}
    machine = {
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return {"workload": work, "machine": machine, "contenders": found, "ratios": ratios(found)}


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """How many times as fast and how many times as cheap as Debezium."""
    rival = found.get("debezium_kafka")
    if rival is None:
        return {}
    return {
        name: {
            "speed": round(each["changes_per_s"] / rival["changes_per_s"], 2),
            "cpu": round(rival["cpu_us_per_change"] / max(each["cpu_us_per_change"], 0.1), 2),
            "memory": round(rival["peak_rss_mb"] / each["peak_rss_mb"], 2),
        }
        for name, each in found.items()
    }


def main() -> None:
    """Print a table and write the results."""
    results = run()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results["ratios"], indent=1))


if __name__ == "__main__":
    main()
