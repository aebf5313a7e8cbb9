"""Folded batches on their way to several sinks: kept in memory, each once, until everybody aboard has had them.

A sink that stays too far behind falls off and goes on from its own position in the log; one that catches up there may
come back as long as what it still needs is here. Nothing here is durable, and nothing needs to be: what a sink has
applied is a position in the log, written by its applier.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cdc.model import Lsn
from sinks.applier import Stopped
from sinks.folded import Folded
from sinks.pace import BUDGET, Waiting, next_batch

_AT_ONCE = 16 << 20
"""Bytes that a sink that is behind takes together: several small batches are one merge for it."""
_GLANCE = 0.25


@dataclass(frozen=True, slots=True)
class Link:
    """One batch. `start` is where the one before ended: a sink beyond it has everything that came earlier."""

    number: int
    start: Lsn
    folded: Folded
    size: int


class Ring:
    """One thread puts, one thread a sink takes."""

    def __init__(self, base: Lsn, clock: Callable[[], float] = time.monotonic) -> None:
        self._end = base
        self._clock = clock
        self._links: deque[Link] = deque()
        self._next = 0
        self._cursors: dict[str, int] = {}
        self._taken: dict[str, int] = {}
        self._closed = False
        self._news = threading.Condition()

    # -- sinks

    def board(self, name: str) -> None:
        """Take part from here on: for a sink that has everything up to the base."""
        with self._news:
            self._place(name, self._links[0].number if self._links else self._next)

    def join(self, name: str, reached: Lsn) -> bool:
        """Come aboard in the middle, if nothing that this sink lacks has been forgotten here.

        The trap: entries of a snapshot share an LSN, so a sink that has reached one may lack some that end there.
        """
        with self._news:
            known = [link for link in self._links if link.start < reached]
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
            self._links.append(Link(self._next, self._end, folded, size))
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

    def _some(self, number: int) -> Sequence[Link]:
        found: list[Link] = []
        for link in self._links:
            if link.number >= number:
                if found and sum(each.size for each in found) + link.size > _AT_ONCE:
                    break
                found.append(link)
        return found

    def _waiting(self, name: str) -> Waiting:
        links = [link for link in self._links if link.number >= self._cursors[name]]
        return Waiting(len(links), sum(link.size for link in links))

    def _forget(self) -> None:
        """Old batches that nobody waits for; a few are kept for sinks that come back."""
        needed = min(self._cursors.values(), default=self._next)
        total = sum(link.size for link in self._links)
        while self._links and self._links[0].number < needed and total > BUDGET:
            total -= self._links.popleft().size
