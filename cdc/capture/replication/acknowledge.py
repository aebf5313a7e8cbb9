"""Which LSN may be confirmed to the source. Pure: no clock, no socket.

Promise: the confirmed LSN is the end of the unbroken run of durable entries, in whatever order they became durable.
That an entry is durable proves nothing about the entries before it.
"""

from collections import deque
from dataclasses import dataclass
from typing import NewType

from cdc.model import ZERO_LSN, Lsn

Ticket = NewType("Ticket", int)


@dataclass(slots=True)
class _Pending:
    end: Lsn
    durable: bool = False


class Acknowledgements:
    """Entries in log order, each with a ticket. Not thread-safe: the caller locks."""

    def __init__(self, confirmed: Lsn = ZERO_LSN) -> None:
        self._confirmed = confirmed
        self._last = confirmed
        self._first = 0
        self._pending: deque[_Pending] = deque()

    @property
    def confirmed(self) -> Lsn:
        """Every entry that ends at or before this LSN is durable. Never goes back."""
        return self._confirmed

    @property
    def outstanding(self) -> int:
        """The number of entries that are not yet part of the unbroken run."""
        return len(self._pending)

    def expect(self, end: Lsn) -> Ticket:
        """An entry is about to be appended. Raises ValueError if it ends before an earlier entry."""
        if end < self._last:
            raise ValueError(f"an entry that ends at {end} cannot follow one that ends at {self._last}")
        self._last = end
        self._pending.append(_Pending(end))
        return Ticket(self._first + len(self._pending) - 1)

    def durable(self, ticket: Ticket) -> Lsn:
        """That entry is durable; returns the LSN that may be confirmed now. Idempotent."""
        at = ticket - self._first
        if at >= len(self._pending):
            raise ValueError(f"ticket {ticket} was never issued")
        if at >= 0:
            self._pending[at].durable = True
        while self._pending and self._pending[0].durable:
            self._confirmed = self._pending.popleft().end
            self._first += 1
        return self._confirmed
