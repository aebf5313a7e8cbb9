"""How a part of a daemon that took over starts: loaded beforehand, or as usual, and told what it follows."""

import json
import os
from contextlib import suppress

from cdc.fence.guard import LEASE

TAKEN_OVER = "MILLRACE_TAKEN_OVER"
"""The environment variable that is set if the daemon took over from another one, which may still be connected."""
START_PIPE = "MILLRACE_START_PIPE"
"""The environment variable with the descriptor on which a part that a standby has loaded waits for its start."""


def await_start() -> bool:
    """Wait, in a part that a standby has loaded, until the standby takes over; False if it ended without."""
    descriptor = int(os.environ.pop(START_PIPE, "-1"))
    if descriptor < 0:
        return True
    named = b""
    while piece := os.read(descriptor, 4096):
        named += piece
    os.close(descriptor)
    os.environ |= json.loads(named) if named else {}
    return bool(named)


def start(descriptor: int) -> None:
    """Let a part go on that waits in `await_start`, guarded by the lease of this process. One that has ended meanwhile
    is its supervisor's concern."""
    with suppress(BrokenPipeError), os.fdopen(descriptor, "wb") as pipe:
        pipe.write(json.dumps({name: os.environ.get(name, "") for name in (LEASE, TAKEN_OVER)}).encode())


def taken_over() -> bool:
    """Whether the daemon of this process took over from another one."""
    return bool(os.environ.get(TAKEN_OVER))
