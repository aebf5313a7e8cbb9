"""The queue between the reading thread and the log, bounded by bytes, and the thread that appends from it.

Promise: entries become durable in the order in which they were put, each once; `confirmed` never passes an entry that
is not durable. Queued entries are merged into one, so an idle log gets a change at once and a busy log gets few, large
entries.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pyarrow as pa

from cdc import failpoint
from cdc.capture.replication.acknowledge import Acknowledgements, Ticket
from cdc.capture.replication.append_counts import AppendCounts
from cdc.capture.transactions.assembly import SpilledTransaction
from cdc.errors import LogFull
from cdc.model import Entry, Lsn
from cdc.ports import Clock, LogWriter

MERGE_BYTES = 16 * 2**20
"""The approximate limit of a merged entry: a larger one saves no CPU, takes memory and is visible later."""
_RETRY_SECONDS = 1.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Queued:
    ticket: Ticket
    item: Entry | SpilledTransaction
    size: int


class AppendQueue:
    """Items are put by one thread and appended by another."""

    def __init__(self, log: LogWriter, limit: int, counts: AppendCounts, clock: Clock) -> None:
        self._log = log
        self._limit = limit
        self._counts = counts
        self._clock = clock
        self._durable: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._queue: deque[_Queued] = deque()
        self._acknowledged = Acknowledgements(log.progress().end)
        self._queued_bytes = 0
        self._closed = False
        self._appended = clock.monotonic() - log.append_interval
        self._failure: BaseException | None = None
        self.trouble = ""
        """Why nothing can be appended at the moment; empty: appending works."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def call_when_durable(self, durable: Callable[[], None]) -> None:
        """Call this after each append from now on, in the appending thread."""
        self._durable = durable

    def put(self, items: Sequence[Entry | SpilledTransaction]) -> None:
        """Queue items in log order. Never blocks: check `full` before reading more."""
        with self._changed:
            for item in items:
                size = item.rows.nbytes if isinstance(item, Entry) else 0
                self._queued_bytes += size
                self._queue.append(_Queued(self._acknowledged.expect(item.end), item, size))
            self._changed.notify_all()

    @property
    def full(self) -> bool:
        """Whether the queue has reached its limit."""
        return self._queued_bytes >= self._limit

    @property
    def queued_bytes(self) -> int:
        """Bytes that are not yet durable."""
        return self._queued_bytes

    @property
    def all_durable(self) -> bool:
        """Whether everything that was put is durable."""
        return not self._acknowledged.outstanding

    @property
    def confirmed(self) -> Lsn:
        """The LSN that may be confirmed to the source."""
        return self._acknowledged.confirmed

    def check(self) -> None:
        """Raise the error that ended the appending thread, if any."""
        if self._failure is not None:
            raise self._failure

    def wait_until_durable(self, seconds: float) -> bool:
        """Wait at most that long until everything is durable. Raises the error that ended the appending thread."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.all_durable or self._failure is not None, seconds)
        self.check()
        return done

    def close(self) -> None:
        """Stop appending. Queued items are dropped; the next start reads them again."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for queued in self._queue:
            if isinstance(queued.item, SpilledTransaction):
                queued.item.discard()
        self._queue.clear()

    def _run(self) -> None:
        try:
            while taken := self._take():
                self._append(taken)
                taken.clear()  # frees a large entry before waiting for the next one
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._durable()

    def _take(self) -> list[_Queued]:
        """The next items to append as one entry; empty: the queue was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            pause = self._appended + self._log.append_interval - self._clock.monotonic()
            if pause > 0:
                self._changed.wait_for(lambda: self._queued_bytes >= MERGE_BYTES or self._closed, pause)
            if self._closed:
                return []
            taken = [self._queue.popleft()]
            size = taken[0].size
            while self._queue and size < MERGE_BYTES and _mergeable(taken[-1].item, self._queue[0].item):
                taken.append(self._queue.popleft())
                size += taken[-1].size
            return taken

    def _append(self, taken: list[_Queued]) -> None:
        self._appended = self._clock.monotonic()
        failpoint.reached("capture.before_append")
        first = taken[0].item
        if isinstance(first, SpilledTransaction):
            self._append_large(first)
            first.discard()
        else:
            entry = _merged([queued.item for queued in taken if isinstance(queued.item, Entry)])
            self._retry_while_full(lambda: self._log.append(entry))
            self._counts.add(entry.rows, sum(queued.size for queued in taken))
        with self._changed:
            for queued in taken:
                self._acknowledged.durable(queued.ticket)
                self._queued_bytes -= queued.size
            self._changed.notify_all()
        self._durable()

    def _append_large(self, large: SpilledTransaction) -> None:
        spool = self._retry_while_full(self._log.spool)
        counts = AppendCounts()
        try:
            for rows in large.parts():
                self._retry_while_full(partial(spool.write, rows))
                counts.add(rows, rows.nbytes)
            self._retry_while_full(lambda: spool.publish(large.end))
        except BaseException:
            spool.discard()
            raise
        self._counts.merge(counts)

    def _retry_while_full(self, action: Callable[[], T]) -> T:
        """Retry while the log is full: meanwhile the queue fills, reading stops, and the source keeps its WAL."""
        while True:
            try:
                done = action()
            except LogFull as error:
                if not self.trouble:
                    # Logged here too: a full disk may have no room for a status file either.
                    _log.warning("%s Capture pauses until there is room.", error)
                self.trouble = str(error)
                if self._closed:
                    raise
                self._clock.wait(_RETRY_SECONDS)
            else:
                if self.trouble:
                    _log.info("There is room again in the log.")
                self.trouble = ""
                return done


def _mergeable(left: Entry | SpilledTransaction, right: Entry | SpilledTransaction) -> bool:
    return isinstance(left, Entry) and isinstance(right, Entry)


def _merged(entries: list[Entry]) -> Entry:
    if len(entries) == 1:
        return entries[0]
    marks = {key: value for entry in entries for key, value in entry.marks.items()}
    return Entry(pa.concat_tables([entry.rows for entry in entries]), entries[-1].end, marks)
