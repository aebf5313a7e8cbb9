"""Folded batches of the shared query: each kept in memory once, until every sink of the query has applied it.

A sink that falls too far behind leaves and continues with a query of its own; it may join again while every batch that
it lacks is still here. Nothing here is durable: what a sink has applied is a position in the log, written by its
applier.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cdc.model import Lsn
from sinks.apply.batch_schedule import BUDGET, SinkBacklog, next_batch
from sinks.apply.errors import Stopped
from sinks.fold.folded import Folded

_AT_ONCE = 16 << 20
"""Bytes that a sink takes at once when it is behind: several small batches are then one merge."""
KEPT = 100
"""Applied batches that are kept for a sink that joins again: it is rarely further behind than a few. With a limit on
bytes alone, one tiny batch a second grew to gigabytes in a few days."""
_POLL_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class BufferedBatch:
    """One batch. `start` is the position at which the previous one ended."""

    number: int
    start: Lsn
    folded: Folded
    size: int
    total: int
    """The sizes of all batches up to and including this one."""


class BatchBuffer:
    """One thread puts batches; one thread per sink takes them."""

    def __init__(self, base: Lsn, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = base
        self._clock = clock
        self._batches: dict[int, BufferedBatch] = {}
        """By number, without a gap, oldest first."""
        self._first = self._next = 0
        self._total = 0
        self._cursors: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._closed = False
        self._changed = threading.Condition()

    # -- sinks

    def add_member(self, name: str) -> None:
        """Add a sink that has everything up to the base."""
        with self._changed:
            self._set_cursor(name, self._first)

    def join(self, name: str, reached: Lsn) -> bool:
        """Add a sink that has reached this position. False if some batch that it lacks is no longer here.

        The trap: entries of a snapshot share an LSN, so a sink that has reached one may lack some that end there.
        """
        with self._changed:
            known = [batch for batch in self._batches.values() if batch.start < reached]
            if not known or self._closed:
                return False
            self._set_cursor(name, next(batch.number for batch in known if batch.start == known[-1].start))
            return True

    def leave(self, name: str) -> None:
        """Remove a sink."""
        with self._changed:
            self._cursors.pop(name, None)
            self._taken.pop(name, None)
            self._changed.notify_all()

    def take(self, name: str) -> list[Folded]:
        """Wait for the next batches of a sink. The call says that the batches of the last call are applied.

        Empty when the sink was removed or the buffer is closed.
        """
        with self._changed:
            if name in self._taken:
                self._cursors[name] = self._taken[name]
                self._changed.notify_all()
            while not self._closed and name in self._cursors and self._cursors[name] == self._next:
                self._changed.wait(_POLL_SECONDS)
            if self._closed or name not in self._cursors:
                return []
            found = self._next_few(self._cursors[name])
            self._taken[name] = found[-1].number + 1
            return [batch.folded for batch in found]

    # -- the query

    def put(self, folded: Folded, size: int) -> None:
        """Add a batch; returns when the next one may start. Raises Stopped when the buffer is closed."""
        with self._changed:
            self._total += size
            self._batches[self._next] = BufferedBatch(self._next, self._end, folded, size, self._total)
            self._next += 1
            self._end = max(self._end, folded.reached)
            self._changed.notify_all()
            started = self._clock()
            while not self._closed:
                decision = next_batch({name: self._backlog(name) for name in self._cursors}, self._clock() - started)
                if decision.go:
                    for name in decision.left:
                        self._cursors.pop(name)
                        self._taken.pop(name, None)
                    return self._drop_old()
                self._changed.wait(_POLL_SECONDS)
            raise Stopped

    def close(self) -> None:
        """Wake up every waiting thread; no batch is handed out any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        """Whether batches are no longer handed out."""
        return self._closed

    @property
    def members(self) -> frozenset[str]:
        """The sinks that take batches."""
        with self._changed:
            return frozenset(self._cursors)

    # -- inside

    def _set_cursor(self, name: str, number: int) -> None:
        self._cursors[name] = number
        self._taken.pop(name, None)
        self._changed.notify_all()

    def _next_few(self, number: int) -> Sequence[BufferedBatch]:
        first = self._batches[number]
        found = [first]
        for following in range(number + 1, self._next):
            batch = self._batches[following]
            if batch.total - self._total_before(first) > _AT_ONCE:
                break
            found.append(batch)
        return found

    def _backlog(self, name: str) -> SinkBacklog:
        number = self._cursors[name]
        if number == self._next:
            return SinkBacklog(0, 0)
        return SinkBacklog(self._next - number, self._total - self._total_before(self._batches[number]))

    @staticmethod
    def _total_before(batch: BufferedBatch) -> int:
        return batch.total - batch.size

    def _drop_old(self) -> None:
        """Drop batches that every sink has applied, except a few for sinks that join again."""
        needed = min(self._cursors.values(), default=self._next)
        while self._first < needed and self._over_limit():
            del self._batches[self._first]
            self._first += 1

    def _over_limit(self) -> bool:
        oldest = self._batches[self._first]
        return len(self._batches) > KEPT or self._total - self._total_before(oldest) > BUDGET
