"""What a contender must be able to do, and what is measured of it."""

from dataclasses import dataclass
from typing import Protocol

from bench.workload import Churned


@dataclass(frozen=True, slots=True)
class Throughput:
    """Catching up with changes that were waiting in the WAL, while `busy` of the machine's cores worked."""

    changes_per_s: float
    cpu_us_per_change: float
    seconds: float
    own_cores: float
    busy_cores: float


class Rival(Protocol):
    """One way from the WAL into a log. Calls come in this order; the clock is the caller's, the same for all."""

    @property
    def name(self) -> str:
        """As in the results."""

    @property
    def slot(self) -> str:
        """Which slot it reads: the clock starts with that one's sender."""

    def begin(self) -> None:
        """Make slot and publication, stream once, stop with a saved position."""

    def resume(self, target: int) -> None:
        """Start again, towards the LSN `target`; returns at once and goes on running."""

    def reached(self, churned: Churned, target: int) -> bool:
        """Whether the last of these changes is durable (for one that keeps nothing: written out). Asked every 10 ms."""

    def check(self, churned: Churned) -> None:
        """Raise RuntimeError unless exactly these changes came, each once."""

    def cpu(self) -> float:
        """CPU seconds that its process has used so far."""

    def peak_rss_mb(self) -> float:
        """The most memory that its process held."""

    def watch(self) -> None:
        """Begin to record the latency of each change from its commit to a consumer."""

    def latencies(self, expected: int) -> list[float]:
        """Seconds of each change since `watch`, in the order of arrival."""

    def finish(self) -> None:
        """Stop and drop everything."""
