"""Chunks in progress, shared by the backfill thread and the thread that reads the stream.

The stream's thread collects changes between the marks; at the high mark it merges the chunk and wakes the other thread.
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
    """One chunk in progress. The backfill thread sets `chunk` before it writes the high mark, and then waits."""

    job: str
    schema: TableSchema
    resume: tuple[str, ...] | None = None
    finished: bool = False
    chunk: Chunk | None = None
    read_at: datetime | None = None
    window: Window | None = None
    outcome: Merged | Reread | None = None
    done: threading.Event = field(default_factory=threading.Event)

    def finish(self, outcome: Merged | Reread) -> None:
        """Set the outcome and wake the backfill thread."""
        self.outcome = outcome
        self.done.set()


class Windows:
    """The chunks in progress, by token. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pending: dict[str, PendingChunk] = {}
        self._committed = Committed()
        self.ready = False
        """Whether all commits from before this process read the stream are visible by now."""

    def expect(self, token: str, pending: PendingChunk) -> None:
        """A low mark with this token is about to be written."""
        with self._lock:
            self._pending[token] = pending

    def forget(self, token: str) -> None:
        """The backfill thread waits for it no more."""
        with self._lock:
            self._pending.pop(token, None)

    def low(self, token: str) -> None:
        """The stream has reached a low mark; one of an earlier process is ignored."""
        with self._lock:
            if (pending := self._pending.get(token)) is not None:
                pending.window = Window(str(pending.schema.table), self._committed.recent())

    def high(self, token: str) -> PendingChunk | None:
        """The stream has reached a high mark; returns its chunk, None for one of an earlier process."""
        with self._lock:
            return self._pending.pop(token, None)

    def add(self, rows: pa.Table) -> None:
        """The stream sent these committed rows."""
        if not rows.num_rows:
            return
        self._committed.add(rows["xid"].to_numpy().astype(np.int64))
        for window in self._open():
            window.add(rows)

    def invalidate(self, rows: pa.Table, reason: str) -> None:
        """The stream sent a transaction that is too large to compare; `rows` are its first rows."""
        self._committed.add(rows["xid"].to_numpy().astype(np.int64))
        for window in self._open():
            window.invalidate(reason)

    def reset(self) -> None:
        """The stream restarts: all chunks in progress must be read again."""
        with self._lock:
            dropped, self._pending = list(self._pending.values()), {}
        for pending in dropped:
            pending.finish(Reread("the stream was interrupted"))

    def _open(self) -> Iterator[Window]:
        with self._lock:
            pending = list(self._pending.values())
        return (item.window for item in pending if item.window is not None)
