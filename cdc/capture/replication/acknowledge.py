"""What may be confirmed to the source: pure arithmetic, no clock, no socket.

Promise: the confirmed LSN is the end of the unbroken run of durable entries, whatever the order in which they became
durable. The newest acknowledgement to arrive says nothing about those before it.
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
    """Entries in log order, each with a ticket. Not safe for several threads: the caller locks."""

    def __init__(self, confirmed: Lsn = ZERO_LSN) -> None:
        self._confirmed = confirmed
        self._last = confirmed
        self._first = 0
        self._pending: deque[_Pending] = deque()

    @property
    def confirmed(self) -> Lsn:
        """Everything that ends here or before is durable. Never goes back."""
        return self._confirmed

    @property
    def outstanding(self) -> int:
        """How many entries are not yet part of the unbroken run."""
        return len(self._pending)

    def expect(self, end: Lsn) -> Ticket:
        """An entry is on its way to the log. Raises ValueError where it would end before one that went ahead."""
        if end < self._last:
            raise ValueError(f"an entry that ends at {end} cannot follow one that ends at {self._last}")
        self._last = end
        self._pending.append(_Pending(end))
        return Ticket(self._first + len(self._pending) - 1)

    def durable(self, ticket: Ticket) -> Lsn:
        """That entry is durable; returns what may be confirmed now. Saying it twice changes nothing."""
        at = ticket - self._first
        if at >= len(self._pending):
            raise ValueError(f"ticket {ticket} was never given")
        if at >= 0:
            self._pending[at].durable = True
        while self._pending and self._pending[0].durable:
            self._confirmed = self._pending.popleft().end
            self._first += 1
        return self._confirmed
