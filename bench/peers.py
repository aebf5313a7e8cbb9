"""The others: pg_recvlogical into nothing, and Debezium in Kafka Connect into Kafka."""

import contextlib
import json
import os
import re
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from bench.meter import cpu_seconds, peak_rss_mb, wait
from bench.workload import Churned, churn
from cdc.model import Lsn, format_lsn
from deploy.local import postgres

TABLE = "public.bench_orders"
_POSTGRES_EPOCH = 946_684_800
_WARM_CHANGES = 20_000
"""What a JVM is given to do before it is measured: Connect's process goes on running, so its code stays compiled."""


class RecvLogical:
    """Postgres's own client, output to /dev/null: what decoding and sending cost at least."""

    name = "pg_recvlogical"
    slot = "bench_recvlogical"

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._process: subprocess.Popen[bytes] | None = None
        self._used = 0.0
        self._peak = 0.0
        self._watcher: OutputWatcher | None = None

    def begin(self) -> None:
        """Publication and slot."""
        execute(self._dsn, f"create publication {self.slot} for table {TABLE}")
        execute(self._dsn, f"select pg_create_logical_replication_slot('{self.slot}', 'pgoutput')")

    def resume(self, target: int) -> None:
        """It ends by itself behind that LSN."""
        self._process = self._started("/dev/null", "--endpos", format_lsn(Lsn(target)))

    def reached(self, churned: Churned, target: int) -> bool:
        """It has ended: it confirms its end position first."""
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
        """Nothing is kept that could be counted."""

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
        execute(self._dsn, f"select pg_drop_replication_slot('{self.slot}')", f"drop publication {self.slot}")

    def _started(self, output: str, *more: str) -> subprocess.Popen[bytes]:
        program = postgres.binaries() / "pg_recvlogical"
        command = [str(program), "-d", self._dsn, "--slot", self.slot, "--start", "--no-loop", "-f", output,
                   "-o", "proto_version=1", "-o", f"publication_names={self.slot}", *more]  # fmt: skip
        return subprocess.Popen(command, stdout=subprocess.PIPE if output == "-" else None, bufsize=0)

    def _look(self) -> None:
        """rusage's peak would count what the child shared with us before it became the program."""
        if self._process is not None:
            with contextlib.suppress(OSError):
                self._peak = max(self._peak, peak_rss_mb(self._process.pid))


