"""Backfills: tables read in chunks beside the stream, on request, for new tables, and after an interrupted snapshot.

A chunk is a short read between two marks in the WAL; `reconcile` merges it with the stream. `Backfills` listens to the
stream: requests and marks come through the WAL, so they are durable and ordered like changes, and a chunk's rows and
its progress are one log entry. A crash loses one chunk.

No lock beyond ACCESS SHARE, no snapshot open for longer than a chunk.
"""

import json
import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime

import psycopg
import pyarrow as pa

from cdc.capture.pgoutput.events import LogicalMessage
from cdc.capture.replication import captured_tables
from cdc.capture.source import slot
from cdc.capture.source.connect import Connection, connect
from cdc.capture.transactions.assembly import SpilledTransaction
from cdc.config.settings import Settings
from cdc.errors import MillraceError
from cdc.model import LOG_SCHEMA, Entry, Lsn, format_lsn
from cdc.ports import Clock, LogWriter
from snapshots.backfill.chunk_reader import TableReader
from snapshots.backfill.jobs import Job, JobState, known, missing
from snapshots.backfill.pace import Pace
from snapshots.backfill.reconcile import Merged
from snapshots.backfill.requests import (
    ChunkMark,
    Ended,
    JobControl,
    RefusedRequest,
    Request,
    TableRestart,
    ended_message,
    parse_message,
)
from snapshots.backfill.signing_key import control_key
from snapshots.backfill.windows import PendingChunk, Windows
from snapshots.initial.snapshot import EXACT_MARK, STATE_MARK
from snapshots.tables.rows import ReadStamp, log_rows, removals, truncation
from snapshots.tables.wal_messages import write_message

_RETRY_SECONDS = 2.0
_CANCEL_SECONDS = 5.0
_KEPT = 20
_log = logging.getLogger(__name__)


