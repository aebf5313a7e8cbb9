"""Starts our programs for tests as forks of a process that has imported everything: 0.1 s of CPU instead of 1.3.

The child is a process of its own, with its own session, folder, environment, umask and output, and runs the module as
`python -m` does. Arguments and environment in /proc, and what the interpreter read when it started, are the server's.
"""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdc import failpoint
from deploy.local.process import dies_with_parent

_LOADED = ("cdc.cli.main", "cdc.service.capture.process", "tests.contract.log_child")
_ROOT = Path(__file__).parents[1]


class ForkServer:
    """The pytest process's side. The trap: make it in the main thread, since the server ends with its thread."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._socket, its = socket.socketpair()
        with its:
            self._server = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_server", str(its.fileno())],
                cwd=_ROOT,
                env={**os.environ, "PYTHONPATH": str(_ROOT), "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
                preexec_fn=dies_with_parent(signal.SIGKILL),  # noqa: PLW1509
            )
        self._file = self._socket.makefile("rwb")

    def start(self, arguments: Sequence[str], folder: Path, env: Mapping[str, str], out: Path, err: Path) -> "Forked":
        """Run `-m module …` in a fork; returns once it has its own session and output."""
        os.umask(umask := os.umask(0))
        asked = {"arguments": [*arguments], "folder": str(folder), "env": dict(env), "out": str(out), "err": str(err)}
        return Forked(int(self.ask({**asked, "umask": umask})), self)

    def ask(self, request: object) -> Any:
        """One request and its answer."""
        with self._turn:
            self._file.write(json.dumps(request).encode() + b"\n")
            self._file.flush()
            answer = self._file.readline()
        assert answer, "the fork server has ended"
        return json.loads(answer)

    def close(self) -> None:
        """End it, and with it its children."""
        self._file.close()
        self._socket.close()
        self._server.wait(30)


class Forked:
    """A child of the server, with the methods of subprocess.Popen that tests use."""

    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None:
            self._code = self._server.ask({"poll": self.pid})
        return self._code

    def wait(self, timeout: float) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """A signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)


# -- the server


def _load() -> None:
    """Everything that the programs import."""
    import gc
    import importlib

    import cdc.log
    from sinks import registry

    for name in _LOADED:
        importlib.import_module(name)
    for kinds in (cdc.log.settings_kinds(), registry.settings_kinds()):
        dict(kinds)  # imports each
    gc.collect()
    gc.freeze()


def _serve(own: socket.socket) -> list[str]:
    """Answer requests; returns only in a child, with what it is to run."""
    tie = dies_with_parent(signal.SIGKILL)
    with own, own.makefile("rwb") as file:
        for line in file:
            request = json.loads(line)
            if "poll" in request:
                answer = _exit_code(request["poll"])
            else:
                ready, begun = os.pipe()
                pid = os.fork()
                if pid == 0:
                    os.close(ready)
                    tie()
                    _become(request)
                    os.close(begun)
                    return list(request["arguments"])
                os.close(begun)
                os.read(ready, 1)
                os.close(ready)
                answer = pid
            file.write(json.dumps(answer).encode() + b"\n")
            file.flush()
    os._exit(0)


def _exit_code(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def _become(request: Mapping[str, Any]) -> None:
    """A process of its own."""
    os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.umask(request["umask"])
    for number, path in ((1, request["out"]), (2, request["err"])):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _run(arguments: list[str]) -> None:
    """As `python -m` does."""
    flag, module, *rest = arguments
    assert flag == "-m", flag
    sys.modules.pop(module, None)
    failpoint._PLANS.update(failpoint._plans(os.environ.get("MILLRACE_FAIL", "")))  # read when it was imported
    sys.path[0] = str(Path.cwd())
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    try:
        _load()
        asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    except KeyboardInterrupt:  # Ctrl-C ends pytest too
        sys.exit(130)
    _run(asked)
