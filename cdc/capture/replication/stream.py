"""Reading over one connection: frames become queued entries, and durable entries become confirmations."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self

from cdc import failpoint
from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.pgoutput.events import LogicalMessage, TableWaits
from cdc.capture.replication.append_queue import AppendQueue
from cdc.capture.replication.captured_tables import wait_mark
from cdc.capture.replication.connection import Frame, ReplicationConnection
from cdc.capture.transactions.assembly import Assembler, Item, SpilledTransaction
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry
from cdc.ports import Clock

MESSAGE_PREFIX = "millrace"
"""Logical messages with this prefix are Millrace's; all others are ignored."""

_FEED_MESSAGES = 16_384
_FEED_BYTES = 8 * 2**20
"""Feeds of 8 to 16 thousand messages decode fastest; 100 thousand are 1.6 times slower."""
_WAIT_SECONDS = 0.2
_PACE_SECONDS = 0.01
"""Least time between two feeds during an append: each costs half a millisecond, however small. When the log is idle,
frames are decoded at once; those that arrive during an append go into the next one."""
_ANSWER_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Called in log order, in the reading thread, before anything is queued for the log."""

    def transactions(self, item: Entry | SpilledTransaction) -> None:
        """These complete transactions are appended next."""

    def message(self, message: LogicalMessage) -> Sequence[Entry]:
        """A message with our prefix; returns entries to append at this position of the log."""

    def connection_started(self) -> None:
        """A connection begins: the stream starts again at the log's end."""


class NoListener:
    """A listener that does nothing."""

    def transactions(self, item: Entry | SpilledTransaction) -> None:
        """Nothing."""

    def message(self, message: LogicalMessage) -> Sequence[Entry]:
        """Nothing."""
        return ()

    def connection_started(self) -> None:
        """Nothing."""


class Stream:
    """Reads from a connection that streams, and closes it at the end of `with`."""

    def __init__(
        self,
        connection: ReplicationConnection,
        queue: AppendQueue,
        decoder: Decoder,
        assembler: Assembler,
        clock: Clock,
        *,
        listener: Listener,
        heartbeat: float,
    ) -> None:
        self._connection = connection
        self._queue = queue
        self._decoder = decoder
        self._assembler = assembler
        self._listener = listener
        self._clock = clock
        self._heartbeat = heartbeat
        self._frames: list[Frame] = []
        self._size = 0
        self._fed = clock.monotonic() - _PACE_SECONDS
        self._server_end = ZERO_LSN
        self._idled = clock.monotonic()
        self._confirmed = queue.confirmed
        self.received = queue.confirmed
        """The end of the newest complete transaction, or of the idle WAL after it."""
        self.watermark = queue.confirmed
        """Nothing that commits at or below it is missing from the log."""
        self.answered = False
        """Whether the server has sent anything yet."""
        queue.call_when_durable(connection.wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.call_when_durable(lambda: None)
        self._assembler.discard()
        self._connection.close()

    def step(self) -> None:
        """Receive what the server has sent, or wait a little for it; then confirm what has become durable."""
        self._queue.check()
        if self._queue.full or not self._has_room():
            self._connection.pause(_WAIT_SECONDS)
            self._confirm(answer=False)
            return
        drained = self._connection.drain(_FEED_MESSAGES, _FEED_BYTES, self._wait_seconds())
        self._frames += drained.frames
        self._size += drained.size
        self._server_end = max(self._server_end, drained.server_end)
        self.answered = self.answered or bool(drained.frames or drained.server_end)
        if self._frames and self._is_due():
            self._feed()
        if not self._frames:
            self._advance_when_idle(drained.reply)
        self._confirm(drained.reply)

    @property
    def trouble(self) -> str:
        """Why a large transaction cannot be spilled to disk at the moment; empty: it can."""
        return self._assembler.trouble

    def _has_room(self) -> bool:
        """Whether there is room for more; while there is none, nothing is received and the connection stays open."""
        if not self._assembler.trouble:
            return True
        spilled = self._assembler.spill()
        if spilled:
            _log.info("There is room again for large transactions.")
        return spilled

    def _wait_seconds(self) -> float:
        """How long to wait for more frames. An append ends the wait: see `call_when_durable`."""
        if not self._frames:
            return _WAIT_SECONDS
        return 0.0 if self._is_due() else max(0.0, self._fed + _PACE_SECONDS - self._clock.monotonic())

    def _is_due(self) -> bool:
        enough = len(self._frames) >= _FEED_MESSAGES or self._size >= _FEED_BYTES
        return enough or self._queue.all_durable or self._clock.monotonic() - self._fed >= _PACE_SECONDS

    def finish(self, seconds: float) -> None:
        """Wait until everything queued is durable, confirm it and release the slot."""
        self._queue.wait_until_durable(seconds)
        self._confirm(answer=True)
        self._connection.stop()

    def _feed(self) -> None:
        self._fed = self._clock.monotonic()
        frames, self._frames, self._size = self._frames, [], 0
        decoded = self._decoder.feed(frames)
        for item in self._assembler.take(decoded.rows, decoded.events, decoded.subxids):
            self._queue_item(item)
        if self._assembler.trouble:
            _log.warning("%s Capture pauses until there is room.", self._assembler.trouble)

    def _queue_item(self, item: Item) -> None:
        if isinstance(item, LogicalMessage):
            if item.prefix == MESSAGE_PREFIX:
                # The LSN of a transactional message is smaller than the ends of transactions that committed before it.
                entries = self._listener.message(item)
                self._queue.put([replace(entry, end=max(entry.end, self.received)) for entry in entries])
                self.received = max([self.received, *(entry.end for entry in entries)])
            return
        if isinstance(item, TableWaits):
            _log.warning("Table %s waits: %s", item.table, item.reason)
            self._queue.put([Entry(LOG_SCHEMA.empty_table(), self.received, wait_mark(item.table, item.reason))])
            return
        self._listener.transactions(item)
        self.received = max(self.received, item.end)
        if isinstance(item, SpilledTransaction) or item.rows.num_rows or item.marks:
            self._queue.put([item])

    def _advance_when_idle(self, asked: bool) -> None:
        """When no transaction is open, advance to the server's own position."""
        if self._assembler.idle:
            self.received = max(self.received, self._server_end)
        if not self._queue.all_durable or not self._assembler.idle:
            self.watermark = max(self.watermark, self._queue.confirmed)
            return
        self.watermark = max(self.watermark, self.received)
        pause = _ANSWER_SECONDS if asked else self._heartbeat
        if self.watermark > self._queue.confirmed and self._clock.monotonic() - self._idled >= pause:
            self._idled = self._clock.monotonic()
            self._queue.put([Entry(LOG_SCHEMA.empty_table(), self.watermark)])

    def _confirm(self, answer: bool) -> None:
        at = self._queue.confirmed
        if at <= self._confirmed:
            self._connection.confirm(at, answer)
            return
        failpoint.reached("ack.before_confirm")
        self._connection.confirm(at, answer)
        self._confirmed = at
        failpoint.reached("capture.after_confirm")
