"""What a sink reports of itself: its state, how far it is, and how long its batches take."""

from dataclasses import dataclass, field
from datetime import datetime

from cdc.model import ZERO_LSN, Lsn
from sinks.apply.timings import Histogram


@dataclass(slots=True)
class SinkStatus:
    """Written by the sink's applier and query; read by the status file, the page and the metrics."""

    state: str = "starting"
    reached: Lsn = ZERO_LSN
    newest: datetime | None = None
    changes: dict[str, int] = field(default_factory=dict)
    batches: int = 0
    batch_ms: int = 0
    error: str = ""
    dead_letters: int = 0
    restarts: int = 0
    visible: Histogram = field(default_factory=Histogram)
    batch_times: Histogram = field(default_factory=Histogram)

    def add_batch_time(self, seconds: float) -> None:
        """Record how long the last batch took."""
        self.batch_ms = int(seconds * 1000)
        self.batch_times.add([seconds])
