"""The capture process: publication, slot, first snapshot, then the stream, all into the log. No JVM.

The order matters: publication before slot (a slot never sees one that is younger), the slot's identity into the log
with the first entry, the snapshot before the stream.
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
from cdc.log.guarded import GuardedLog, WaitingLog
from cdc.model import LOG_SCHEMA, Entry
from cdc.ports import LogWriter
from cdc.service.capture import resync
from cdc.service.capture.status import CaptureStatus
from cdc.service.capture.table_changes import TableChanges, publish, refuse_unready, unobstructed, waiting_of
from cdc.service.capture.upkeep import Upkeep
from cdc.service.daemon import footprint, process
from cdc.service.daemon.budgets import DiskBudget
from snapshots.backfill.coordinator import Backfills
from snapshots.backfill.requests import Request, ask
from snapshots.backfill.signing_key import control_key
from snapshots.initial.snapshot import EXACT_MARK, Ending, run_initial
from snapshots.tables.rows import masking_of
from snapshots.tables.wal_messages import say

INTENT_MARK = "source.intent"
"""Written before the slot is made: a slot of that name is then known to be ours, even if we died while making it."""
_SLOT_SECONDS = 120.0
_UNDO_ATTEMPTS, _UNDO_SECONDS = 20, 0.2

_log = logging.getLogger(__name__)


def run(settings: Settings, stop: threading.Event, news: process.News) -> None:
    """Capture until `stop` is set. Raises what a restart cannot cure, and what a fresh start may."""
    with closing(cdc.log.open_writer(settings)) as log, _status(settings, log) as status:
        scratch = SpillFolder(settings.state / "scratch")
        budget = DiskBudget(settings.state, settings.budgets, lambda: scratch.size)
        scratch.check = budget.check
        schemas = CheckedSchemas(log.schemas, settings.source.schema_policy)
        Capture(settings, GuardedLog(log, schemas, budget.check), status, stop, news, scratch).run()


def _status(settings: Settings, log: LogWriter) -> CaptureStatus:
    marks = log.progress().marks
    return CaptureStatus(settings.state, marks.get(EXACT_MARK, ""), waiting_of(settings.source, marks))


@dataclass(frozen=True, slots=True)
class Capture:
    """One run of the process."""

    settings: Settings
    log: LogWriter
    status: CaptureStatus
    stop: threading.Event
    news: process.News = lambda: None
    scratch: SpillFolder | None = None
    """Where large transactions are set aside, within the disk's budget; None: under the state folder, without one."""

    def run(self) -> None:
        """Begin if the log is new or to be filled anew, then follow the stream."""
        fresh = slot.MARK not in self.log.progress().marks or resync.wanted(self.log)
        self.preflight(fresh)
        before = self._published_before()
        published = self._begun() if fresh else self._published(before)
        if not self.stop.is_set():
            self._follow(published, before or published)

    def preflight(self, fresh: bool) -> None:
        """Raise SourceRefused with everything that doctor finds wrong.

        Slot and publication of a log that goes on are judged by what the log knows of them instead, and a table that it
        has captured waits where it cannot be captured any more.
        """
        source, before = self.settings.source, self._published_before()
        with connect(source) as connection:  # an unreachable source is tried again, not refused
            if not fresh and before is not None:
                source = unobstructed(connection, source, self.log, before)
        if source.tables or not self.settings.source.tables:
            refuse_unready(source, frozenset({"slot"} if fresh else {"slot", "publication"}))

    def _published_before(self) -> Publication | None:
        stored = self.log.progress().marks.get(publication.MARK)
        return None if stored is None else Publication.of_mark(stored)

    def _published(self, before: Publication | None) -> Publication:
        """The publication at a later start, and what it is now noted in the log."""
        if before is not None:
            return publish(self.settings.source, before, self.log)
        source = self.settings.source
        with connect(source) as connection:
            return publication.ensure(connection, source).of({table.name for table in source.tables})

    def _begun(self) -> Publication:
        """Publication, slot and first snapshot. A start that fails before the log knows them leaves neither behind."""
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
        """Take back what a failed start has made. The server lets go of a slot only some time after its maker has."""
        for attempt in range(1, _UNDO_ATTEMPTS + 1):
            try:
                with connect(self.settings.source) as connection:
                    drop(connection)
                return
            except SourceError as error:
                if attempt == _UNDO_ATTEMPTS:
                    _log.warning("The %s of a start that failed is left behind: %s", what, error)
                SystemClock().wait(_UNDO_SECONDS)

    def _note(self, marks: dict[str, str]) -> None:
        self.log.append(Entry(LOG_SCHEMA.empty_table(), self.log.progress().end, marks))

    def begin(self, published: Publication) -> None:
        """Make the slot, note it in the log, and read the first snapshot: of every table that has one."""
        again = resync.wanted(self.log)
        settings = resync.whole(self.settings) if again else self.settings
        self._claim()
        self.status.say("creating slot")
        self.status.history_exact_from = ""
        self._say_first()
        stored = self.log.progress().marks.get(slot.MARK)
        noted = {publication.MARK: published.mark(), key_marks.MARK: self._keys()}
        for table in captured_tables.waiting(self.log.progress().marks):  # the snapshot brings it too
            noted |= captured_tables.marked(table, None)
        try:
            with slot.create(settings.source, _SLOT_SECONDS, self._waiting) as made:
                marks = {slot.MARK: slot.SourceIdentity.of_created(made).mark(), **noted}
                more: Ending | None = partial(resync.ending, settings, self.log, made) if again else None
                self.status.say("snapshot")
                log = WaitingLog(self.log, self.stop, partial(self.status.say, "snapshot"))
                run_initial(settings, made, log, self.status.snapshot, self.stop, marks=marks, ending=more)
        except BaseException:
            if self.log.progress().marks.get(slot.MARK) == stored:
                self._undo(f"slot {settings.source.slot}", partial(slot.drop, name=settings.source.slot))
            raise

    def _keys(self) -> str:
        """The tables' keys; one that is replaced while the snapshot is taken is noticed afterwards."""
        with connect(self.settings.source) as connection:
            now = key_marks.current(connection, self.settings.source.tables)
        return key_marks.mark(now, {}, self.settings.source.tables)

    def _say_first(self) -> None:
        """Before any row: nobody may take what the stores are about to get for all of it. Waits for room to say it."""
        while True:
            try:
                return self.status.publish()
            except OSError as error:
                _log.warning("The status cannot be written (%s); the snapshot waits for it.", error.strerror)
                if self.stop.wait(1.0):
                    raise

    def _claim(self) -> None:
        """Make sure that the slot about to be made is ours: drop one that we left, refuse one of somebody else."""
        name = self.settings.source.slot
        with connect(self.settings.source) as connection:
            found = slot.find(connection, name)
            if found is not None:
                if self.log.progress().marks.get(INTENT_MARK) != name:
                    raise SourceRefused(
                        f"Slot {name} exists, but this log knows nothing of it.",
                        f"Configure another source.slot, or drop it: select pg_drop_replication_slot('{name}')",
                    )
                slot.drop(connection, name)
            resync.refuse_older_server(connection, self.log)
        self._note({INTENT_MARK: name})

    def _waiting(self, what: str) -> None:
        _log.info("%s", what)
        self.status.say("creating slot", what)

    def _follow(self, published: Publication, before: Publication) -> None:
        """The stream, and beside it: backfills, a look at slot and publication, and the log's upkeep."""
        source, clock = self.settings.source, SystemClock()
        left = {entry.table for entry in before.tables} - {table.name for table in source.tables}
        leaving = frozenset() if published.all_tables else frozenset(left)
        backfills = Backfills(self.settings, self.log, clock)
        reader = CaptureLoop(
            source,
            self.log,
            clock,
            self.scratch or SpillFolder(self.settings.state / "scratch"),
            masking=masking_of(source),
            listener=backfills,
            known=leaving,
        )
        side = monitor.SourceMonitor(source, published, reader.fail)
        following = TableChanges(
            self.settings, self.log, reader, side, backfills, published, self.stop, leaving=leaving
        )
        side.absent = following.absent
        key = control_key(self.settings.state, create=True)
        partitions = Partitions(following.partitions, self.log, partial(refilled, key))

        def also(connection: Connection) -> None:
            following.look(connection)
            partitions.look(connection)

        side.also = also
        self.status.follow(reader, side, backfills, following, partitions)
        with Upkeep(self.log), closing(side), closing(backfills):
            side.start()
            backfills.start()
            threading.Thread(target=following.run, args=(self.news,), name="tables", daemon=True).start()
            reader.run(self.stop)


def refilled(key: bytes, connection: Connection, wanted: PartitionRefill) -> None:
    """Ask for the rows of partitions that came, and for the end of those that went, at this place of the WAL."""
    where = " or ".join(f"({condition})" for condition in wanted.conditions)
    say(connection, ask(Request(wanted.table, where, newest=True, removed=wanted.removed), key))


if __name__ == "__main__":
    footprint.do_without("pandas")
    footprint.collect_rarely()
    sys.exit(process.main("capture", run))
