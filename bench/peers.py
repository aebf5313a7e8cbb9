"""The others: pg_recvlogical into nothing, and Debezium in Kafka Connect into Kafka."""

import contextlib
import json
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Mapping
from typing import Any

import psycopg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from bench.meter import cpu_seconds, peak_rss_mb, wait
from bench.rival import Throughput
from bench.workload import Churned
from cdc.model import Lsn, format_lsn
from deploy.local import postgres

TABLE = "public.bench_orders"


class RecvLogical:
    """Postgres's own client, output to /dev/null: what decoding and sending cost at least."""

    name = "pg_recvlogical"

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn
        self._slot = "bench_recvlogical"

    def begin(self) -> None:
        """Publication and slot."""
        execute(
            self._dsn, f"drop publication if exists {self._slot}", f"create publication {self._slot} for table {TABLE}"
        )
        execute(self._dsn, f"select pg_create_logical_replication_slot('{self._slot}', 'pgoutput')")

    def catch_up(self, churned: Churned, target: int) -> Throughput:
        """Run it to the end of the WAL."""
        program = postgres.binaries() / "pg_recvlogical"
        command = [str(program), "-d", self._dsn, "--slot", self._slot, "--start", "--no-loop", "-f", "/dev/null",
                   "-o", "proto_version=1", "-o", f"publication_names={self._slot}",
                   "--endpos", format_lsn(Lsn(target))]  # fmt: skip
        begun = time.monotonic()
        process = subprocess.Popen(command)
        peak, done = 0.0, 0
        while not done:
            # rusage's peak would count what the child shared with us before it became the program.
            with contextlib.suppress(OSError):
                peak = max(peak, peak_rss_mb(process.pid))
            time.sleep(0.02)
            done, code, used = os.wait4(process.pid, os.WNOHANG)
        seconds = time.monotonic() - begun
        process.returncode = os.waitstatus_to_exitcode(code)
        if process.returncode:
            raise RuntimeError(f"pg_recvlogical ended with {process.returncode}")
        cpu = used.ru_utime + used.ru_stime
        return Throughput(churned.changes / seconds, cpu / churned.changes * 1e6, peak)

    def watch(self) -> None:
        """Nothing is kept, so nothing can be consumed."""

    def latencies(self, expected: int) -> list[float]:
        """None."""
        return []

    def finish(self) -> None:
        """Drop slot and publication."""
        execute(self._dsn, f"select pg_drop_replication_slot('{self._slot}')", f"drop publication {self._slot}")


class Debezium:
    """The connector 3.6.2 in a worker of its own, tuned for latency as its documentation suggests."""

    name = "debezium_kafka"

    def __init__(self, dsn: str, source: Mapping[str, Any], bootstrap: str, url: str, pid: int) -> None:
        self._dsn, self._source = dsn, source
        self._bootstrap, self._url, self._pid = bootstrap, url, pid
        self._prefix = "bench_debezium"
        self._topic = f"{self._prefix}.{TABLE}"
        self._base = 0
        self._watcher: TopicWatcher | None = None

    def begin(self) -> None:
        """Start it, see one change come, wait until its position is stored, stop it."""
        self._rest("POST", "/connectors", {"name": self._prefix, "config": self._config()})
        wait(self._active, "the connector's slot", 120, 0.2)
        execute(self._dsn, f"update {TABLE} set qty = qty where id = 1")
        wait(lambda: end_of(self._bootstrap, self._topic) >= 1, "the connector's first message", 120, 0.2)
        time.sleep(3)  # the worker stores positions once a second, and says nothing when it has
        self._rest("PUT", f"/connectors/{self._prefix}/stop")
        wait(lambda: not self._active(), "the connector to stop", 60, 0.2)
        self._base = end_of(self._bootstrap, self._topic)

    def catch_up(self, churned: Churned, target: int) -> Throughput:
        """Between the first and the last message, by the broker's timestamps. Deletes bring a tombstone each."""
        last = self._base + churned.changes + churned.deletes
        before = cpu_seconds(self._pid)
        self._rest("PUT", f"/connectors/{self._prefix}/resume")
        wait(lambda: end_of(self._bootstrap, self._topic) >= last, "the connector to catch up", 1800, 0.2)
        cpu = cpu_seconds(self._pid) - before
        seconds = stamp_at(self._bootstrap, self._topic, last - 1) - stamp_at(self._bootstrap, self._topic, self._base)
        return Throughput(churned.changes / seconds, cpu / churned.changes * 1e6, peak_rss_mb(self._pid))

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


class TopicWatcher:
    """Notes the age of every message as it arrives: committed messages only, fetches answered after 5 ms."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._ages: list[float] = []
        self._stop = threading.Event()
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "fetch.wait.max.ms": 5}
        )
        self._consumer.assign([TopicPartition(topic, 0, end_of(bootstrap, topic))])
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


def end_of(bootstrap: str, topic: str) -> int:
    """The offset after the last message of partition 0; 0 while there is no such topic."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "allow.auto.create.topics": False})
    try:
        found = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10, cached=False)
        return int(found[1]) if found else 0
    except KafkaException as error:
        if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
            return 0
        raise
    finally:
        consumer.close()


def stamp_at(bootstrap: str, topic: str, offset: int) -> float:
    """The timestamp of the message at an offset, or of the next one that can be seen."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False})
    consumer.assign([TopicPartition(topic, 0, offset)])
    try:
        while True:
            message = consumer.poll(10)
            if message is not None and message.error() is None:
                return float(message.timestamp()[1]) / 1000
    finally:
        consumer.close()
