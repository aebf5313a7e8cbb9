"""One connection's worth of reading: from frames to entries on their way to the log, and back to confirmations."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, Self

from cdc import failpoint
from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.pgoutput.events import LogicalMessage, TableWaits
from cdc.capture.replication.append_queue import AppendQueue
from cdc.capture.replication.captured_tables import marked
from cdc.capture.replication.connection import Frame, ReplicationConnection
from cdc.capture.transactions.assembly import Assembler, Item, SpilledTransaction
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry
from cdc.ports import Clock

MESSAGE_PREFIX = "millrace"
"""Logical messages with this prefix are ours; all others are passed over."""

_FEED_MESSAGES = 16_384
_FEED_BYTES = 8 * 2**20
"""Feeds of 8 to 16 thousand messages decode fastest; 100 thousand are 1.6 times slower."""
_WAIT_SECONDS = 0.2
_PACE_SECONDS = 0.01
"""Least time between two feeds while the log is at work: each costs half a millisecond however small. An idle log is
fed at once, so what comes during one append goes into the next."""
_ANSWER_SECONDS = 1.0

_log = logging.getLogger(__name__)


class Listener(Protocol):
    """Sees the stream in log order, in the reading thread, before anything is handed to the log."""

    def passed(self, item: Entry | SpilledTransaction) -> None:
        """These whole transactions go into the log next."""

    def heard(self, message: LogicalMessage) -> Sequence[Entry]:
        """A message with our prefix; returns entries to append at this very place of the log."""

    def restarted(self) -> None:
        """A connection begins: everything after the log's end comes again."""


class NoListener:
    """A listener that wants nothing."""

    def passed(self, item: Entry | SpilledTransaction) -> None:
        """Nothing."""

    def heard(self, message: LogicalMessage) -> Sequence[Entry]:
        """Nothing."""
        return ()

    def restarted(self) -> None:
        """Nothing."""


class Stream:
    """Turns of reading over a started wire, which it owns: `with` stops it."""

    def __init__(
        self,
        wire: ReplicationConnection,
        handoff: AppendQueue,
        decoder: Decoder,
        assembler: Assembler,
        clock: Clock,
        *,
        listener: Listener,
        heartbeat: float,
    ) -> None:
        self._wire = wire
        self._handoff = handoff
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
        self._confirmed = handoff.confirmed
        self.received = handoff.confirmed
        """The end of the newest whole transaction, or of the idle stretch after it."""
        self.watermark = handoff.confirmed
        """Nothing that commits at or below it is missing from the log."""
        self.alive = False
        """Whether the server has said anything yet."""
        handoff.call_when_durable(wire.wake)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._handoff.call_when_durable(lambda: None)
        self._assembler.discard()
        self._wire.close()

    def turn(self) -> None:
        """Take what the server has sent, or wait a little for it; confirm what has become durable meanwhile."""
        self._handoff.check()
        if self._handoff.full or not self._relieved():
            self._wire.hold(_WAIT_SECONDS)
            self._confirm(answer=False)
            return
        drained = self._wire.drain(_FEED_MESSAGES, _FEED_BYTES, self._patience())
        self._frames += drained.frames
        self._size += drained.size
        self._server_end = max(self._server_end, drained.server_end)
        self.alive = self.alive or bool(drained.frames or drained.server_end)
        if self._frames and self._is_due():
            self._feed()
        if not self._frames:
            self._look_around(drained.reply)
        self._confirm(drained.reply)

    @property
    def trouble(self) -> str:
        """Why a large transaction cannot be set aside at the moment; empty: it can."""
        return self._assembler.trouble

    def _relieved(self) -> bool:
        """Whether there is room for more; while there is none, nothing is read and the connection is kept."""
        if not self._assembler.trouble:
            return True
        relieved = self._assembler.relieve()
        if relieved:
            _log.info("There is room again for large transactions.")
        return relieved

    def _patience(self) -> float:
        """How long to wait for more. The log's next append is woken up for: see `call_when_durable`."""
        if not self._frames:
            return _WAIT_SECONDS
        return 0.0 if self._is_due() else max(0.0, self._fed + _PACE_SECONDS - self._clock.monotonic())

    def _is_due(self) -> bool:
        enough = len(self._frames) >= _FEED_MESSAGES or self._size >= _FEED_BYTES
        return enough or self._handoff.settled or self._clock.monotonic() - self._fed >= _PACE_SECONDS

    def finish(self, seconds: float) -> None:
        """Let what is under way become durable, confirm it and leave the slot free."""
        self._handoff.settle(seconds)
        self._confirm(answer=True)
        self._wire.stop()

    def _feed(self) -> None:
        self._fed = self._clock.monotonic()
        frames, self._frames, self._size = self._frames, [], 0
        decoded = self._decoder.feed(frames)
        for item in self._assembler.take(decoded.rows, decoded.events, decoded.subxids):
            self._pass_on(item)
        if self._assembler.trouble:
            _log.warning("%s Reading stops until there is room.", self._assembler.trouble)

    def _pass_on(self, item: Item) -> None:
        if isinstance(item, LogicalMessage):
            if item.prefix == MESSAGE_PREFIX:
                # A message inside a transaction is older than what went by before its commit.
                said = self._listener.heard(item)
                self._handoff.put([replace(entry, end=max(entry.end, self.received)) for entry in said])
                self.received = max([self.received, *(entry.end for entry in said)])
            return
        if isinstance(item, TableWaits):
            _log.warning("Table %s waits: %s", item.table, item.reason)
            self._handoff.put([Entry(LOG_SCHEMA.empty_table(), self.received, marked(item.table, item.reason))])
            return
        self._listener.passed(item)
        self.received = max(self.received, item.end)
        if isinstance(item, SpilledTransaction) or item.rows.num_rows or item.marks:
            self._handoff.put([item])

    def _look_around(self, asked: bool) -> None:
        """Where nothing is under way, the server's own position is ours."""
        if self._assembler.between:
            self.received = max(self.received, self._server_end)
        if not self._handoff.settled or not self._assembler.between:
            self.watermark = max(self.watermark, self._handoff.confirmed)
            return
        self.watermark = max(self.watermark, self.received)
        pause = _ANSWER_SECONDS if asked else self._heartbeat
        if self.watermark > self._handoff.confirmed and self._clock.monotonic() - self._idled >= pause:
            self._idled = self._clock.monotonic()
            self._handoff.put([Entry(LOG_SCHEMA.empty_table(), self.watermark)])

    def _confirm(self, answer: bool) -> None:
        at = self._handoff.confirmed
        if at <= self._confirmed:
            self._wire.confirm(at, answer)
            return
        failpoint.reached("ack.before_confirm")
        self._wire.confirm(at, answer)
        self._confirmed = at
        failpoint.reached("capture.after_confirm")
