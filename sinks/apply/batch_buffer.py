"""Folded batches on their way to several sinks: kept in memory, each once, until everybody aboard has had them.

A sink that stays too far behind falls off and goes on from its own position in the log; one that catches up there may
come back as long as what it still needs is here. Nothing here is durable, and nothing needs to be: what a sink has
applied is a position in the log, written by its applier.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cdc.model import Lsn
from sinks.apply.applier import Stopped
from sinks.apply.batch_schedule import BUDGET, SinkBacklog, next_batch
from sinks.fold.folded import Folded

_AT_ONCE = 16 << 20
"""Bytes that a sink that is behind takes together: several small batches are one merge for it."""
KEPT = 100
"""Batches that everybody has had, kept for a sink that comes back: it is rarely further behind than a few. One tiny
batch a second made gigabytes in a few days where only their bytes were limited."""
_GLANCE = 0.25


@dataclass(frozen=True, slots=True)
class BufferedBatch:
    """One batch. `start` is where the one before ended: a sink beyond it has everything that came earlier."""

    number: int
    start: Lsn
    folded: Folded
    size: int
    total: int
    """The sizes of all batches up to this one: so what lies between two of them need not be added up."""


class BatchBuffer:
    """One thread puts, one thread a sink takes."""

    def __init__(self, base: Lsn, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = base
        self._clock = clock
        self._links: dict[int, BufferedBatch] = {}
        """By number, without a gap, oldest first."""
        self._first = self._next = 0
        self._total = 0
        self._cursors: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._closed = False
        self._news = threading.Condition()

    # -- sinks

    def board(self, name: str) -> None:
        """Take part from here on: for a sink that has everything up to the base."""
        with self._news:
            self._place(name, self._first)

    def join(self, name: str, reached: Lsn) -> bool:
        """Come aboard in the middle, if nothing that this sink lacks has been forgotten here.

        The trap: entries of a snapshot share an LSN, so a sink that has reached one may lack some that end there.
        """
        with self._news:
            known = [link for link in self._links.values() if link.start < reached]
            if not known or self._closed:
                return False
            self._place(name, next(link.number for link in known if link.start == known[-1].start))
            return True

    def leave(self, name: str) -> None:
        """Take part no longer."""
        with self._news:
            self._cursors.pop(name, None)
            self._taken.pop(name, None)
            self._news.notify_all()

    def take(self, name: str) -> list[Folded]:
        """What comes next for a sink, and the word that it is done with what it took before; waits for it.

        Empty when the sink is no longer aboard or everything ends.
        """
        with self._news:
            if name in self._taken:
                self._cursors[name] = self._taken[name]
                self._news.notify_all()
            while not self._closed and name in self._cursors and self._cursors[name] == self._next:
                self._news.wait(_GLANCE)
            if self._closed or name not in self._cursors:
                return []
            found = self._some(self._cursors[name])
            self._taken[name] = found[-1].number + 1
            return [link.folded for link in found]

    # -- the query

    def put(self, folded: Folded, size: int) -> None:
        """Hand a batch out; returns when the next one may begin. Raises Stopped when everything ends."""
        with self._news:
            self._total += size
            self._links[self._next] = BufferedBatch(self._next, self._end, folded, size, self._total)
            self._next += 1
            self._end = max(self._end, folded.reached)
            self._news.notify_all()
            begun = self._clock()
            while not self._closed:
                verdict = next_batch({name: self._waiting(name) for name in self._cursors}, self._clock() - begun)
                if verdict.go:
                    for name in verdict.left:
                        self._cursors.pop(name)
                        self._taken.pop(name, None)
                    return self._forget()
                self._news.wait(_GLANCE)
            raise Stopped

    def close(self) -> None:
        """End every waiting."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    @property
    def aboard(self) -> frozenset[str]:
        """Who takes part."""
        with self._news:
            return frozenset(self._cursors)

    # -- inside

    def _place(self, name: str, number: int) -> None:
        self._cursors[name] = number
        self._taken.pop(name, None)
        self._news.notify_all()

    def _some(self, number: int) -> Sequence[BufferedBatch]:
        first = self._links[number]
        found = [first]
        for following in range(number + 1, self._next):
            link = self._links[following]
            if link.total - self._before(first) > _AT_ONCE:
                break
            found.append(link)
        return found

    def _waiting(self, name: str) -> SinkBacklog:
        number = self._cursors[name]
        if number == self._next:
            return SinkBacklog(0, 0)
        return SinkBacklog(self._next - number, self._total - self._before(self._links[number]))

    @staticmethod
    def _before(link: BufferedBatch) -> int:
        return link.total - link.size

    def _forget(self) -> None:
        """Old batches that nobody waits for; a few are kept for sinks that come back."""
        needed = min(self._cursors.values(), default=self._next)
        while self._first < needed and self._plenty():
            del self._links[self._first]
            self._first += 1

    def _plenty(self) -> bool:
        oldest = self._links[self._first]
        return len(self._links) > KEPT or self._total - self._before(oldest) > BUDGET
