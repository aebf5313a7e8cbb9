"""A daemon with everything it started, as one machine: to be killed or frozen at once."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def family(daemon: int) -> Iterator[int]:
    """The pids of a daemon's session: the daemon first, then its parts and their processes."""
    yield daemon
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if int(folder.name) != daemon and os.getsid(int(folder.name)) == daemon:
                yield int(folder.name)
