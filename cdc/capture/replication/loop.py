"""The capture loop: receive, decode, assemble, append, confirm; and reconnect when the connection is lost.

Promise: everything committed after the log's end is appended to the log once, in commit order, and nothing is confirmed
that is not durable there. WAL without captured changes becomes an empty entry before it is confirmed, so Millrace never
moves the slot ahead of the log; a slot that is ahead was moved by another program.
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
from cdc.capture.replication.captured_tables import CapturedTables, waiting_tables
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
    """The state of a capture loop. Nothing that commits at or below `watermark` is missing from the log."""

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
    """LSN and time of the last commit of each table that this loop appended."""


class CaptureLoop:
    """Copies the changes of one slot into one log. `run` blocks; every other method may be called from any thread."""

    def __init__(
        self,
        source: SourceSettings,
        log: LogWriter,
        clock: Clock,
        spill_folder: SpillFolder,
        *,
        masking: Masking = NO_MASK,
        listener: Listener | None = None,
        known: Collection[TableId] = (),
        evict: bool = False,
    ) -> None:
        """`known` are tables besides the configured ones whose last changes may still be in the WAL. `evict`: the slot
        may be in use by a daemon that was replaced by this one; the first connection ends that use."""
        self._source = source
        self._log = log
        self._clock = clock
        self._spill_folder = spill_folder
        self._masking = masking
        self._listener: Listener = listener or NoListener()
        self._leaving = frozenset(known)
        self._evict = evict
        self._counts = AppendCounts()
        self._queue = AppendQueue(log, _QUEUE_BYTES, self._counts, clock)
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
        """The current state."""
        counted = self._counts.totals()
        durable = self._queue.confirmed
        return LoopStatus(
            "blocked" if self._queue.trouble or self._no_room else self._state,
            max(self._watermark, durable),
            durable,
            max(self._received, durable),
            self._queue.queued_bytes,
            counted.changes,
            counted.rows,
            counted.size,
            counted.last_commit,
            self._reconnects,
            self._queue.trouble or self._no_room or self._trouble,
            counted.newest,
        )

    def fail(self, error: SourceError) -> None:
        """Make `run` raise this error: another thread found that continuing would lose changes."""
        self._failure = error

    def run_between_connections(self, change: Callable[[], None]) -> None:
        """Make `run` disconnect, call `change` in its own thread once the queue is empty, and reconnect."""
        self._change = change

    def set_tables(self, source: SourceSettings, masking: Masking, leaving: Collection[TableId]) -> None:
        """Capture the tables of `source` from the next connection on. Call it only inside `run_between_connections`.

        `leaving` are removed tables whose last changes may still be in the WAL.
        """
        self._source, self._masking, self._leaving = source, masking, frozenset(leaving)

    def run(self, stop: threading.Event) -> None:
        """Capture until `stop`. Raises errors that a retry cannot cure."""
        attempts = _Attempts(2 * self._source.heartbeat_seconds, self._clock)
        try:
            while not stop.is_set():
                try:
                    self._connect_and_read(stop, attempts)
                except (SourceLost, SlotBusy) as error:
                    self._wait_after(error, attempts.delay(error), stop)
        finally:
            self._queue.close()

    def _wait_after(self, error: SourceError | LogFull, delay: float, stop: threading.Event) -> None:
        _log.warning("%s Retrying in %.1f s.", error, delay)
        full = isinstance(error, LogFull)
        self._state, self._trouble = ("blocked", str(error)) if full else ("reconnecting", error.message)
        self._no_room = ""
        self._reconnects += 1
        until = self._clock.monotonic() + delay
        while not stop.is_set() and (left := until - self._clock.monotonic()) > 0:
            self._clock.wait(min(left, _WAIT_SECONDS))

    def _connect_and_read(self, stop: threading.Event, attempts: "_Attempts") -> None:
        while not self._queue.wait_until_durable(_WAIT_SECONDS):
            if stop.is_set():
                return
        if (change := self._change) is not None:
            self._change = None
            change()
        self._listener.connection_started()
        try:
            self._read(stop, attempts)
        except LogFull as error:  # no room to record a new schema: its changes are read again
            self._wait_after(error, _FULL_SECONDS, stop)

    def _read(self, stop: threading.Event, attempts: "_Attempts") -> None:
        after = self._log.progress().end
        with self._stream(self._connected(after, attempts.silence), after) as stream:
            self._state, self._trouble = "streaming", ""
            while not stop.is_set() and self._change is None:
                stream.step()
                self._watermark, self._received = stream.watermark, stream.received
                self._no_room = stream.trouble
                if self._failure is not None:
                    raise self._failure
                if stream.answered:
                    attempts.reset()
            stream.finish(_STOP_SECONDS)

    def _stream(self, connection: ReplicationConnection, after: Lsn) -> Stream:
        lookups = CatalogLookups(self._source)
        return Stream(
            connection,
            self._queue,
            Decoder(
                self._log.schemas,
                lookups.type_of,
                lookups.key_of,
                self._masking,
                after=after,
                captured=self._captured(),
            ),
            Assembler(after, _OPEN_BYTES, self._spill_folder.open),
            self._clock,
            listener=self._listener,
            heartbeat=self._source.heartbeat_seconds,
        )

    def _captured(self) -> CapturedTables:
        """The tables to capture over this connection: without those that wait according to the log."""
        tables = self._leaving | {table.name for table in self._source.tables}
        return CapturedTables(tables - waiting_tables(self._log.progress().marks).keys(), self._log.schemas.newest())

    def _connected(self, after: Lsn, silence: float) -> ReplicationConnection:
        """A connection that streams, after the check that slot and log fit together."""
        replication = connect(self._source, "millrace capture", replication=True)
        connection = ReplicationConnection(replication, self._clock, silence)
        try:
            server = slot.identify(replication)
            self._check_slot(server, after, replication)
            self._note_timeline(server)
            self._start(connection, server, after)
            self._sender, self._evict = replication.info.backend_pid, False
        except BaseException:
            connection.close()
            raise
        return connection

    def _start(self, connection: ReplicationConnection, server: slot.ServerIdentity, after: Lsn) -> None:
        try:
            connection.start(self._source.slot, self._source.publication, after)
        except SourceRefused:
            self._check_slot(server, after)  # if the slot was dropped since the first check, this error says so
            raise

    def _note_timeline(self, server: slot.ServerIdentity) -> None:
        """Record the server's timeline: the next failover is compared with it."""
        progress = self._log.progress()
        stored = slot.SourceIdentity.of_mark(progress.marks[slot.MARK])
        if stored.timeline != server.timeline:
            _log.warning("The source failed over from timeline %d to %d.", stored.timeline, server.timeline)
            mark = replace(stored, timeline=server.timeline).mark()
            self._log.append(Entry(LOG_SCHEMA.empty_table(), progress.end, {slot.MARK: mark}))

    def _check_slot(self, server: slot.ServerIdentity, after: Lsn, replication: slot.Connection | None = None) -> None:
        """Also distinguishes a lost slot from a lost connection: both end a stream with the same SQLSTATE. With
        `replication`, a slot that fits becomes a failover slot, if it can."""
        with brief(self._source) as connection:
            found = slot.find(connection, self._source.slot)
            if found is not None and found.active_pid and (self._evict or found.active_pid == self._sender):
                slot.evict(connection, found)
            stored = slot.SourceIdentity.of_mark(self._log.progress().marks[slot.MARK])
            slot.check(stored, found, server, after)
            if found is not None and replication is not None:
                slot.allow_failover(replication, connection, self._source, found)


class _Attempts:
    """How long to wait before the next connection, and how long it may be silent."""

    def __init__(self, silence: float, clock: Clock) -> None:
        self._clock = clock
        self._least = silence
        self.silence = silence
        self._failures = 0
        self._busy_since: float | None = None

    def reset(self) -> None:
        """The connection streams: the next failure counts from zero."""
        self._failures, self._busy_since, self.silence = 0, None, self._least

    def delay(self, error: SourceError) -> float:
        """Seconds until the next attempt. Raises SlotBusy if another process has used the slot for too long."""
        if isinstance(error, SlotBusy):
            self._busy_since = self._busy_since or self._clock.monotonic()
            if self._clock.monotonic() - self._busy_since > _BUSY_SECONDS:
                raise error
        self._failures += 1
        # A server that decodes a huge transaction sends nothing meanwhile: a fixed limit would reconnect for ever.
        self.silence = min(2 * self.silence, _LONGEST_SILENCE)
        return backoff.spread(backoff.delay(self._failures, _FIRST_DELAY, _LONGEST_DELAY))
