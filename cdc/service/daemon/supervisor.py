"""Keeps the parts of the daemon running: starts them, restarts them, stops them in reverse order.

Promise: no part outlives the supervisor (each asks the kernel for that, see `process`). A part that ends with a final
error ends the whole daemon with that error's exit code; it is not restarted.
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
from cdc.fence import start
from cdc.service.daemon.budgets import resident_bytes
from cdc.service.daemon.process import SUPERVISOR
from cdc.service.daemon.restarts import Attempts, is_final

CAPTURE_ENVIRONMENT = {"ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_ARENA_MAX": "2"}
"""Arrow's own allocator and glibc's arenas reserve gigabytes of address space, which count against a hard limit. Plain
malloc also takes less system time."""
_LEAST_STOP_SECONDS = 5.0
_LEFTOVER_SECONDS = 5.0
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class ChildProcess:
    """One child process and its restarts."""

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
    wanted: bool = True
    """Whether it is to run. One that is not wanted any more is asked to end, and not started again."""
    loaded: tuple[subprocess.Popen[bytes], int] | None = None
    """A process that has loaded its modules and waits, and the pipe that starts it."""

    def load(self) -> None:
        """Have a process load its modules and wait for `start`. It ends with this process."""
        reader, writer = os.pipe()
        try:
            self.loaded = self._popen({start.START_PIPE: str(reader)}, (reader,)), writer
        finally:
            os.close(reader)

    def unload(self) -> None:
        """End a process that waits for `start`."""
        if self.loaded is not None:
            (process, pipe), self.loaded = self.loaded, None
            os.close(pipe)
            process.kill()
            process.wait()

    def start(self) -> None:
        """Start it now, after killing what is left of the previous process."""
        _kill_leftovers(self.group, 0.0)
        if self.loaded is not None and self.loaded[0].poll() is None:
            (self.process, pipe), self.loaded = self.loaded, None
            start.start(pipe)
        else:
            self.unload()
            self.process = self._popen({})
        self.group = self.process.pid
        self.started, self.started_at = time.monotonic(), datetime.now(UTC).isoformat()
        _log.info("%s started, pid %d", self.name, self.process.pid)

    def _popen(self, more: Mapping[str, str], pipes: Sequence[int] = ()) -> subprocess.Popen[bytes]:
        own = {**self.environment, **more, SUPERVISOR: str(os.getpid())}
        # A process group of its own: Ctrl-C is for the supervisor, and must not reach Spark's workers during a batch.
        return subprocess.Popen(self.command, env={**os.environ, **own}, process_group=0, pass_fds=pipes)

    def ended(self, code: int) -> None:
        """Record the end and schedule the restart: at once if it was asked to end."""
        now = time.monotonic()
        self.process = None
        self.restarts += 1
        if self.kill_at is not None:
            self.kill_at, self.due = None, now
            return
        self.attempts = self.attempts.ended(now - self.started)
        self.due = now + self.attempts.delay
        self.reason = f"ended with {code}"
        _log.warning("%s ended with %d; restarting in %.1f s", self.name, code, self.attempts.delay)

    def restart(self, reason: str, grace: float) -> None:
        """Ask it to end, for a restart; it is killed after `grace` seconds."""
        self.reason = reason
        if self.process is None or self.kill_at is not None:
            return
        _log.warning("%s restarts: %s", self.name, reason)
        self.kill_at = time.monotonic() + grace
        self.process.terminate()

    def want(self, wanted: bool, grace: float) -> None:
        """Have it run from now on, or end it within `grace` seconds."""
        if self.wanted and not wanted:
            self.restart("it is not needed any more", grace)
        self.wanted = wanted

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
        _kill_leftovers(self.group, _LEFTOVER_SECONDS)

    def facts(self) -> dict[str, object]:
        """For the daemon's status."""
        pid = None if self.process is None else self.process.pid
        resident = 0 if pid is None else resident_bytes(pid)
        facts = {"pid": pid, "restarts": self.restarts, "rss_bytes": resident, "started_at": self.started_at}
        return {**facts, "last_exit": self.reason}


def _kill_leftovers(group: int, seconds: float) -> None:
    """Kill what is left of a process group after so many seconds: a JVM may hang."""
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
    """The parts, in the order in which they start. `on_turn` is called about ten times a second."""

    parts: Sequence[ChildProcess]
    grace: float = 30.0
    on_turn: Callable[[], None] = lambda: None
    _final: int | None = field(default=None, init=False)

    def run(self, stop: threading.Event) -> int:
        """Keep the parts running until `stop` is set or a part ends with a final error; returns the exit code."""
        try:
            while not stop.is_set() and self._final is None:
                for part in self.parts:
                    self._check(part)
                self.on_turn()
                stop.wait(0.1)
        finally:
            self._stop()
        return self._final or 0

    def restart(self, name: str, reason: str) -> None:
        """Restart a part for a reason other than its failure."""
        for part in self.parts:
            if part.name == name:
                part.restart(reason, self.grace)

    def want(self, name: str, wanted: bool) -> None:
        """Have a part run, or end it."""
        for part in self.parts:
            if part.name == name:
                part.want(wanted, self.grace)

    def reload(self, name: str) -> None:
        """Have a part read the pipeline file again. A part that is down reads it when it starts."""
        for part in self.parts:
            if part.name == name and part.process is not None:
                part.process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Kill every part with its processes, from any thread: this daemon may not write any more."""
        for part in self.parts:
            _kill_leftovers(part.group if part.process is not None else 0, 0.0)

    def _stop(self) -> None:
        """In reverse order. However long the first takes, each later part keeps some seconds of the grace time."""
        end = time.monotonic() + self.grace
        for later, part in reversed(list(enumerate(self.parts))):
            part.stop(end - min(_LEAST_STOP_SECONDS, self.grace / 4) * later)

    def _check(self, part: ChildProcess) -> None:
        if part.process is None:
            if part.wanted and time.monotonic() >= part.due:
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
            _log.error("%s cannot continue (exit code %d): stopping", part.name, code)
        else:
            part.ended(code)


def parts_of(config: Path, log_format: str, log_level: str) -> list[ChildProcess]:
    """Capture, views and apply, each a Python process of its own. Views are wanted once the pipeline has some."""
    options = ["--config", str(config), "--log-format", log_format, "--log-level", log_level]
    return [
        ChildProcess(
            name, [sys.executable, "-m", f"cdc.service.{name}.process", *options], environment, wanted=name != "views"
        )
        for name, environment in (("capture", CAPTURE_ENVIRONMENT), ("views", CAPTURE_ENVIRONMENT), ("apply", {}))
    ]


class StateLock:
    """One daemon per state folder. The kernel releases the lock however the process ends."""

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
