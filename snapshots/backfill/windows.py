"""Chunks between their marks: handed from the thread that reads tables to the one that reads the stream.

The reading thread collects what goes by; at the high mark it merges the chunk and tells the waiting thread.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

import numpy as np
import pyarrow as pa

from cdc.model import TableSchema
from snapshots.backfill.reconcile import Chunk, Committed, Merged, Reread, Window


@dataclass(slots=True)
class PendingChunk:
    """One chunk on its way. The table's thread fills `chunk` before it writes the high mark, and then waits."""

    job: str
    schema: TableSchema
    place: tuple[str, ...] | None = None
    finished: bool = False
    chunk: Chunk | None = None
    read_at: datetime | None = None
    window: Window | None = None
    outcome: Merged | Reread | None = None
    settled: threading.Event = field(default_factory=threading.Event)

    def settle(self, outcome: Merged | Reread) -> None:
        """Tell who waits."""
        self.outcome = outcome
        self.settled.set()


class Windows:
    """Every chunk on its way, by token; safe for both threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, PendingChunk] = {}
        self._committed = Committed()
        self.settled = False
        """Whether commits from before this process looked can no longer be invisible."""

    def expect(self, token: str, pending: PendingChunk) -> None:
        """A low mark with this token is about to be written."""
        with self._lock:
            self._pending[token] = pending

    def forget(self, token: str) -> None:
        """Nobody waits for it any more."""
        with self._lock:
            self._pending.pop(token, None)

    def low(self, token: str) -> None:
        """The stream has reached a low mark; one of an earlier life is passed over."""
        with self._lock:
            if (pending := self._pending.get(token)) is not None:
                pending.window = Window(str(pending.schema.table), self._committed.recent())

    def high(self, token: str) -> PendingChunk | None:
        """The stream has reached a high mark; the chunk, if it is one that somebody waits for."""
        with self._lock:
            return self._pending.pop(token, None)

    def see(self, rows: pa.Table) -> None:
        """Committed rows go by."""
        if not rows.num_rows:
            return
        self._committed.add(rows["xid"].to_numpy().astype(np.int64))
        for window in self._open():
            window.see(rows)

    def spoil(self, rows: pa.Table, reason: str) -> None:
        """A transaction goes by that is too large to look at; these are its first rows."""
        self._committed.add(rows["xid"].to_numpy().astype(np.int64))
        for window in self._open():
            window.spoil(reason)

    def lose(self) -> None:
        """The stream begins anew: what was seen of open windows counts for nothing."""
        with self._lock:
            lost, self._pending = list(self._pending.values()), {}
        for pending in lost:
            pending.settle(Reread("the stream was interrupted"))

    def _open(self) -> Iterator[Window]:
        with self._lock:
            pending = list(self._pending.values())
        return (item.window for item in pending if item.window is not None)
