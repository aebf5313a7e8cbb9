"""Millrace's capture process as a contender, as the daemon runs it."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psycopg
import yaml

import cdc.log
from bench import meter
from bench.peers import TABLE, TopicWatcher, execute
from bench.workload import Churned
from cdc.model import Lsn, parse_lsn
from cdc.ports import LogReader
from cdc.service import part, status
from cdc.service.supervisor import CAPTURE_ENVIRONMENT


class Millrace:
    """The capture process into one kind of log."""

    def __init__(self, kind: str, dsn: str, source: Mapping[str, Any], log: Mapping[str, Any], folder: Path) -> None:
        self.name = f"millrace_{kind}"
        self.slot = f"bench_{kind}"
        self._dsn, self._folder = dsn, folder
        self._log = log
        self._config = folder / "millrace.yaml"
        own = {**source, "slot": self.slot, "publication": self.slot, "heartbeat_seconds": 1.0,
               "tables": [{"name": TABLE, "snapshot": "never"}]}  # fmt: skip
        folder.mkdir(parents=True)
        self._config.write_text(yaml.safe_dump({"state": str(folder / "state"), "source": own, "log": dict(log)}))
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: LogReader = cdc.log.open_reader(part.settings_from(self._config))
        self._base = Lsn(0)
        self._follower: LogFollower | TopicWatcher | None = None

    def begin(self) -> None:
        """Start it, see it stream, stop it."""
        self._start()
        wanted = wal_end(self._dsn)
        meter.wait(lambda: self._facts().get("watermark", 0) >= wanted, "capture to stream", 60)
        self._end()

    def resume(self, target: int) -> None:
        """Start the process."""
        self._base = self._reader.head()[1]
        self._start()

    def reached(self, churned: Churned, target: int) -> bool:
        """The log shows only what is durable."""
        if self._process is None or self._process.poll() is not None:
            raise RuntimeError(f"{self.name} ended; see {self._folder / 'capture.log'}")
        return self._reader.head()[1] >= target

    def check(self, churned: Churned) -> None:
        """Count the rows of the log."""
        found = sum(piece.rows.num_rows for piece in self._reader.read(self._reader.seek(self._base)))
        if found != churned.changes:
            raise RuntimeError(f"{self.name}: {found} changes in the log, {churned.changes} were made")

    def cpu(self) -> float:
        """Of the capture process."""
        return meter.cpu_seconds(self._pid)

    def peak_rss_mb(self) -> float:
        """Of the capture process."""
        return meter.peak_rss_mb(self._pid)

    def watch(self) -> None:
        """A consumer of the log: a topic's, or one that looks every two milliseconds."""
        if self._log["kind"] == "kafka":
            self._follower = TopicWatcher(self._log["bootstrap"], f"{self._log['prefix']}.{TABLE}")
        else:
            self._follower = LogFollower(self._reader)

    def latencies(self, expected: int) -> list[float]:
        """From the commit's time to the consumer."""
        return self._follower.stop(expected) if self._follower else []

    def finish(self) -> None:
        """Stop, and drop slot and publication."""
        self._end()
        execute(self._dsn, f"select pg_drop_replication_slot('{self.slot}')", f"drop publication {self.slot}")

    @property
    def _pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def _facts(self) -> dict[str, Any]:
        facts = status.read(self._folder / "state", "capture")
        return facts if facts.get("pid") == self._pid else {}

    def _start(self) -> None:
        command = [sys.executable, "-m", "cdc.service.capture", "--config", str(self._config)]
        with (self._folder / "capture.log").open("ab") as said:
            own = {**os.environ, **CAPTURE_ENVIRONMENT}
            self._process = subprocess.Popen(command, stdout=said, stderr=said, env=own)

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
