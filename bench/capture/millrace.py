"""Millrace's capture process as a contender, as the daemon runs it."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

import cdc.log
from bench import cpu_meter
from bench.capture.watchers import LogWatcher, TopicWatcher, Watcher
from bench.environment import Database
from bench.workload import TABLE, Churned
from cdc.model import Lsn
from cdc.ports import LogReader
from cdc.service.daemon import process
from cdc.service.daemon.supervisor import CAPTURE_ENVIRONMENT
from cdc.service.state import status


class Millrace:
    """The capture process into one kind of log."""

    def __init__(self, kind: str, database: Database, log: Mapping[str, Any], folder: Path) -> None:
        self.name = f"millrace_{kind}"
        self.slot = f"bench_{kind}"
        self._database, self._folder = database, folder
        self._log = log
        self._config = folder / "millrace.yaml"
        own = {**database.source, "slot": self.slot, "publication": self.slot, "heartbeat_seconds": 1.0,
               "tables": [{"name": TABLE, "snapshot": "never"}]}  # fmt: skip
        folder.mkdir(parents=True)
        self._config.write_text(yaml.safe_dump({"state": str(folder / "state"), "source": own, "log": dict(log)}))
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: LogReader = cdc.log.open_reader(process.settings_from(self._config))
        self._base = Lsn(0)
        self._watcher: Watcher | None = None

    def begin(self) -> None:
        """Start it, wait until it streams, stop it."""
        self._start()
        wanted = self._database.wal_end()
        cpu_meter.wait(lambda: self._facts().get("watermark", 0) >= wanted, "capture to stream", 60)
        self._end()

    def resume(self, target: int) -> None:
        """Start the process."""
        self._base = self._reader.head()[1]
        self._start()

    def reached(self, churned: Churned, target: int) -> bool:
        """Whether the log has reached the target; readers see durable changes only."""
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
        return cpu_meter.cpu_seconds(self._pid)

    def peak_rss_mb(self) -> float:
        """Of the capture process."""
        return cpu_meter.peak_rss_mb(self._pid)

    def watch(self) -> None:
        """Start a consumer of the log: a Kafka consumer, or a reader that polls every two milliseconds."""
        if self._log["kind"] == "kafka":
            self._watcher = TopicWatcher(self._log["bootstrap"], f"{self._log['prefix']}.{TABLE}")
        else:
            self._watcher = LogWatcher(self._reader)

    def latencies(self, expected: int) -> list[float]:
        """From the commit's time to the consumer."""
        return self._watcher.stop(expected) if self._watcher else []

    def finish(self) -> None:
        """Stop, and drop slot and publication."""
        self._end()
        self._database.drop_stream(self.slot)

    @property
    def _pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def _facts(self) -> dict[str, Any]:
        facts = status.read(self._folder / "state", "capture")
        return facts if facts.get("pid") == self._pid else {}

    def _start(self) -> None:
        command = [sys.executable, "-m", "cdc.service.capture.process", "--config", str(self._config)]
        with (self._folder / "capture.log").open("ab") as output:
            own = {**os.environ, **CAPTURE_ENVIRONMENT}
            self._process = subprocess.Popen(command, stdout=output, stderr=output, env=own)

    def _end(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(60)
