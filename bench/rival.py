"""What a contender must be able to do, and what is measured of it."""

from dataclasses import dataclass
from typing import Protocol

from bench.workload import Churned


@dataclass(frozen=True, slots=True)
class Throughput:
    """Catching up with changes that were waiting in the WAL; records are what a consumer counts."""

    changes_per_s: float
    cpu_us_per_change: float
    peak_rss_mb: float


class Rival(Protocol):
    """One way from the WAL into a log. Calls come in this order."""

    @property
    def name(self) -> str:
        """As in the results."""

    def begin(self) -> None:
        """Make slot and publication, stream once, stop with a saved position."""

    def catch_up(self, churned: Churned, target: int) -> Throughput:
        """Start again and take everything up to the LSN `target`; goes on running."""

    def watch(self) -> None:
        """Begin to record the latency of each change from its commit to a consumer."""

    def latencies(self, expected: int) -> list[float]:
        """Seconds of each change since `watch`; empty if this contender has no log to consume."""

    def finish(self) -> None:
        """Stop and drop everything."""
