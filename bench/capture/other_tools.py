"""The other contenders: pg_recvlogical to /dev/null, and Debezium in Kafka Connect to Kafka."""

import contextlib
import json
import os
import subprocess
import time
import urllib.request

import psycopg

from bench.capture.watchers import OutputWatcher, TopicEnd, TopicWatcher
from bench.cpu_meter import cpu_seconds, peak_rss_mb, wait
from bench.environment import Database
from bench.workload import TABLE, Churned, churn
from cdc.model import Lsn, format_lsn
from deploy.local import postgres
from deploy.local.server import Running

_CONNECTION = {"hostname": "host", "port": "port", "user": "user", "password": "password", "dbname": "database"}
_WARM_CHANGES = 20_000
"""Changes that Debezium processes before it is measured, so that its JVM has compiled the code."""


class RecvLogical:
    """Postgres's own client with output to /dev/null: the minimum cost of decoding and sending."""

    name = "pg_recvlogical"
    slot = "bench_recvlogical"

    def __init__(self, database: Database) -> None:
        self._database = database
        self._process: subprocess.Popen[bytes] | None = None
        self._used = 0.0
        self._peak = 0.0
        self._watcher: OutputWatcher | None = None

    def begin(self) -> None:
        """Publication and slot."""
        self._database.execute(
            f"create publication {self.slot} for table {TABLE}",
            f"select pg_create_logical_replication_slot('{self.slot}', 'pgoutput')",
        )

    def resume(self, target: int) -> None:
        """Start it; it ends by itself after that LSN."""
        self._process = self._started("/dev/null", "--endpos", format_lsn(Lsn(target)))

    def reached(self, churned: Churned, target: int) -> bool:
        """Whether it has ended; it confirms its end position before that."""
        if self._process is None:
            return True
        self._look()
        done, code, used = os.wait4(self._process.pid, os.WNOHANG)
        if not done:
            return False
        self._process.returncode = os.waitstatus_to_exitcode(code)
        if self._process.returncode:
            raise RuntimeError(f"pg_recvlogical ended with {self._process.returncode}")
        self._used, self._process = used.ru_utime + used.ru_stime, None
        return True

    def check(self, churned: Churned) -> None:
        """It stores nothing that could be counted."""

    def cpu(self) -> float:
        """Of the process that ran last."""
        return self._used if self._process is None else cpu_seconds(self._process.pid)

    def peak_rss_mb(self) -> float:
        """Of both processes."""
        self._look()
        return self._peak

    def watch(self) -> None:
        """Its output, straight into a pipe."""
        self._process = self._started("-", "-F", "0")
        self._watcher = OutputWatcher(self._process)

    def latencies(self, expected: int) -> list[float]:
        """From a commit's time to its message in the pipe."""
        return self._watcher.stop(expected) if self._watcher else []

    def finish(self) -> None:
        """Drop slot and publication."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(60)
        self._database.drop_stream(self.slot)

    def _started(self, output: str, *more: str) -> subprocess.Popen[bytes]:
        program = postgres.binaries() / "pg_recvlogical"
        command = [str(program), "-d", self._database.dsn, "--slot", self.slot, "--start", "--no-loop", "-f", output,
                   "-o", "proto_version=1", "-o", f"publication_names={self.slot}", *more]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE if output == "-" else None, bufsize=0)

    def _look(self) -> None:
        """rusage's peak would include memory that the child shared with this process before exec."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._peak = max(self._peak, peak_rss_mb(self._process.pid))


class Debezium:
    """The connector 3.6.2 in a worker of its own, tuned for latency as its documentation suggests."""

    name = "debezium_kafka"
    slot = "bench_debezium"

    def __init__(self, database: Database, bootstrap: str, worker: Running) -> None:
        self._database, self._bootstrap, self._worker = database, bootstrap, worker
        self._topic = f"{self.slot}.{TABLE}"
        self._end = TopicEnd(bootstrap, self._topic)
        self._base = 0
        self._watcher: TopicWatcher | None = None

    def begin(self) -> None:
        """Start it, warm it up with some work, wait until its position is stored, stop it."""
        self._rest("POST", "/connectors", {"name": self.slot, "config": self._config()})
        wait(self._active, "the connector's slot", 120, 0.2)
        done = churn(self._database.dsn, _WARM_CHANGES, 1000)
        wait(lambda: self._end.now() >= done.changes + done.deletes, "the connector's first messages", 120, 0.2)
        time.sleep(3)  # the worker stores positions once a second and does not report it
        self._rest("PUT", f"/connectors/{self.slot}/stop")
        wait(lambda: not self._active(), "the connector to stop", 60, 0.2)
        self._base = self._end.now()

    def snapshot(self) -> None:
        """Begin with a snapshot of the whole table."""
        config = {**self._config(), "snapshot.mode": "initial"}
        self._rest("POST", "/connectors", {"name": self.slot, "config": config})

    def messages(self) -> int:
        """The number of messages in its topic."""
        return self._end.now()

    def resume(self, target: int) -> None:
        """Resume the connector; the worker runs already."""
        self._rest("PUT", f"/connectors/{self.slot}/resume")

    def reached(self, churned: Churned, target: int) -> bool:
        """Whether its topic has all changes, and a tombstone for each delete."""
        return self._end.now() >= self._base + churned.changes + churned.deletes

    def check(self, churned: Churned) -> None:
        """Count the messages of its topic."""
        if (found := self._end.now() - self._base) != churned.changes + churned.deletes:
            raise RuntimeError(f"{self.name}: {found} messages for {churned.changes} changes")

    def cpu(self) -> float:
        """Of the worker."""
        return cpu_seconds(self._worker.pid)

    def peak_rss_mb(self) -> float:
        """Of the worker."""
        return peak_rss_mb(self._worker.pid)

    def watch(self) -> None:
        """Consume from the end."""
        self._watcher = TopicWatcher(self._bootstrap, self._topic)

    def latencies(self, expected: int) -> list[float]:
        """From `source.ts_us` to the consumer."""
        return self._watcher.stop(expected) if self._watcher else []

    def finish(self) -> None:
        """Delete the connector, then its slot."""
        self._rest("DELETE", f"/connectors/{self.slot}")
        wait(lambda: not self._active(), "the connector to let go of its slot", 60, 0.2)
        self._database.drop_stream(self.slot)

    def _active(self) -> bool:
        with psycopg.connect(self._database.dsn) as connection:
            stream_start = "select 1 from pg_replication_slots where slot_name = %s and active"
            return connection.execute(stream_start, (self.slot,)).fetchone() is not None

    def _config(self) -> dict[str, str]:
        return {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "topic.prefix": self.slot,
            "slot.name": self.slot,
            "publication.name": self.slot,
            "publication.autocreate.mode": "filtered",
            "table.include.list": TABLE,
            "snapshot.mode": "no_data",
            **{f"database.{theirs}": str(self._database.source[ours]) for theirs, ours in _CONNECTION.items()},
            "poll.interval.ms": "10",
            "max.batch.size": "8192",
            "max.queue.size": "32768",
            "producer.override.compression.type": "lz4",
            "producer.override.batch.size": "262144",
            "topic.creation.default.replication.factor": "1",
            "topic.creation.default.partitions": "1",
        }

    def _rest(self, method: str, path: str, body: object = None) -> None:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._worker.address + path, data, {"Content-Type": "application/json"}, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            answer.read()
