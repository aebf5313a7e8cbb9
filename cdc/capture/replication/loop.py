"""The loop of capture: drain, decode, assemble, hand over, confirm; and begin again when the source went away.

Promise: everything committed after the log's end goes into the log once, in commit order, and nothing is confirmed
that is not durable there. An idle stretch of WAL becomes an empty entry before it is confirmed, so the slot is never
ahead of the log, and a slot that is has been moved by somebody else.
"""

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime

from cdc import backoff
from cdc.capture.pgoutput.catalog_lookups import CatalogLookups
from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.replication.append_counts import AppendCounts
from cdc.capture.replication.append_queue import AppendQueue
from cdc.capture.replication.captured_tables import CapturedTables, waiting
from cdc.capture.replication.connection import ReplicationConnection
from cdc.capture.replication.stream import Listener, NoListener, Stream
from cdc.capture.rows.mask import NO_MASK, Masking
from cdc.capture.source import slot
from cdc.capture.source.connect import brief, connect
from cdc.capture.transactions.assembly import Assembler
from cdc.capture.transactions.spill import SpillFolder
from cdc.config.settings import SourceSettings
from cdc.errors import LogFull, SlotBusy, SourceError, SourceLost, SourceRefused
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry, Lsn, TableId
from cdc.ports import Clock, LogWriter

_QUEUE_BYTES = 32 * 2**20
"""Two merged entries: one is being appended while the next is collected."""
_OPEN_BYTES = 64 * 2**20
_WAIT_SECONDS = 0.2
_FIRST_DELAY, _LONGEST_DELAY = 0.4, 15.0
_LONGEST_SILENCE = 900.0
_BUSY_SECONDS = 30.0
_STOP_SECONDS = 10.0
_FULL_SECONDS = 2.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoopStatus:
    """What the reader knows of itself. Nothing that commits at or below `watermark` is missing from the log."""

    state: str = "starting"
    watermark: Lsn = ZERO_LSN
    durable: Lsn = ZERO_LSN
    received: Lsn = ZERO_LSN
    queued_bytes: int = 0
    changes: Mapping[tuple[str, str], int] = field(default_factory=dict)
    rows: int = 0
    size: int = 0
    last_commit: datetime | None = None
    reconnects: int = 0
    trouble: str = ""
    newest: Mapping[str, tuple[int, datetime]] = field(default_factory=dict)
    """The last commit of each table that this reader put into the log: its LSN and time."""