class Backfills:
    """A `stream.Listener` for the capture loop, and the thread that reads tables. Call `start`.

    The listener's methods are called by the reading thread only, `facts` and `jobs` by any thread.
    """

    def __init__(self, settings: Settings, log: LogWriter, clock: Clock) -> None:
        marks = log.progress().marks
        self._settings = settings
        self._schemas = log.schemas
        self._clock = clock
        self._key = control_key(settings.state, create=True)
        self._secret = secrets.token_hex(8)
        self._end = log.progress().end
        self._interrupted = json.loads(marks.get(STATE_MARK, "{}")).get("state") == "reading"
        self.history_exact_from = marks.get(EXACT_MARK, "")
        """From this LSN on the log's history is exact; empty while an interrupted snapshot is unfinished."""
        self._changed = threading.Condition()
        self._waiting = frozenset(captured_tables.waiting_tables(marks))
        self._jobs = {**known(marks), **{job.id: job for job in self._missing(marks)}}
        self._paces: dict[str, Pace] = {}
        self._windows = Windows()
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._busy: tuple[str, Connection | None] = ("", None)
        self._thread = threading.Thread(target=self._run, name="backfill", daemon=True)
        if self._interrupted and not any(job.automatic and not job.new_table for job in self._jobs.values()):
            # A crash came between the last rows of the initial snapshot and the mark that it is complete.
            self._conclude(log, slot.SourceIdentity.of_mark(marks[slot.MARK]).consistent_point)

    def _missing(self, marks: Mapping[str, str]) -> list[Job]:
        """The backfills that tables lack; a table that waits gets its own when it begins again."""
        return missing([table for table in self._settings.source.tables if table.name not in self._waiting], marks)

    def _conclude(self, log: LogWriter, exact: Lsn) -> None:
        """Record that the initial snapshot is complete."""
        log.append(Entry(LOG_SCHEMA.empty_table(), max(log.progress().end, exact), self._complete_marks(exact)))

    def _complete_marks(self, exact: Lsn) -> dict[str, str]:
        self._interrupted, self.history_exact_from = False, format_lsn(exact)
        return {STATE_MARK: json.dumps({"state": "done"}), EXACT_MARK: self.history_exact_from}

    def start(self) -> None:
        """Start the thread, which continues open backfills."""
        self._thread.start()

    def set_tables(self, settings: Settings, log: LogWriter) -> None:
        """Use the tables of `settings` and start the backfills that they lack; tables that wait are not read.

        Call it only while the capture loop is between two connections.
        """
        marks = log.progress().marks
        with self._changed:
            self._settings = settings
            self._waiting = frozenset(captured_tables.waiting_tables(marks))
            self._jobs |= {job.id: job for job in self._missing(marks) if job.restarts or job.id not in self._jobs}
            self._changed.notify_all()
        if self._interrupted and not self._unfinished():
            self._conclude(log, log.progress().end)

    def close(self) -> None:
        """Stop the thread; open backfills continue at the next start."""
        self._stop.set()
        with self._changed:
            self._changed.notify_all()
        self._windows.reset()
        self._interrupt()
        if self._thread.is_alive():
            self._thread.join()

    def _interrupt(self, identity: str = "") -> None:
        """Cancel the query of this backfill, or of any: with a condition, a single chunk may take hours."""
        with self._changed:
            busy, connection = self._busy
        if connection is not None and identity in (busy, ""):
            with suppress(psycopg.Error):
                connection.cancel_safe(timeout=_CANCEL_SECONDS)

    def jobs(self) -> list[Job]:
        """Every backfill in its current state."""
        with self._changed:
            return list(self._jobs.values())

    def facts(self) -> list[dict[str, object]]:
        """For the status: every open backfill, those that left a table incomplete, and the last few others."""
        jobs = self.jobs()
        ended = [job for job in jobs if not job.open]
        incomplete = [
            job for job in ended[:-_KEPT] if job.automatic and job.state in (JobState.FAILED, JobState.CANCELLED)
        ]
        shown = [*incomplete, *ended[-_KEPT:], *[job for job in jobs if job.open]]
        return [{**_shown(job), **self._facts_of(job)} for job in shown]

    def _facts_of(self, job: Job) -> dict[str, object]:
        facts = self._pace(job.id).facts(self._clock.monotonic(), job.open)
        waits = job.open and job.request.table in self._waiting
        return {**facts, "waiting": "its table, which cannot be captured for now"} if waits else facts

    # -- the listener: called by the reading thread

    def transactions(self, item: Entry | SpilledTransaction) -> None:
        """Note committed changes for the open windows."""
        if self._failure is not None:
            raise self._failure
        self._end = max(self._end, item.end)
        if isinstance(item, Entry):
            self._windows.add(item.rows)
        elif (first := next(item.parts(), None)) is not None:
            self._windows.invalidate(first.slice(0, 1), "a very large transaction was committed")

    def message(self, message: LogicalMessage) -> Sequence[Entry]:
        """Handle a request or a mark. Invalid messages are ignored and logged."""
        self._end = max(self._end, message.lsn)
        match parse_message(message.content, self._key):
            case Request() as request:
                return self._entry(Job(f"{message.lsn:X}", request))
            case JobControl(verb, identity):
                return self._control(verb, identity)
            case ChunkMark(False, token):
                self._windows.low(token)
            case ChunkMark(True, token):
                return self._merged(self._windows.high(token), message.lsn)
            case Ended(identity, token, reason) if token == self._secret and identity in self._jobs:
                return self._entry(replace(self._jobs[identity], state=JobState.FAILED, reason=reason))
            case TableRestart(identity, token) if token == self._secret and identity in self._jobs:
                return self._restart_table(self._jobs[identity], message.lsn)
            case RefusedRequest(reason):
                _log.warning("A message at %s was ignored: %s.", format_lsn(message.lsn), reason)
        return ()

    def connection_started(self) -> None:
        """A connection begins: chunks in progress are read again."""
        self._windows.reset()

    def _entry(self, *jobs: Job) -> Sequence[Entry]:
        """An entry that records the state of these backfills."""
        if not jobs:
            return ()
        with self._changed:
            self._jobs |= {job.id: job for job in jobs}
            self._changed.notify_all()
        marks = dict(job.mark() for job in jobs)
        for job in jobs:
            marks |= self._closing(job, self._end)
        return [Entry(LOG_SCHEMA.empty_table(), self._end, marks)]

    def _restart_table(self, job: Job, lsn: Lsn) -> Sequence[Entry]:
        """A truncate of the table, and the mark that its former rows are removed, in one entry."""
        schema = next((schema for schema in self._schemas.newest() if schema.table == job.request.table), None)
        (entry,) = self._entry(replace(job, emptied=True))
        if schema is None:
            return [entry]
        return [replace(entry, rows=truncation(schema, ReadStamp(lsn, Lsn(lsn - 1), datetime.now(UTC))))]

    def _control(self, verb: str, identity: str) -> Sequence[Entry]:
        """Record the new states, then cancel queries: a query that ends while its backfill runs is a failure."""
        chosen = [job for job in self._jobs.values() if identity in (job.id, "all")]
        changed = [after for job in chosen if (after := job.after_control(verb)) != job]
        entries = self._entry(*changed)
        for job in changed:
            if job.state is JobState.CANCELLED:
                threading.Thread(target=self._interrupt, args=(job.id,), daemon=True).start()
        return entries

    def _merged(self, pending: PendingChunk | None, lsn: Lsn) -> Sequence[Entry]:
        """The chunk's rows and the backfill's mark in one entry, at the position of the high mark."""
        if pending is None or pending.chunk is None or pending.window is None or pending.read_at is None:
            return ()
        outcome = pending.window.merge(pending.chunk)
        entries: list[Entry] = []
        if isinstance(outcome, Merged):
            # One below the mark's own LSN, where no commit record begins: so the position in the log is unique.
            stamp = ReadStamp(pending.chunk.version, Lsn(lsn - 1), pending.read_at)
            rows = log_rows(pending.schema, outcome.rows, stamp, 0)
            job = self._advanced(pending, rows.num_rows)
            rows = pa.concat_tables([rows, self._removed(job, pending, stamp, rows.num_rows)])
            entries = [Entry(rows, self._end, {**dict([job.mark()]), **self._closing(job, lsn)})]
        pending.finish(outcome)
        return entries

    def _removed(self, job: Job, pending: PendingChunk, stamp: ReadStamp, first: int) -> pa.Table:
        """The removals of key ranges that go with the last rows of a backfill.

        Their version is the request's LSN: below the rows that were read for it, so that those stay.
        """
        if job.state is not JobState.DONE or not job.request.removed:
            return LOG_SCHEMA.empty_table()
        removed = removals(pending.schema, job.request.removed, replace(stamp, version=job.requested_at), first)
        if removed.num_rows < len(job.request.removed):
            _log.warning(
                "Rows of removed partitions of %s stay in the stores: their columns are no longer part of its key.",
                job.request.table,
            )
        return removed

    def _advanced(self, pending: PendingChunk, rows: int) -> Job:
        with self._changed:
            job = self._jobs[pending.job]
            state = JobState.DONE if pending.finished and job.open else job.state
            job = self._jobs[job.id] = replace(job, resume=pending.resume, rows=job.rows + rows, state=state)
            self._changed.notify_all()
        return job

    def _closing(self, job: Job, lsn: Lsn) -> dict[str, str]:
        """The marks that history is exact from here on, when the last backfill of an interrupted snapshot has ended.

        A failed or cancelled backfill counts too: the status shows its table as incomplete.
        """
        if not self._interrupted or self._unfinished() or job.new_table or not job.automatic:
            return {}
        return self._complete_marks(Lsn(lsn + 1))  # a commit before this chunk may end at the mark's own LSN

    def _unfinished(self) -> list[Job]:
        """The open backfills of an interrupted snapshot, without those of tables that wait."""
        unfinished = [job for job in self._jobs.values() if job.automatic and not job.new_table and job.open]
        return [job for job in unfinished if job.request.table not in self._waiting]

    # -- the thread that reads tables

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                self._attempt(job)
        except BaseException as error:
            self._failure = error

    def _next(self) -> Job | None:
        """The oldest running backfill; waits for one. None: stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop.is_set() or self._running())
            return None if self._stop.is_set() else self._running()[0]

    def _running(self) -> list[Job]:
        running = [job for job in self._jobs.values() if job.state is JobState.RUNNING]
        return [job for job in running if job.request.table not in self._waiting]

    def _attempt(self, job: Job) -> None:
        try:
            with connect(self._settings.source, "millrace backfill") as connection, self._busy_with(job, connection):
                reader = TableReader(
                    connection, self._settings.source, self._schemas, self._windows, self._clock, secret=self._secret
                )
                reader.read(job, self._pace(job.id), self._current)
        except MillraceError as error:
            if self._current(job.id) is None:
                return
            if error.transient:
                _log.warning("Backfill of %s: %s", job.request.table, error)
                self._stop.wait(_RETRY_SECONDS)
            else:
                self._fail(job, error)

    @contextmanager
    def _busy_with(self, job: Job, connection: Connection) -> Iterator[None]:
        with self._changed:
            self._busy = (job.id, connection)
        try:
            yield
        finally:
            with self._changed:
                self._busy = ("", None)

    def _current(self, identity: str) -> Job | None:
        """The backfill in its current state; None: it is to stop."""
        with self._changed:
            job = self._jobs[identity]
            waits = job.request.table in self._waiting
        return job if job.state is JobState.RUNNING and not waits and not self._stop.is_set() else None

    def _fail(self, job: Job, error: MillraceError) -> None:
        """Record the failure through the WAL, like every other state."""
        _log.error("Backfill of %s failed: %s", job.request.table, error)
        with self._changed:
            self._jobs[job.id] = replace(self._jobs[job.id], state=JobState.FAILED, reason=str(error))
        message = ended_message(job.id, self._secret, str(error))
        try:
            with connect(self._settings.source, "millrace backfill") as connection:
                write_message(connection, message)
        except MillraceError as lost:
            _log.warning("The failure could not be recorded, so the next start retries the backfill: %s", lost)

    def _pace(self, identity: str) -> Pace:
        with self._changed:
            return self._paces.setdefault(identity, Pace())


def _shown(job: Job) -> dict[str, object]:
    return {
        "id": job.id,
        "table": str(job.request.table),
        "state": job.state.value,
        "whole": job.whole,
        "rows": job.rows,
        "reason": job.reason,
    }
