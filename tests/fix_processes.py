"""Our own program as a child process, acted on by its pid only, and waiting for conditions instead of for time."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

from deploy.local.process import dies_with_parent
from tests.fork_server import Forked, ForkServer

T = TypeVar("T")
_ROOT = Path(__file__).parents[1]
_PATIENCE = 4
"""Deadlines are what a quiet machine needs with much to spare; on a busy one they are this much longer."""


def wait_until(condition: Callable[[], T], deadline: float = 30, what: str = "") -> T:
    """Ask until the answer is true, for some times `deadline` seconds; returns it. Errors of `condition` pass."""
    end = time.monotonic() + _PATIENCE * deadline
    pause = 0.005
    while not (answer := condition()):
        if time.monotonic() > end:
            name = what or getattr(condition, "__name__", "the condition")
            raise AssertionError(f"not within {_PATIENCE * deadline} s: {name}")
        time.sleep(pause)
        pause = min(0.25, pause * 1.5)
    return answer


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached the process: each of its threads stops by itself."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False


class Program:
    """A running child of this test: `python -m <module> …`. Standard output and error go to files."""

    def __init__(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str], forks: ForkServer) -> None:
        self.output = folder / f"{time.monotonic_ns()}.out"
        self.errors = self.output.with_suffix(".err")
        forked = _can_fork(arguments, env)
        env = {**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1", **env}
        self._child: Forked | subprocess.Popen[bytes]
        if forked:
            self._child = forks.start(arguments, folder, env, self.output, self.errors)
            return
        with self.output.open("wb") as out, self.errors.open("wb") as err:
            self._child = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=dies_with_parent(signal.SIGKILL),  # noqa: PLW1509
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._child.poll() is None

    def send(self, number: signal.Signals) -> None:
        """A signal to this process alone."""
        self._child.send_signal(number)

    def kill(self) -> None:
        """kill -9 and wait."""
        self.send(signal.SIGKILL)
        self._child.wait(30)

    def pause(self) -> None:
        """SIGSTOP."""
        self.send(signal.SIGSTOP)

    def unpause(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def terminate(self, deadline: float = 30) -> int:
        """SIGTERM, wait, and return the exit code."""
        self.send(signal.SIGTERM)
        return self.wait(deadline)

    def wait(self, deadline: float = 60) -> int:
        """The exit code; fails the test with what the program said if it does not end in time."""
        try:
            return self._child.wait(_PATIENCE * deadline)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {_PATIENCE * deadline} s:\n{self.said()[-4000:]}") from None

    def said(self) -> str:
        """Standard output and error so far."""
        return self.output.read_text(errors="replace") + self.errors.read_text(errors="replace")

    def end(self) -> None:
        """For clean-up: kill it and whatever is left of its own session."""
        for pid in _session(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._child.wait(30)


def _can_fork(arguments: Sequence[str], env: Mapping[str, str]) -> bool:
    """The daemon and Spark's driver start as users start them, and so does what a variable tells the interpreter."""
    plain = {"run", "demo", "cdc.service.apply.process"}.intersection(arguments)
    return arguments[0] == "-m" and not plain and all(name.startswith("MILLRACE_") for name in env)


def _session(leader: int) -> Iterator[int]:
    """The processes of a session, whatever their groups."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == leader:
                yield int(folder.name)


class RunProgram(Protocol):
    """`arguments` are those of the interpreter: `"-m", "cdc.cli.main", "run"` or `"-c", code`."""

    def __call__(self, *arguments: str, env: Mapping[str, str] | None = None) -> Program: ...


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    """Starts most of our programs with little CPU."""
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def run_program(tmp_path: Path, forks: ForkServer) -> Iterator[RunProgram]:
    """Starts children that end with the test, and with pytest if it is killed."""
    with programs(tmp_path / "programs", forks) as run:
        yield run


@contextlib.contextmanager
def programs(folder: Path, forks: ForkServer) -> Iterator[RunProgram]:
    """Starts children that end with the block; what they say goes to files in `folder`."""
    started: list[Program] = []
    folder.mkdir()

    def run(*arguments: str, env: Mapping[str, str] | None = None) -> Program:
        started.append(Program(arguments, folder, env or {}, forks))
        return started[-1]

    yield run
    for program in started:
        program.end()
