"""Named points at which a test can make this process die, fail or stall.

Off unless `MILLRACE_FAIL` is set, for instance `MILLRACE_FAIL=log.after_append:kill@3`: the process kills itself with
SIGKILL when it reaches that point for the third time. Actions: `kill`, `raise`, `stall` (ten minutes), `stop` (until
SIGCONT). Separate several by commas.
"""

import os
import signal
import time
from dataclasses import dataclass


class Injected(Exception):
    """Raised by the action `raise`."""


@dataclass(slots=True)
class _Plan:
    action: str
    countdown: int


def _plans(text: str) -> dict[str, _Plan]:
    plans = {}
    for part in filter(None, text.split(",")):
        point, _, rest = part.partition(":")
        action, _, count = rest.partition("@")
        plans[point] = _Plan(action, int(count or 1))
    return plans


_PLANS = _plans(os.environ.get("MILLRACE_FAIL", ""))


def reached(point: str) -> None:
    """Mark a point of the program. Does nothing unless `MILLRACE_FAIL` names it."""
    if not _PLANS or (plan := _PLANS.get(point)) is None:
        return
    plan.countdown -= 1
    if plan.countdown != 0:
        return
    if plan.action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif plan.action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif plan.action == "stall":
        time.sleep(600)
    else:
        raise Injected(point)
