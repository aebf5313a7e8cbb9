"""The interface of a contender, and what is measured."""

from dataclasses import dataclass
from typing import Protocol

from bench.workload import Churned


@dataclass(frozen=True, slots=True)
class Throughput:
    """Catching up with a backlog of changes in the WAL; `busy_cores` is the CPU use of the whole machine."""

    changes_per_s: float
    cpu_us_per_change: float
    seconds: float
    own_cores: float
    busy_cores: float


class Contender(Protocol):
    """A program that copies changes from the WAL into a log. Methods are called in this order; the caller measures."""

    @property
    def name(self) -> str:
        """The name in the results."""

    @property
    def slot(self) -> str:
        """The slot that it reads: the clock starts when the slot's WAL sender starts."""

    def begin(self) -> None:
        """Create slot and publication, stream once, stop with a saved position."""

    def resume(self, target: int) -> None:
        """Start again, up to the LSN `target`; returns at once and runs in the background."""

    def reached(self, churned: Churned, target: int) -> bool:
        """Whether the last of these changes is durable (or written, for one that stores nothing). Called every 10
        ms."""

    def check(self, churned: Churned) -> None:
        """Raise RuntimeError unless exactly these changes arrived, each once."""

    def cpu(self) -> float:
        """CPU seconds that its process has used so far."""

    def peak_rss_mb(self) -> float:
        """The peak memory of its process."""

    def watch(self) -> None:
        """Begin to record the latency of each change from its commit to a consumer."""

    def latencies(self, expected: int) -> list[float]:
        """Seconds of each change since `watch`, in the order of arrival."""

    def finish(self) -> None:
        """Stop and drop everything."""
