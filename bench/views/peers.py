"""Runs a peer in a process of its own, and sees when its results arrive."""

import bisect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from bench import cpu_meter
from bench.environment import folder

ROOT = Path(__file__).parents[2]
QUIX_STREAMS = "quixstreams==3.28.1"
PEERS: Mapping[str, str] = {
    "structured_streaming": "bench.views.structured",
    "quix_streams": "bench.views.quix",
}
Figures = dict[str, Any]


def python_of(peer: str) -> Path:
    """The Python of a peer. Quix Streams has an environment of its own, made the first time: it is no dependency."""
    if peer != "quix_streams":
        return Path(sys.executable)
    home = folder() / QUIX_STREAMS.replace("==", "-")
    python = home / "bin" / "python"
    if not (home / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", QUIX_STREAMS], check=True, timeout=600)
        (home / "ready").touch()
    return python


def create_topic(bootstrap: str, name: str) -> None:
    """Make a topic for results, with one partition."""
    admin = AdminClient({"bootstrap.servers": bootstrap})  # without a name it would be closed before the answer
    admin.create_topics([NewTopic(name, 1, 1)])[name].result(30)


class Peer:
    """A process that follows commands. Leaving the block ends it."""

    def __init__(self, name: str, settings: Mapping[str, Any], log: Path) -> None:
        self._name, self._settings, self._log = name, settings, log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> "Peer":
        command = [str(python_of(self._name)), "-m", PEERS[self._name], json.dumps(dict(self._settings))]
        pipe = subprocess.PIPE
        with self._log.open("ab") as errors:
            self._process = subprocess.Popen(command, cwd=ROOT, text=True, stdin=pipe, stdout=pipe, stderr=errors)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        with suppress(BrokenPipeError):
            self.say("end")
        try:
            self._process.wait(120)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def say(self, command: str) -> None:
        """Give a command."""
        pipe = self._pipes()[0]
        pipe.write(command + "\n")
        pipe.flush()

    def ask(self, command: str) -> Figures:
        """Give a command and wait for the answer. Raises RuntimeError if the process has ended."""
        self.say(command)
        for line in self._pipes()[1]:
            if line.startswith("{"):
                found: Figures = json.loads(line)
                return found
        raise RuntimeError(f"{self._name} has ended: {self._log.read_text(errors='replace')[-1500:]}")

    def _pipes(self) -> tuple[TextIO, TextIO]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        return self._process.stdin, self._process.stdout  # type: ignore[return-value]


class Arrivals:
    """Notes when results of ever newer changes arrive, from the entrance of the block to its end."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, float]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Arrivals":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def reached(self) -> int:
        """The newest commit time, in microseconds, that any result had so far."""
        return self._steps[-1][0] if self._steps else 0

    def ages(self, commits: Sequence[int]) -> list[float]:
        """For each commit time, the seconds until a result had this change or a newer one; without those that none
        had."""
        newest = [step[0] for step in self._steps]
        places = (bisect.bisect_left(newest, commit) for commit in commits)
        pairs = zip(commits, places, strict=True)
        return [self._steps[at][1] - commit / 1e6 for commit, at in pairs if at < len(self._steps)]

    def note(self, newest: int) -> None:
        """Results with changes up to this commit time have arrived now."""
        if newest > self.reached():
            self._steps.append((newest, time.time()))

    def _run(self) -> None:
        raise NotImplementedError


class TopicArrivals(Arrivals):
    """Results in a topic of one partition; each has its `ts_us`."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        super().__init__()
        settings = {"bootstrap.servers": bootstrap, "group.id": f"arrivals-{topic}", "enable.auto.commit": False}
        self._consumer = Consumer(settings)
        end = self._consumer.get_watermark_offsets(TopicPartition(topic, 0), 30)[1]
        self._consumer.assign([TopicPartition(topic, 0, end)])

    def _run(self) -> None:
        while not self._stop.is_set():
            for message in self._consumer.consume(10_000, 0.01):
                if message.error() is None and (value := message.value()) is not None:
                    self.note(_newest(json.loads(value)))
        self._consumer.close()


def _newest(result: Mapping[str, Any]) -> int:
    """Quix Streams puts the value of a window in a member of its result."""
    inner = result.get("value")
    return int(inner["ts_us"] if isinstance(inner, dict) else result["ts_us"])


def figures(changes: int, answer: Mapping[str, Any]) -> Figures:
    """Rate and cost of catching up; `share` of the changes was measured."""
    counted = changes * float(answer["share"])
    if not counted or not answer["seconds"]:
        raise RuntimeError("too few changes to measure: ask for more CHANGES")
    return {
        "events_per_s": round(counted / answer["seconds"]),
        "cpu_us_per_event": round(answer["cpu_seconds"] / counted * 1e6, 1),
        **({"rows_dropped_as_late": answer["rows_dropped_as_late"]} if "rows_dropped_as_late" in answer else {}),
        "load": cpu_meter.load(),
    }
