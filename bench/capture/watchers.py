"""The age of each change when a consumer first sees it: in pg_recvlogical's output, in a topic, in a log."""

import json
import re
import subprocess
import threading
import time
from abc import ABC, abstractmethod
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from bench.cpu_meter import wait
from cdc.ports import LogReader

_POSTGRES_EPOCH = 946_684_800


class Watcher(ABC):
    """Records ages in a separate thread, from its creation until `stop`."""

    def __init__(self) -> None:
        self._ages: list[float] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @abstractmethod
    def _run(self) -> None:
        """Add to the ages until `stop`."""

    def stop(self, expected: int) -> list[float]:
        """Every age, once all changes have arrived. Raises TimeoutError after a minute."""
        try:
            wait(lambda: len(self._ages) >= expected, "the last changes", 60)
        finally:
            self._end()
            self._thread.join()
        return self._ages

    def _end(self) -> None:
        self._stop.set()


class OutputWatcher(Watcher):
    """Records the age of every Commit message in pg_recvlogical's output; each ends with a line feed."""

    _COMMIT = re.compile(rb"C\0.{16}(.{8})\n", re.DOTALL)

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        super().__init__()

    def _run(self) -> None:
        assert self._process.stdout is not None
        pending = b""
        while data := self._process.stdout.read(1 << 16):
            now, pending, end = time.time(), pending + data, 0
            for found in self._COMMIT.finditer(pending):
                end = found.end()
                age = now - int.from_bytes(found[1], "big", signed=True) / 1e6 - _POSTGRES_EPOCH
                if -1 < age < 3600:  # a row's bytes may look like a commit, but not one of the last hour
                    self._ages.append(age)
            pending = pending[end:][-64:]

    def _end(self) -> None:
        self._process.terminate()


class TopicWatcher(Watcher):
    """Records the age of every committed message as it arrives; empty fetches are answered after 5 ms."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "enable.auto.commit": False, "fetch.wait.max.ms": 5}
        )
        self._consumer.assign([TopicPartition(topic, 0, TopicEnd(bootstrap, topic).now())])
        self._consumer.poll(1.0)
        super().__init__()

    def _run(self) -> None:
        while not self._stop.is_set():
            for message in self._consumer.consume(1000, 0.01):
                value = message.value()
                if message.error() is None and value is not None:
                    self._ages.append(time.time() - json.loads(value)["source"]["ts_us"] / 1e6)
        self._consumer.close()


class LogWatcher(Watcher):
    """Records the age of every row when a reader of the log first sees it; polls every two milliseconds."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        super().__init__()

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


class TopicEnd:
    """The offset after the last message of partition 0, over one connection."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self._partition = TopicPartition(topic, 0)
        self._consumer = Consumer(
            {"bootstrap.servers": bootstrap, "group.id": "bench", "allow.auto.create.topics": False}
        )

    def now(self) -> int:
        """The offset now; 0 while the topic does not exist."""
        try:
            found = self._consumer.get_watermark_offsets(self._partition, timeout=10, cached=False)
        except KafkaException as error:
            if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                return 0
            raise
        return int(found[1]) if found else 0
