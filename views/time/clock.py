"""The clock of a view: how far event time has come, as a function of the log. Pure.

The clock of a row is the greatest event time of all transactions before its own. So which row is late depends neither
on the batch it is in, nor on the order of the rows of its transaction. While no rows come, ticks of the log move it.
"""

from dataclasses import dataclass

import numpy as np

from cdc.arrays import Bools, Ints

NEVER = -(2**62)
"""Before all time: the clock of a log without rows, and of rows that are never late."""


@dataclass(frozen=True, slots=True)
class LogRows:
    """Rows of the log in its order, ticks among them."""

    lsns: Ints
    times: Ints
    """Event times; of a tick, its time; NEVER for a row that does not move the clock."""
    committed: Ints
    ticks: Bools


@dataclass(frozen=True, slots=True)
class EventClock:
    """What the clock shows after some row."""

    greatest: int = NEVER
    newest: int = NEVER
    """The greatest commit time so far, to know when the table has become idle."""

    def along(self, rows: LogRows, idle: int) -> tuple[Ints, "EventClock"]:
        """The clock before the transaction of each row, and after the last row.

        A tick moves the clock to its time less `idle`, if no row was committed since; 0: ticks do not move it.
        """
        if not len(rows.lsns):
            return np.zeros(0, np.int64), self
        latest = np.maximum.accumulate(np.maximum(np.where(rows.ticks, NEVER, rows.committed), self.newest))
        quiet = rows.ticks & (idle > 0) & (latest <= rows.times - idle)
        moved = np.where(rows.ticks, np.where(quiet, rows.times - idle, NEVER), rows.times)
        after = np.maximum.accumulate(np.maximum(moved, self.greatest))
        begins = np.flatnonzero((np.diff(rows.lsns, prepend=rows.lsns[0] - 1) != 0) | rows.ticks)
        before = np.concatenate([[self.greatest], after])[begins]
        lengths = np.diff(np.append(begins, len(rows.lsns)))
        return np.repeat(before, lengths), EventClock(int(after[-1]), int(latest[-1]))
