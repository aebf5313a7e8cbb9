"""The speed of a backfill and the size of its next chunk. Pure: the caller passes the time."""

from dataclasses import dataclass, field

_FIRST, _MOST = 2_000, 50_000
_SECONDS = 0.5
"""Target time of a chunk: the two marks cost little compared to the read, and few changes fall between them."""
_BYTES = 16 * 2**20


@dataclass(slots=True)
class Pace:
    """Adapts to the table: rows, bytes and time of each chunk decide the next one's size."""

    limit: int = field(default_factory=lambda: _FIRST)
    read: int = 0
    rereads: int = 0
    estimate: int = 0
    began: float | None = None
    waiting: str = ""
    """What it waits for before the first chunk; empty: nothing."""

    def begin(self, now: float, estimate: int) -> None:
        """Reading starts; `estimate` is about how many rows the table has (0: not known)."""
        self.began, self.read, self.estimate = now, 0, estimate

    def chunk_done(self, rows: int, size: int, seconds: float) -> None:
        """A chunk is in the log."""
        self.read += rows
        factor = min(2.0, max(0.5, _SECONDS / max(seconds, 0.001)))
        most = min(_MOST, int(_BYTES / max(1.0, size / rows))) if rows else _MOST
        self.limit = max(1, min(most, int(self.limit * factor)))

    def chunk_reread(self, smaller: bool) -> None:
        """A chunk must be read again."""
        self.rereads += 1
        self.limit = max(1, self.limit // 2) if smaller else self.limit

    def facts(self, now: float, running: bool) -> dict[str, object]:
        """For the status."""
        seconds = now - self.began if self.began is not None else 0.0
        rate = self.read / seconds if seconds > 0 else 0.0
        left = max(0, self.estimate - self.read)
        return {
            "estimate": self.estimate,
            "rows_per_second": round(rate, 1) if running else 0.0,
            "eta_seconds": round(left / rate, 1) if running and rate and self.estimate else None,
            "rereads": self.rereads,
            "waiting": self.waiting,
        }
