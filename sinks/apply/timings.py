"""How long a sink's batches and changes take, as histograms that are small enough for a status file."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow as pa

BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0)
"""Seconds: from a batch that waits for nothing to a store that was down for an hour."""


@dataclass(slots=True)
class Histogram:
    """How many durations fell into each bucket; the last of `counts` is for those beyond BOUNDS."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: Sequence[float] | npt.NDArray[np.float64]) -> None:
        """Count these durations; a negative one (the clock was set back) counts as 0."""
        values = np.maximum(np.asarray(seconds, dtype=np.float64), 0.0)
        found = np.bincount(np.searchsorted(BOUNDS, values), minlength=len(self.counts))
        self.counts = [old + int(new) for old, new in zip(self.counts, found, strict=True)]
        self.total += float(values.sum())

    def merge(self, counts: Sequence[int], total: float) -> None:
        """Add the counts of another histogram."""
        self.counts = [old + new for old, new in zip(self.counts, counts, strict=True)]
        self.total += total


def ages(rows: pa.Table, now: datetime) -> npt.NDArray[np.float64]:
    """Seconds between each row's commit and now."""
    committed = rows.column("commit_ts").cast(pa.int64()).to_numpy().astype(np.float64)
    seconds: npt.NDArray[np.float64] = now.timestamp() - committed / 1e6
    return seconds
