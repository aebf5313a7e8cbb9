"""When the shared query starts its next batch, which sinks are too slow for it, and which sinks share it. Pure.

Promise: while one sink is ready for more, another sink delays the next batch by at most PATIENCE, and only once, since
it then leaves the shared query. While every sink is busy, changes collect in the log and the next batch grows.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from cdc.ports import Lag

AHEAD = 1
"""Batches that the fastest sink may have to apply: it applies one while the next is folded."""
BUDGET = 32 << 20
"""Bytes of folded batches kept for sinks that are behind: minutes of an ordinary load."""
PATIENCE = 2.0
"""Seconds."""
NEAR = 64 << 20
"""Bytes of WAL between sinks that may start a shared query. The sink that is furthest gets some changes twice, and its
store ignores them."""


@dataclass(frozen=True, slots=True)
class SinkBacklog:
    """The batches that one sink has not applied yet."""

    batches: int
    bytes: int

    @property
    def too_much(self) -> bool:
        """More than is kept for a slow sink. A single large batch is not: other sinks have to apply it too."""
        return self.bytes > BUDGET and self.batches > AHEAD + 1


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """Whether the next batch may start, and which sinks must leave the shared query for it."""

    go: bool
    left: frozenset[str] = frozenset()


def next_batch(waiting: Mapping[str, SinkBacklog], waited: float) -> ScheduleDecision:
    """Decide, `waited` seconds after the last batch was buffered. Without sinks, nothing starts."""
    if not waiting or min(each.batches for each in waiting.values()) > AHEAD:
        return ScheduleDecision(False)
    slow = frozenset(name for name, each in waiting.items() if each.too_much)
    if slow and waited < PATIENCE:
        return ScheduleDecision(False)
    return ScheduleDecision(True, slow)


def sinks_to_share(lags: Mapping[str, Lag]) -> frozenset[str]:
    """The sinks that start a shared query: the furthest one and those within NEAR of it. Empty for a single sink."""
    if not lags:
        return frozenset()
    furthest = min(lag.bytes for lag in lags.values())
    near = frozenset(name for name, lag in lags.items() if lag.bytes - furthest <= NEAR)
    return near if len(near) > 1 else frozenset()
