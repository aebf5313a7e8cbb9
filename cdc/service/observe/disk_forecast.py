"""How long until something is full, from how fast it fills: pure, fed with samples."""

from collections import deque
from dataclasses import dataclass, field

_SPAN = 600.0  # ten minutes: shorter, and a checkpoint or a merge looks like a trend
_LEAST = 30.0


@dataclass(slots=True)
class DiskForecast:
    """Room left, sampled. Says nothing before it has watched for half a minute."""

    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def add(self, now: float, room: int) -> None:
        """So much room is left now."""
        self._samples.append((now, room))
        while self._samples[0][0] < now - _SPAN:
            self._samples.popleft()

    def seconds(self) -> float:
        """Until no room is left at the pace of the last minutes; infinite if it is not getting less."""
        if not self._samples:
            return float("inf")
        (first, before), (last, room) = self._samples[0], self._samples[-1]
        if last - first < _LEAST or room >= before:
            return float("inf") if room > 0 else 0.0
        return room / ((before - room) / (last - first))
