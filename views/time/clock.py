"""The clock of a view: how far event time has come, as a function of the log. Pure.

The clock of a row is the greatest event time of all transactions before its own. So which row is late depends neither on
the batch it is in, nor on the order of the rows of its transaction. While no rows come, ticks of the log move the clock.
"""

from dataclasses import dataclass

import numpy as np

from cdc.arrays import Bools, Ints

NEVER = -(2**62)
"""Before all time: the clock of a log without rows, and of rows that are never late."""


@dataclass(frozen=True, slots=True)
class Readings:
    """What the clock reads along some rows of the log: one number per row."""

    before: Ints
    """The clock before the row's transaction."""
    greatest: int
    """The clock after the last row."""
    newest: int
    """The greatest commit time of the rows so far, to know when the table has become idle."""


def readings(greatest: int, newest: int, lsns: Ints, times: Ints, committed: Ints, ticks: Bools, idle: int) -> Readings:
    """Read the clock along rows in log order. `times` are event times, those of ticks are the times of the ticks.

    A tick moves the clock to its time less `idle`, if no row was committed since; 0: ticks do not move it.
    """
    if not len(lsns):
        return Readings(np.zeros(0, np.int64), greatest, newest)
    latest = np.maximum.accumulate(np.maximum(np.where(ticks, NEVER, committed), newest))
    quiet = ticks & (idle > 0) & (latest <= times - idle)
    moved = np.where(ticks, np.where(quiet, times - idle, NEVER), times)
    after = np.maximum.accumulate(np.maximum(moved, greatest))
    begins = np.flatnonzero((np.diff(lsns, prepend=lsns[0] - 1) != 0) | ticks)
    before = np.concatenate([[greatest], after])[begins]
    lengths = np.diff(np.append(begins, len(lsns)))
    return Readings(np.repeat(before, lengths), int(after[-1]), int(latest[-1]))
