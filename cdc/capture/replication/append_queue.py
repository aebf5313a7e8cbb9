"""From the reading thread to the log: a queue bounded by bytes, and the one thread that appends.

Promise: entries become durable in the order in which they were put, each once; `confirmed` never passes one that is
not. What waits is merged into one entry, so an idle log gets a change at once and a busy one gets few, large entries.
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
"""A merged entry is cut about here: a larger one saves no CPU, takes long to become visible, and memory."""
_RETRY_SECONDS = 1.0

_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Waiting:
    ticket: Ticket
    item: Entry | SpilledTransaction
    size: int


class AppendQueue:
    """Put in one thread, appended in another. `durable` is called after each append, in the appending thread."""

    def __init__(self, log: LogWriter, limit: int, tally: AppendCounts, clock: Clock) -> None:
        self._log = log
        self._limit = limit
        self._tally = tally
        self._clock = clock
        self._durable: Callable[[], None] = lambda: None
        self._changed = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._acknowledged = Acknowledgements(log.progress().end)
        self._held = 0
        self._closed = False
        self._appended = clock.monotonic() - log.pace
        self._failure: BaseException | None = None
        self.trouble = ""
        """Why the log takes nothing at the moment; empty: it does."""
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def call_when_durable(self, durable: Callable[[], None]) -> None:
        """Whom to tell of an append from now on."""
        self._durable = durable

    def put(self, items: Sequence[Entry | SpilledTransaction]) -> None:
        """Queue items in log order. Never blocks: look at `full` before reading more."""
        with self._changed:
            for item in items:
                size = item.rows.nbytes if isinstance(item, Entry) else 0
                self._held += size
                self._queue.append(_Waiting(self._acknowledged.expect(item.end), item, size))
            self._changed.notify_all()

    @property
    def full(self) -> bool:
        """Whether reading on would hold too much."""
        return self._held >= self._limit

    @property
    def held(self) -> int:
        """Bytes that are not yet durable."""
        return self._held

    @property
    def settled(self) -> bool:
        """Whether everything that was put is durable."""
        return not self._acknowledged.outstanding

    @property
    def confirmed(self) -> Lsn:
        """What may be confirmed to the source."""
        return self._acknowledged.confirmed

    def check(self) -> None:
        """Raise in the reading thread what the appending thread died of."""
        if self._failure is not None:
            raise self._failure

    def settle(self, seconds: float) -> bool:
        """Wait until everything is durable, at most that long; raises what the appending thread died of."""
        with self._changed:
            done = self._changed.wait_for(lambda: self.settled or self._failure is not None, seconds)
        self.check()
        return done

    def close(self) -> None:
        """Stop appending; what is queued is forgotten, and read again at the next start."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()
        for waiting in self._queue:
            if isinstance(waiting.item, SpilledTransaction):
                waiting.item.discard()
        self._queue.clear()

    def _run(self) -> None:
        try:
            while taken := self._take():
                self._append(taken)
                taken.clear()  # a large entry must not stay in memory until the next one comes
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._durable()

    def _take(self) -> list[_Waiting]:
        """The next items to append together; empty: closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closed)
            pause = self._appended + self._log.pace - self._clock.monotonic()
            if pause > 0:
                self._changed.wait_for(lambda: self._held >= MERGE_BYTES or self._closed, pause)
            if self._closed:
                return []
            taken = [self._queue.popleft()]
            size = taken[0].size
            while self._queue and size < MERGE_BYTES and _mergeable(taken[-1].item, self._queue[0].item):
                taken.append(self._queue.popleft())
                size += taken[-1].size
            return taken

    def _append(self, taken: list[_Waiting]) -> None:
        self._appended = self._clock.monotonic()
        failpoint.reached("capture.before_append")
        first = taken[0].item
        if isinstance(first, SpilledTransaction):
            self._publish(first)
            first.discard()
        else:
            entry = _merged([waiting.item for waiting in taken if isinstance(waiting.item, Entry)])
            self._patiently(lambda: self._log.append(entry))
            self._tally.add(entry.rows, sum(waiting.size for waiting in taken))
        with self._changed:
            for waiting in taken:
                self._acknowledged.durable(waiting.ticket)
                self._held -= waiting.size
            self._changed.notify_all()
        self._durable()

    def _publish(self, large: SpilledTransaction) -> None:
        spool = self._patiently(self._log.spool)
        tally = AppendCounts()
        try:
            for rows in large.parts():
                self._patiently(partial(spool.write, rows))
                tally.add(rows, rows.nbytes)
            self._patiently(lambda: spool.publish(large.end))
        except BaseException:
            spool.discard()
            raise
        self._tally.merge(tally)

    def _patiently(self, action: Callable[[], T]) -> T:
        """A full log is waited for: the queue fills, reading stops, and the source keeps its WAL."""
        while True:
            try:
                done = action()
            except LogFull as error:
                if not self.trouble:
                    # Said here too: a full disk may have no room for a status either.
                    _log.warning("%s Reading stops until there is room.", error)
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
