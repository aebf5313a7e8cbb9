"""When the next batch begins, who is too slow to wait for, and who may travel together: decisions without a clock.

Promise: as long as one sink is ready for more, no other sink holds the next batch back for longer than PATIENCE, and
that only once, since it then leaves. While every sink is busy, changes gather in the log and the next batch grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cdc.ports import Lag

AHEAD = 1
"""Batches that the readiest sink may have before it: it works on one while the next is folded."""
BUDGET = 32 << 20
"""Bytes of folded batches kept for sinks that are behind: minutes of an ordinary load."""
PATIENCE = 2.0
NEAR = 64 << 20
"""Bytes of WAL between sinks that start together. What the foremost gets twice is ignored by its store."""


@dataclass(frozen=True, slots=True)
class SinkBacklog:
    """What lies before one sink."""

    batches: int
    bytes: int

    @property
    def too_much(self) -> bool:
        """More than is kept for anybody; a single large batch is not, since others have it before them too."""
        return self.bytes > BUDGET and self.batches > AHEAD + 1


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """Whether the next batch may begin, and who is left behind for it."""

    go: bool
    left: frozenset[str] = frozenset()


def next_batch(waiting: Mapping[str, SinkBacklog], waited: float) -> ScheduleDecision:
    """Decide after a batch was handed out, `waited` seconds ago. Nobody to hand it to: nothing begins."""
    if not waiting or min(each.batches for each in waiting.values()) > AHEAD:
        return ScheduleDecision(False)
    slow = frozenset(name for name, each in waiting.items() if each.too_much)
    if slow and waited < PATIENCE:
        return ScheduleDecision(False)
    return ScheduleDecision(True, slow)


def crew(lags: Mapping[str, Lag]) -> frozenset[str]:
    """Who starts together: the foremost, and whoever is hardly behind it. Nobody, if that is one sink alone."""
    if not lags:
        return frozenset()
    foremost = min(lag.bytes for lag in lags.values())
    near = frozenset(name for name, lag in lags.items() if lag.bytes - foremost <= NEAR)
    return near if len(near) > 1 else frozenset()
