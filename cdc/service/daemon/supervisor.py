"""Keeps the parts of the daemon running: starts them, starts them again, stops them in reverse.

Promise: no part outlives the supervisor (each asks the kernel for that, see `process`), and a part whose error
is final ends the whole daemon with that error's code instead of looping.
"""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from cdc.durable_files import open_or_make
from cdc.errors import EnvironmentFault
from cdc.service.daemon.budgets import resident_bytes
from cdc.service.daemon.process import SUPERVISOR
from cdc.service.daemon.restarts import Attempts, is_final

CAPTURE_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
"""Arrow's own allocator and glibc's arenas reserve address space by the gigabyte, which a hard limit counts; plain
malloc also costs less system time."""
_LEAST_SECONDS = 5.0
_REST_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ChildProcess:
    """One child process and how often it had to be started."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    attempts: Attempts = field(default_factory=Attempts)
    restarts: int = 0
    reason: str = ""
    started: float = 0.0
    started_at: str = ""
    due: float = 0.0
    kill_at: float | None = None
    group: int = 0

    def start(self) -> None:
        """Start it now, after whatever is left of the last one."""
        _end_rest(self.group, 0.0)
        own = {**self.environment, SUPERVISOR: str(os.getpid())}
        # A group of its own: Ctrl-C in a terminal is for the supervisor, and would hit Spark's workers in a batch.
        self.process = subprocess.Popen(self.command, env={**os.environ, **own}, process_group=0)
        self.group = self.process.pid
        self.started, self.started_at = time.monotonic(), datetime.now(UTC).isoformat()
        _log.info("%s started, pid %d", self.name, self.process.pid)

    def ended(self, code: int) -> None:
        """Note the end and when to start again: at once if it was asked to end."""
        now = time.monotonic()
        self.process = None
        self.restarts += 1
        if self.kill_at is not None:
            self.kill_at, self.due = None, now
            return
        self.attempts = self.attempts.ended(now - self.started)
        self.due = now + self.attempts.delay
        self.reason = f"ended with {code}"
        _log.warning("%s ended with %d; starting again in %.1f s", self.name, code, self.attempts.delay)

    def restart(self, reason: str, grace: float) -> None:
        """Have it end and start again; killed if it has not ended after that many seconds."""
        self.reason = reason
        if self.process is None or self.kill_at is not None:
            return
        _log.warning("%s starts again: %s", self.name, reason)
        self.kill_at = time.monotonic() + grace
        self.process.terminate()

    def stop(self, deadline: float) -> None:
        """Ask it to finish its batch and end; kill it at the deadline."""
        if self.process is None:
            return
        self.process.terminate()
        try:
            self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _log.warning(
                "%s did not stop in time and is killed; nothing is lost, its batch is applied again", self.name
            )
            self.process.kill()
            self.process.wait()
        self.process = None
        _end_rest(self.group, _REST_SECONDS)

    def facts(self) -> dict[str, object]:
        """What there is to know of it, for the daemon's status."""
        pid = None if self.process is None else self.process.pid
        resident = 0 if pid is None else resident_bytes(pid)
        facts = {"pid": pid, "restarts": self.restarts, "rss_bytes": resident, "started_at": self.started_at}
        return {**facts, "last_exit": self.reason}


def _end_rest(group: int, seconds: float) -> None:
    """Kill what a part that ended has left of its group, after so many seconds to go by itself: a JVM may hang."""
    if not group:
        return
    deadline = time.monotonic() + seconds
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.05)
        os.killpg(group, signal.SIGKILL)


@dataclass(slots=True)
class Supervisor:
    """The parts, in the order in which they start. `beat` is called at every turn, some ten times a second."""

    parts: Sequence[ChildProcess]
    grace: float = 30.0
    beat: Callable[[], None] = lambda: None
    _final: int | None = field(default=None, init=False)

    def run(self, stop: threading.Event) -> int:
        """Keep the parts up until asked to stop or until one ends for good; returns the daemon's exit code."""
        try:
            while not stop.is_set() and self._final is None:
                for part in self.parts:
                    self._tend(part)
                self.beat()
                stop.wait(0.1)
        finally:
            self._stop()
        return self._final or 0

    def restart(self, name: str, reason: str) -> None:
        """Start a part again, for a reason that is not its failure."""
        for part in self.parts:
            if part.name == name:
                part.restart(reason, self.grace)

    def tell(self, name: str) -> None:
        """Have a part read the pipeline file again. One that does not run reads it when it starts."""
        for part in self.parts:
            if part.name == name and part.process is not None:
                part.process.send_signal(signal.SIGHUP)

    def _stop(self) -> None:
        """In reverse; whoever stops later is left some seconds of the grace, however long the first one takes."""
        end = time.monotonic() + self.grace
        for later, part in reversed(list(enumerate(self.parts))):
            part.stop(end - min(_LEAST_SECONDS, self.grace / 4) * later)

    def _tend(self, part: ChildProcess) -> None:
        if part.process is None:
            if time.monotonic() >= part.due:
                part.start()
            return
        code = part.process.poll()
        if code is None:
            if part.kill_at is not None and time.monotonic() > part.kill_at:
                part.process.kill()
            return
        if is_final(code) and part.kill_at is None:
            part.process = None
            self._final = code
            _log.error("%s cannot go on (exit code %d): stopping", part.name, code)
        else:
            part.ended(code)


def parts_of(config: Path, log_format: str, log_level: str) -> list[ChildProcess]:
    """Capture and apply, each a Python process of its own."""
    options = ["--config", str(config), "--log-format", log_format, "--log-level", log_level]
    return [
        ChildProcess(name, [sys.executable, "-m", f"cdc.service.{name}.process", *options], environment)
        for name, environment in (("capture", CAPTURE_ENVIRONMENT), ("apply", {}))
    ]


class StateLock:
    """One daemon a state folder. The kernel lets go of the lock however we end."""

    def __init__(self, state: Path) -> None:
        self._path = state / "lock"
        self._descriptor = -1

    def __enter__(self) -> "StateLock":
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._descriptor = open_or_make(self._path)
        except OSError as error:
            raise EnvironmentFault(
                f"The state folder {self._path.parent} cannot be written: {error.strerror}.",
                "Choose another with the setting `state`, or make it writable for this user.",
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(self._descriptor, 32).decode() or "unknown"
            os.close(self._descriptor)
            raise EnvironmentFault(
                f"Another millrace (pid {owner}) already runs on the state folder {self._path.parent}.",
                "Stop that one first, or give this pipeline a state folder of its own.",
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.write(self._descriptor, str(os.getpid()).encode())
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)