class CaptureLoop:
    """Follows one slot into one log. `run` in one thread; `status` and `fail` from any."""

    def __init__(
        self,
        source: SourceSettings,
        log: LogWriter,
        clock: Clock,
        scratch: SpillFolder,
        *,
        masking: Masking = NO_MASK,
        listener: Listener | None = None,
        known: Collection[TableId] = (),
    ) -> None:
        """`known` are tables besides the configured ones whose changes may still be under way."""
        self._source = source
        self._log = log
        self._clock = clock
        self._scratch = scratch
        self._masking = masking
        self._listener: Listener = listener or NoListener()
        self._leaving = frozenset(known)
        self._tally = AppendCounts()
        self._handoff = AppendQueue(log, _QUEUE_BYTES, self._tally, clock)
        self._state = "starting"
        self._trouble = ""
        self._no_room = ""
        self._reconnects = 0
        self._watermark = self._received = log.progress().end
        self._failure: SourceError | None = None
        self._change: Callable[[], None] | None = None
        self._sender = 0

    @property
    def status(self) -> LoopStatus:
        """A picture of now."""
        counted = self._tally.counted()
        durable = self._handoff.confirmed
        return LoopStatus(
            "blocked" if self._handoff.trouble or self._no_room else self._state,
            max(self._watermark, durable),
            durable,
            max(self._received, durable),
            self._handoff.held,
            counted.changes,
            counted.rows,
            counted.size,
            counted.last_commit,
            self._reconnects,
            self._handoff.trouble or self._no_room or self._trouble,
            counted.newest,
        )

    def fail(self, error: SourceError) -> None:
        """Have `run` raise this at its next turn: somebody else found that going on would be wrong."""
        self._failure = error

    def between(self, change: Callable[[], None]) -> None:
        """Have `run` end its connection, do this in its own thread while nothing is on its way, and connect again."""
        self._change = change

    def follow(self, source: SourceSettings, masking: Masking, leaving: Collection[TableId]) -> None:
        """Take over other tables from the next connection on. Only inside `between`.

        `leaving` are those besides whose last changes may still be under way.
        """
        self._source, self._masking, self._leaving = source, masking, frozenset(leaving)

    def run(self, stop: threading.Event) -> None:
        """Follow the slot until `stop`. Raises what cannot be cured by trying again."""
        attempts = _Attempts(2 * self._source.heartbeat_seconds, self._clock)
        try:
            while not stop.is_set():
                try:
                    self._follow(stop, attempts)
                except (SourceLost, SlotBusy) as error:
                    self._lost(error, attempts.delay(error), stop)
        finally:
            self._handoff.close()

    def _lost(self, error: SourceError | LogFull, delay: float, stop: threading.Event) -> None:
        _log.warning("%s Trying again in %.1f s.", error, delay)
        full = isinstance(error, LogFull)
        self._state, self._trouble = ("blocked", str(error)) if full else ("reconnecting", error.message)
        self._no_room = ""
        self._reconnects += 1
        until = self._clock.monotonic() + delay
        while not stop.is_set() and (left := until - self._clock.monotonic()) > 0:
            self._clock.wait(min(left, _WAIT_SECONDS))

    def _follow(self, stop: threading.Event, attempts: "_Attempts") -> None:
        while not self._handoff.settle(_WAIT_SECONDS):
            if stop.is_set():
                return
        if (change := self._change) is not None:
            self._change = None
            change()
        self._listener.restarted()
        try:
            self._read(stop, attempts)
        except LogFull as error:  # a new schema found no room: what came with it is read again
            self._lost(error, _FULL_SECONDS, stop)

    def _read(self, stop: threading.Event, attempts: "_Attempts") -> None:
        after = self._log.progress().end
        with self._stream(self._connected(after, attempts.silence), after) as stream:
            self._state, self._trouble = "streaming", ""
            while not stop.is_set() and self._change is None:
                stream.turn()
                self._watermark, self._received = stream.watermark, stream.received
                self._no_room = stream.trouble
                if self._failure is not None:
                    raise self._failure
                if stream.alive:
                    attempts.reset()
            stream.finish(_STOP_SECONDS)

    def _stream(self, wire: ReplicationConnection, after: Lsn) -> Stream:
        lookups = CatalogLookups(self._source)
        return Stream(
            wire,
            self._handoff,
            Decoder(
                self._log.schemas,
                lookups.type_of,
                lookups.key_of,
                self._masking,
                after=after,
                captured=self._captured(),
            ),
            Assembler(after, _OPEN_BYTES, self._scratch.open),
            self._clock,
            listener=self._listener,
            heartbeat=self._source.heartbeat_seconds,
        )

    def _captured(self) -> CapturedTables:
        """What is wanted of this connection: nothing of tables that the log knows to wait."""
        tables = self._leaving | {table.name for table in self._source.tables}
        return CapturedTables(tables - waiting(self._log.progress().marks).keys(), self._log.schemas.newest())

    def _connected(self, after: Lsn, silence: float) -> ReplicationConnection:
        """A started stream, once slot and log are known to fit together."""
        replication = connect(self._source, "millrace capture", replication=True)
        wire = ReplicationConnection(replication, self._clock, silence)
        try:
            server = slot.identify(replication)
            self._check_slot(server, after)
            self._note_timeline(server)
            self._start(wire, server, after)
            self._sender = replication.info.backend_pid
        except BaseException:
            wire.close()
            raise
        return wire

    def _start(self, wire: ReplicationConnection, server: slot.ServerIdentity, after: Lsn) -> None:
        try:
            wire.start(self._source.slot, self._source.publication, after)
        except SourceRefused:
            self._check_slot(server, after)  # dropped since the last look: then that is what has to be said
            raise

    def _note_timeline(self, server: slot.ServerIdentity) -> None:
        """What comes from now on is of this timeline: the next failover is compared with it."""
        progress = self._log.progress()
        stored = slot.SourceIdentity.of_mark(progress.marks[slot.MARK])
        if stored.timeline != server.timeline:
            _log.warning("The source failed over from timeline %d to %d.", stored.timeline, server.timeline)
            mark = replace(stored, timeline=server.timeline).mark()
            self._log.append(Entry(LOG_SCHEMA.empty_table(), progress.end, {slot.MARK: mark}))

    def _check_slot(self, server: slot.ServerIdentity, after: Lsn) -> None:
        """Also tells a lost slot from a lost connection: both end a stream with the same SQLSTATE."""
        with brief(self._source) as connection:
            found = slot.find(connection, self._source.slot)
            if found is not None and found.active_pid and found.active_pid == self._sender:
                slot.evict(connection, found)
        stored = slot.SourceIdentity.of_mark(self._log.progress().marks[slot.MARK])
        slot.check(stored, found, server, after)


class _Attempts:
    """How long to wait before the next connection, and how much silence to bear on it."""

    def __init__(self, silence: float, clock: Clock) -> None:
        self._clock = clock
        self._least = silence
        self.silence = silence
        self._failures = 0
        self._busy_since: float | None = None

    def reset(self) -> None:
        """The connection carries a stream: its next loss is a new one."""
        self._failures, self._busy_since, self.silence = 0, None, self._least

    def delay(self, error: SourceError) -> float:
        """Seconds until the next try. Raises SlotBusy again once another reader has held the slot for long."""
        if isinstance(error, SlotBusy):
            self._busy_since = self._busy_since or self._clock.monotonic()
            if self._clock.monotonic() - self._busy_since > _BUSY_SECONDS:
                raise error
        self._failures += 1
        # A server that decodes a huge transaction in silence must not be asked to begin again for ever.
        self.silence = min(2 * self.silence, _LONGEST_SILENCE)
        return backoff.spread(backoff.delay(self._failures, _FIRST_DELAY, _LONGEST_DELAY))
