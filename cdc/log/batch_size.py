"""How many changes the next micro-batch has: a fixed number, or, on a cluster, what its tasks apply in some seconds.

A batch has a fixed cost in the driver, about 0.15 s of CPU, and tasks wait for each other at its end. So the batches of
a sink that is behind grow, until one takes SECONDS: a stop waits for the present batch, and a crash repeats it.
"""

import time
from collections.abc import Callable, Mapping
from typing import Self

USUAL_CHANGES = 50_000
"""Changes of a batch unless the sink's `max_batch_changes` says otherwise; on a cluster, of the first one."""
SECONDS = 8.0
_FASTEST = 2.0
"""One batch is at most so many times as large as the one before, or as small: its time may be an accident."""


class BatchSize:
    """Of one query. Between `ended` and `begun` the next batch is planned."""

    def __init__(self, least: int, most: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.changes = least
        self._least = least
        self._most = most
        self._clock = clock
        self._since: float | None = None
        """When the present batch began, if it left changes in the log: the time of another says little."""

    @classmethod
    def of(cls, options: Mapping[str, str], most: int) -> Self:
        """From the options of a source; `most` changes for each task, in a batch that may grow."""
        limit = int(options["limit"])
        return cls(limit or USUAL_CHANGES, limit or max(USUAL_CHANGES, most * int(options["tasks"])))

    def ended(self) -> None:
        """The last batch has been applied."""
        if self._since is None:
            return
        seconds, self._since = self._clock() - self._since, None
        factor = min(max(SECONDS / max(seconds, 0.001), 1 / _FASTEST), _FASTEST)
        self.changes = min(max(int(self.changes * factor), self._least), self._most)

    def begun(self, *, full: bool) -> None:
        """A batch was planned; `full` if it leaves changes in the log."""
        self._since = self._clock() if full else None
