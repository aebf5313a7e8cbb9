"""The capture process: publication, slot, initial snapshot, then the stream, all into the log. No JVM.

The order matters: publication before slot (a slot does not know publications created after it), the slot's identity in
the log with the first entry, the snapshot before the stream.
"""

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

import cdc.log
from cdc.capture.replication import captured_tables
from cdc.capture.replication.loop import CaptureLoop
from cdc.capture.source import key_marks, monitor, publication, slot
from cdc.capture.source.connect import Connection, connect
from cdc.capture.source.partitions import PartitionRefill, Partitions
from cdc.capture.source.publication import Publication
from cdc.capture.source.schema_policy import CheckedSchemas
from cdc.capture.transactions.spill import SpillFolder
from cdc.clock import SystemClock
from cdc.config.settings import Settings
from cdc.errors import SourceError, SourceRefused
from cdc.fence import guard, start
from cdc.log.guarded import GuardedLog, WaitingLog
from cdc.model import LOG_SCHEMA, Entry
from cdc.ports import LogWriter
from cdc.service.capture import resync
from cdc.service.capture.status import CaptureStatus
from cdc.service.capture.table_changes import TableChanges, publish, refuse_unready, tables_waiting, without_obstacles
from cdc.service.capture.upkeep import Upkeep
from cdc.service.capture.view_output import ViewOutput
from cdc.service.daemon import footprint, process
from cdc.service.daemon.budgets import DiskBudget
from snapshots.backfill.coordinator import Backfills
from snapshots.backfill.requests import Request, backfill_message
from snapshots.backfill.signing_key import control_key
from snapshots.initial.snapshot import EXACT_MARK, Ending, run_initial
from snapshots.tables.rows import masking_of
from snapshots.tables.wal_messages import write_message

INTENT_MARK = "source.intent"
"""Written before the slot is created: a slot of that name is then known to be ours, even after a crash meanwhile."""
_SLOT_SECONDS = 120.0
_UNDO_ATTEMPTS, _UNDO_SECONDS = 20, 0.2

_log = logging.getLogger(__name__)


def run(settings: Settings, stop: threading.Event, news: process.SettingsChange) -> None:
    """Capture until `stop` is set. Raises errors that need a restart or a person."""
    with closing(cdc.log.open_writer(settings)) as log, _status(settings, log) as status:
        spill_folder = SpillFolder(settings.state / "scratch")
        budget = DiskBudget(settings.state, settings.budgets, lambda: spill_folder.size)
        spill_folder.check = budget.check
        schemas = CheckedSchemas(log.schemas, settings.source.schema_policy)
        guarded = GuardedLog(log, schemas, budget.check)
        with ViewOutput(guarded, log.schemas, settings.state, stop) as views:
            status.views = views
            Capture(settings, guarded, status, stop, news, spill_folder).run()
        if views.failure is not None:
            raise views.failure


def _status(settings: Settings, log: LogWriter) -> CaptureStatus:
    marks = log.progress().marks
    return CaptureStatus(settings.state, marks.get(EXACT_MARK, ""), tables_waiting(settings.source, marks))


