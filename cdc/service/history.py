"""The last hour, sampled: what the page plots. Kept in memory; a restart begins anew."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cdc.service.flow import Flow

_EVERY = 5.0
_KEPT = 720  # an hour


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment: per sink, in the order of `History.sinks`."""

    time: float
    lag: tuple[int, ...]
    changes: tuple[int, ...]


class History:
    """Takes a sample every five seconds in a thread of its own."""

    def __init__(self, look: Callable[[], Flow]) -> None:
        self._look = look
        self._samples: deque[Sample] = deque(maxlen=_KEPT)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="history", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End; returns when the thread has."""
        self._stop.set()
        self._thread.join(10)

    def samples(self) -> list[Sample]:
        """Oldest first."""
        return list(self._samples)

    def take(self) -> None:
        """One sample now."""
        sinks = self._look().sinks
        lag, changes = (sink.lag_bytes for sink in sinks), (sink.changes for sink in sinks)
        self._samples.append(Sample(time.time(), tuple(lag), tuple(changes)))

    def _run(self) -> None:
        while not self._stop.is_set():
            self.take()
            self._stop.wait(_EVERY)