class Debezium:
    """The connector 3.6.2 in a worker of its own, tuned for latency as its documentation suggests."""

    name = "debezium_kafka"
    slot = "bench_debezium"

    def __init__(self, dsn: str, source: Mapping[str, Any], bootstrap: str, url: str, pid: int) -> None:
        self._dsn, self._source = dsn, source
        self._bootstrap, self._url, self._pid = bootstrap, url, pid
        self._prefix = self.slot
        self._topic = f"{self._prefix}.{TABLE}"
        self._end = TopicEnd(bootstrap, self._topic)
        self._base = 0
        self._watcher: TopicWatcher | None = None

    def begin(self) -> None:
        """Start it, have its code compiled by some work, wait until its position is stored, stop it."""
        self._rest("POST", "/connectors", {"name": self._prefix, "config": self._config()})
        wait(self._active, "the connector's slot", 120, 0.2)
        done = churn(self._dsn, _WARM_CHANGES, 1000)
        wait(lambda: self._end.now() >= done.changes + done.deletes, "the connector's first messages", 120, 0.2)
        time.sleep(3)  # the worker stores positions once a second, and says nothing when it has
        self._rest("PUT", f"/connectors/{self._prefix}/stop")
        wait(lambda: not self._active(), "the connector to stop", 60, 0.2)
        self._base = self._end.now()

    def snapshot(self) -> None:
        """Begin with a snapshot of the whole table."""
        config = {**self._config(), "snapshot.mode": "initial"}
        self._rest("POST", "/connectors", {"name": self._prefix, "config": config})

    def messages(self) -> int:
        """How many its topic holds."""
        return self._end.now()

    def resume(self, target: int) -> None:
        """The worker is up; its connector goes on."""
        self._rest("PUT", f"/connectors/{self._prefix}/resume")

    def reached(self, churned: Churned, target: int) -> bool:
        """Deletes bring a tombstone each."""
        return self._end.now() >= self._base + churned.changes + churned.deletes

    def check(self, churned: Churned) -> None:
        """Not one message too many."""
        if (found := self._end.now() - self._base) != churned.changes + churned.deletes:
            raise RuntimeError(f"{self.name}: {found} messages for {churned.changes} changes")

    def cpu(self) -> float:
        """Of the worker."""
        return cpu_seconds(self._pid)

    def peak_rss_mb(self) -> float:
        """Of the worker."""
        return peak_rss_mb(self._pid)

    def watch(self) -> None:
        """Consume from the end."""
        self._watcher = TopicWatcher(self._bootstrap, self._topic)

    def latencies(self, expected: int) -> list[float]:
        """From `source.ts_us` to the consumer."""
        return self._watcher.stop(expected) if self._watcher else []

    def finish(self) -> None:
        """Delete the connector, then its slot."""
        self._rest("DELETE", f"/connectors/{self._prefix}")
        wait(lambda: not self._active(), "the connector to let go of its slot", 60, 0.2)
        execute(self._dsn, f"select pg_drop_replication_slot('{self._prefix}')", f"drop publication {self._prefix}")

    def _active(self) -> bool:
        with psycopg.connect(self._dsn) as connection:
            asked = "select 1 from pg_replication_slots where slot_name = %s and active"
            return connection.execute(asked, (self._prefix,)).fetchone() is not None

    def _config(self) -> dict[str, str]:
        return {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "topic.prefix": self._prefix,
            "slot.name": self._prefix,
            "publication.name": self._prefix,
            "publication.autocreate.mode": "filtered",
            "table.include.list": TABLE,
            "snapshot.mode": "no_data",
            "database.hostname": str(self._source["host"]),
            "database.port": str(self._source["port"]),
            "database.user": str(self._source["user"]),
            "database.password": str(self._source["password"]),
            "database.dbname": str(self._source["database"]),
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
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=60) as answer:
            answer.read()


class OutputWatcher:
    """Notes the age of every Commit message that pg_recvlogical writes, each ended by a line feed."""

    _COMMIT = re.compile(rb"C\0.{16}(.{8})\n", re.DOTALL)

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._ages: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        assert self._process.stdout is not None
        held = b""
        while data := self._process.stdout.read(1 << 16):
            now, held, end = time.time(), held + data, 0
            for found in self._COMMIT.finditer(held):
                end = found.end()
                age = now - int.from_bytes(found[1], "big", signed=True) / 1e6 - _POSTGRES_EPOCH
                if -1 < age < 3600:  # a row's bytes may look like a commit, but not one of the last hour
                    self._ages.append(age)
            held = held[end:][-64:]

    def stop(self, expected: int) -> list[float]:
        """Every age, once all have come."""
        try:
            wait(lambda: len(self._ages) >= expected, "the last commits", 60)
        finally:
            self._process.terminate()
            self._thread.join()
        return self._ages


class TopicWatcher:
    """Notes the age of every message as it arrives: committed messages only, fetches answered after 5 ms."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._ages: list[float] = []
        self._stop = threading.Event()
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "fetch.wait.max.ms": 5}
        )
        self._consumer.assign([TopicPartition(topic, 0, TopicEnd(bootstrap, topic).now())])
        self._consumer.poll(1.0)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            for message in self._consumer.consume(1000, 0.01):
                value = message.value()
                if message.error() is None and value is not None:
                    self._ages.append(time.time() - json.loads(value)["source"]["ts_us"] / 1e6)
        self._consumer.close()

    def stop(self, expected: int) -> list[float]:
        """Every age, once all have come or a minute has passed."""
        try:
            wait(lambda: len(self._ages) >= expected, "the last messages", 60)
        finally:
            self._stop.set()
            self._thread.join()
        return self._ages


def execute(dsn: str, *statements: str) -> None:
    """Each in its own transaction."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


class TopicEnd:
    """Asks for the offset after the last message of partition 0, as often as wanted over one connection."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._place = TopicPartition(topic, 0)
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "allow.auto.create.topics": False}
        )

    def now(self) -> int:
        """0 while there is no such topic."""
        try:
            found = self._consumer.get_watermark_offsets(self._place, timeout=10, cached=False)
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                return 0
            raise
        return int(found[1]) if found else 0
