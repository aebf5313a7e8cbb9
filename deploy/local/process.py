"""Child processes, identified by pid *and* start time and ended through a pidfd.

The trap: the kernel sends the parent-death signal when the *thread* that forked ends, so `spawn` must be called from a
thread that lives as long as the server.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cdc.artifacts.account import Account
from deploy.local.server import Launch

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_OWN: dict[int, subprocess.Popen[bytes]] = {}
"""Children of this process: they must be reaped, or they remain as zombies."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies one process: a pid alone can be reused."""

    pid: int
    started: int


def identify(pid: int) -> Identity | None:
    """The live process with this pid; None if there is none or if it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat[stat.rindex(")") + 2 :].split()
    return None if fields[0] in "ZX" else Identity(pid, int(fields[19]))


def alive(identity: Identity) -> bool:
    """Whether exactly this process still runs."""
    if (child := _OWN.get(identity.pid)) is not None:
        child.poll()
    return identify(identity.pid) == identity


def spawn(launch: Launch, folder: Path, log: Path, account: Account | None, *, tied: bool) -> Identity:
    """Start a process with `folder` as its working directory and its output appended to `log`.

    A `tied` process dies with the calling thread; others survive this process.
    """
    with log.open("ab") as output:
        child = subprocess.Popen(
            launch.argv,
            cwd=folder,
            env={**_environment(), **launch.env},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            user=account.uid if account else None,
            group=account.gid if account else None,
            extra_groups=[] if account else None,
            # one system call and no lock: safe enough beside other threads
            preexec_fn=dies_with_parent(launch.death) if tied else None,  # noqa: PLW1509
        )
    _OWN[child.pid] = child
    return identify(child.pid) or Identity(child.pid, 0)


def _environment() -> dict[str, str]:
    kept = ("PATH", "LANG", "TZ", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ}


def dies_with_parent(death: signal.Signals) -> Callable[[], None]:
    """A function for the child between fork and exec, after the change of user, which would clear the signal."""
    parent = os.getpid()

    def ask() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, int(death))
        if os.getppid() != parent:
            os._exit(1)

    return ask


def end(identity: Identity, ask: signal.Signals, patience: float) -> None:
    """Ask the process to end, wait, then kill it. Returns when it is gone. Leaves a process that reuses the pid
    alone."""
    try:
        handle = os.pidfd_open(identity.pid)
    except ProcessLookupError:
        return
    try:
        if alive(identity):
            _send(handle, ask)
            _send(handle, signal.SIGCONT)  # a stopped process reacts only to this and SIGKILL
            if not select.select([handle], [], [], patience)[0]:
                _send(handle, signal.SIGKILL)
                select.select([handle], [], [], 30)
    finally:
        os.close(handle)
        _reap(identity.pid)


def _send(handle: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, number)


def _reap(pid: int) -> None:
    if (child := _OWN.pop(pid, None)) is not None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=5)


def inside(folder: Path) -> Iterator[Identity]:
    """Processes with a working directory in this folder: every server and its children have their data folder."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            cwd = (entry / "cwd").readlink()
            if cwd.is_relative_to(folder) and (found := identify(int(entry.name))) is not None:
                yield found


def wait_until_deserted(folder: Path, patience: float) -> bool:
    """Wait until no process has its working directory in the folder: backends of a killed Postgres end a bit later."""
    deadline = time.monotonic() + patience
    while any(True for _ in inside(folder)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
