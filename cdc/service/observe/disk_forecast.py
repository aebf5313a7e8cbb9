"""Time until a disk or the slot's WAL limit is full, from samples of the space left. Pure."""

from collections import deque
from dataclasses import dataclass, field

_SPAN = 600.0  # in less than ten minutes a checkpoint or a merge looks like a trend
_LEAST = 30.0


@dataclass(slots=True)
class DiskForecast:
    """Samples of the space left. Forecasts nothing in the first half minute."""

    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, room: int) -> None:
        """Add a sample: so many bytes are left."""
        self._samples.append((now, room))
        while self._samples[0][0] < now - _SPAN:
            self._samples.popleft()

    def seconds(self) -> float:
        """Seconds until no space is left at the rate of the last ten minutes; infinite if it does not shrink."""
        if not self._samples:
            return float("inf")
        (first, before), (last, room) = self._samples[0], self._samples[-1]
        if last - first < _LEAST or room >= before:
            return float("inf") if room > 0 else 0.0
        return room / ((before - room) / (last - first))
