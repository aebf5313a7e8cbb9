"""Ends this process at once when another daemon has taken the pipeline over.

A daemon holds the pipeline by a lease, a file in the state folder, and names it to its parts in the environment. A
daemon that takes over removes that file before it starts anything. A process that was frozen meanwhile finds the file
gone, in its watching thread or at the next `require`, and kills itself with its whole process group: it publishes no
status, retries nothing and commits no position any more.

The trap: between `require` and the write that follows it, the process may be frozen. What such a write can do is in
docs/adr/0025-standby.md.
"""

import errno
import logging
import os
import signal
import threading
import time
from pathlib import Path

LEASE = "MILLRACE_LEASE"
"""The environment variable with the path of the daemon's lease."""
_WATCH_SECONDS = 0.5
_log = logging.getLogger(__name__)
_lease: Path | None = None


def watch() -> None:
    """Guard this process by the lease that its daemon named; without one, nothing is guarded."""
    global _lease  # noqa: PLW0603
    named = os.environ.get(LEASE)
    if not named:
        return
    _lease = Path(named)
    require()
    threading.Thread(target=_watch, name="fence", daemon=True).start()


def require() -> None:
    """Return only if this process may still write. Costs one `open`."""
    if _lease is not None and is_gone(_lease):
        _end()


def is_gone(lease: Path) -> bool:
    """Whether a lease was removed. Opens it: a network file system then asks its server instead of its cache."""
    try:
        os.close(os.open(lease, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in (errno.ENOENT, errno.ESTALE)  # others may pass: the daemon stops if they last
    return False


def _watch() -> None:
    while True:
        time.sleep(_WATCH_SECONDS)
        require()


def _end() -> None:
    _log.critical("another daemon has taken over this pipeline: this process ends at once")
    if os.getpgrp() == os.getpid():  # Spark's processes too
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