@dataclass(frozen=True, slots=True)
class Capture:
    """One run of the process."""

    settings: Settings
    log: LogWriter
    status: CaptureStatus
    stop: threading.Event
    news: process.SettingsChange = lambda: None
    spill_folder: SpillFolder | None = None
    """Where large transactions are spilled, within the disk budget; None: under the state folder, without a budget."""

    def run(self) -> None:
        """Take the initial snapshot if the log is new or a resync was requested, then run the stream."""
        fresh = slot.MARK not in self.log.progress().marks or resync.requested(self.log)
        self.preflight(fresh)
        before = self._published_before()
        published = self._start_fresh() if fresh else self._published(before)
        if not self.stop.is_set():
            self._stream(published, before or published)

    def preflight(self, fresh: bool) -> None:
        """Raise SourceRefused with all failed checks of `doctor`.

        If the log is not new, slot and publication are compared with its marks instead, and a captured table that can
        no longer be captured waits.
        """
        source, before = self.settings.source, self._published_before()
        with connect(source) as connection:  # an unreachable source is retried, not refused
            if not fresh and before is not None:
                source = without_obstacles(connection, source, self.log, before)
        if source.tables or not self.settings.source.tables:
            refuse_unready(source, frozenset({"slot"} if fresh else {"slot", "publication"}))

    def _published_before(self) -> Publication | None:
        stored = self.log.progress().marks.get(publication.MARK)
        return None if stored is None else Publication.of_mark(stored)

    def _published(self, before: Publication | None) -> Publication:
        """The publication at a later start; its tables are updated and recorded in the log."""
        if before is not None:
            return publish(self.settings.source, before, self.log)
        source = self.settings.source
        with connect(source) as connection:
            return publication.ensure(connection, source).of({table.name for table in source.tables})

    def _start_fresh(self) -> Publication:
        """Create publication and slot, take the initial snapshot. A failure before the log has them drops both
        again."""
        source, stored = self.settings.source, self.log.progress().marks.get(publication.MARK)
        with connect(source) as connection:
            existed = publication.read(connection, source.publication) is not None
            published = publication.ensure(connection, source).of({table.name for table in source.tables})
        try:
            self.begin(published)
        except BaseException:
            if not existed and self.log.progress().marks.get(publication.MARK) == stored:
                self._undo(f"publication {source.publication}", partial(publication.drop, name=source.publication))
            raise
        return published

    def _undo(self, what: str, drop: Callable[[Connection], None]) -> None:
        """Drop what a failed start has created. The server releases a slot some time after its connection ended."""
        for attempt in range(1, _UNDO_ATTEMPTS + 1):
            guard.require()  # the slot of that name may be another daemon's by now
            try:
                with connect(self.settings.source) as connection:
                    drop(connection)
                return
            except SourceError as error:
                if attempt == _UNDO_ATTEMPTS:
                    _log.warning("The %s of a failed start could not be dropped: %s", what, error)
                SystemClock().wait(_UNDO_SECONDS)

    def _note(self, marks: dict[str, str]) -> None:
        self.log.append(Entry(LOG_SCHEMA.empty_table(), self.log.progress().end, marks))

    def begin(self, published: Publication) -> None:
        """Create the slot, record it in the log, and take the initial snapshot of every table that has one."""
        again = resync.requested(self.log)
        settings = resync.whole(self.settings) if again else self.settings
        self._claim()
        self.status.set_state("creating slot")
        self.status.history_exact_from = ""
        self._publish_first_status()
        stored = self.log.progress().marks.get(slot.MARK)
        recorded = {publication.MARK: published.mark(), key_marks.MARK: self._keys()}
        for table in captured_tables.waiting_tables(self.log.progress().marks):  # the snapshot has it too
            recorded |= captured_tables.wait_mark(table, None)
        try:
            with slot.create(settings.source, _SLOT_SECONDS, self._waiting) as made:
                marks = {slot.MARK: slot.SourceIdentity.of_created(made).mark(), **recorded}
                more: Ending | None = partial(resync.ending, settings, self.log, made) if again else None
                self.status.set_state("snapshot")
                log = WaitingLog(self.log, self.stop, partial(self.status.set_state, "snapshot"))
                run_initial(settings, made, log, self.status.snapshot, self.stop, marks=marks, ending=more)
        except BaseException:
            if self.log.progress().marks.get(slot.MARK) == stored:
                self._undo(f"slot {settings.source.slot}", partial(slot.drop, name=settings.source.slot))
            raise

    def _keys(self) -> str:
        """The tables' keys; one that is replaced during the snapshot is detected afterwards."""
        with connect(self.settings.source) as connection:
            now = key_marks.current(connection, self.settings.source.tables)
        return key_marks.mark(now, {}, self.settings.source.tables)

    def _publish_first_status(self) -> None:
        """Publish before the first row that history is not exact yet, so that readers of the stores can know. If the
        disk is full, wait for room."""
        while True:
            try:
                return self.status.publish()
            except OSError as error:
                _log.warning("The status file cannot be written (%s); the snapshot waits until it can.", error.strerror)
                if self.stop.wait(1.0):
                    raise

    def _claim(self) -> None:
        """Drop a slot of this name that a crash of ours left behind; refuse one that another program created."""
        name = self.settings.source.slot
        guard.require()
        with connect(self.settings.source) as connection:
            found = slot.find(connection, name)
            if found is not None:
                if self.log.progress().marks.get(INTENT_MARK) != name:
                    raise SourceRefused(
                        f"Slot {name} exists, but was not created for this log.",
                        f"Configure another source.slot, or drop it: select pg_drop_replication_slot('{name}')",
                    )
                slot.drop(connection, name)
            resync.pass_log_end(connection, self.log)
        self._note({INTENT_MARK: name})

    def _waiting(self, what: str) -> None:
        _log.info("%s", what)
        self.status.set_state("creating slot", what)

    def _stream(self, published: Publication, before: Publication) -> None:
        """Run the stream, and in other threads backfills, checks of slot and publication, and log maintenance."""
        source, clock = self.settings.source, SystemClock()
        left = {entry.table for entry in before.tables} - {table.name for table in source.tables}
        leaving = frozenset() if published.all_tables else frozenset(left)
        backfills = Backfills(self.settings, self.log, clock)
        loop = CaptureLoop(
            source,
            self.log,
            clock,
            self.spill_folder or SpillFolder(self.settings.state / "scratch"),
            masking=masking_of(source),
            listener=backfills,
            known=leaving,
            evict=start.taken_over(),
        )
        source_monitor = monitor.SourceMonitor(source, published, loop.fail)
        table_changes = TableChanges(
            self.settings, self.log, loop, source_monitor, backfills, published, self.stop, leaving=leaving
        )
        source_monitor.may_be_absent = table_changes.may_be_absent
        key = control_key(self.settings.state, create=True)
        partitions = Partitions(table_changes.partitions, self.log, partial(request_refill, key))

        def check_tables(connection: Connection) -> None:
            table_changes.check(connection)
            partitions.check(connection)

        source_monitor.also_check = check_tables
        self.status.attach(loop, source_monitor, backfills, table_changes, partitions)
        with Upkeep(self.log), closing(source_monitor), closing(backfills):
            source_monitor.start()
            backfills.start()
            threading.Thread(target=table_changes.run, args=(self.news,), name="tables", daemon=True).start()
            loop.run(self.stop)


def request_refill(key: bytes, connection: Connection, wanted: PartitionRefill) -> None:
    """Request, through the WAL, the rows of attached partitions and the removal of those of removed ones."""
    where = " or ".join(f"({condition})" for condition in wanted.conditions)
    write_message(connection, backfill_message(Request(wanted.table, where, newest=True, removed=wanted.removed), key))


if __name__ == "__main__":
    footprint.block_import("pandas")
    footprint.collect_rarely()
    sys.exit(process.main("capture", run))
