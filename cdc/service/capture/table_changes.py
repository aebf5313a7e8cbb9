"""Tables that are added, removed or recreated while the stream runs, without a restart of the process.

The publication is altered, the log's marks are written, and the capture loop gets its new tables, all between two
connections of the stream, when the append queue is empty. After a crash in between, the next start does the same.
"""

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from cdc import failpoint
from cdc.capture.replication import captured_tables
from cdc.capture.replication.captured_tables import WaitReason
from cdc.capture.replication.loop import CaptureLoop
from cdc.capture.source import catalog, doctor, key_marks, publication, slot
from cdc.capture.source.connect import Connection, connect
from cdc.capture.source.doctor import Verdict
from cdc.capture.source.monitor import SourceMonitor
from cdc.capture.source.publication import Publication
from cdc.config.settings import PartitionSettings, Settings, SourceSettings
from cdc.errors import ConfigError, LogFull, MillraceError, SourceError, SourceRefused
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry, Lsn, TableId
from cdc.ports import LogWriter, Schemas
from cdc.service.capture import obstacles
from cdc.service.daemon.process import SettingsChange
from snapshots.backfill import jobs
from snapshots.backfill.coordinator import Backfills
from snapshots.backfill.jobs import Job
from snapshots.tables.rows import describe, masking_of

_LOCK_SECONDS = 10
"""ALTER PUBLICATION may wait for a vacuum of the table; the stream waits too, so not for long."""
_POLL_SECONDS = 0.5
_RETRY_SECONDS = 30.0
"""After an automatic change has failed, perhaps for a lock: every attempt interrupts the stream."""
_log = logging.getLogger(__name__)


def refuse_unready(source: SourceSettings, known: frozenset[str]) -> None:
    """Raise SourceRefused with all failed checks of `doctor` except those in `known`."""
    failed = [found for found in doctor.examine(source) if found.verdict is Verdict.FAIL and found.check not in known]
    if failed:
        problems = "; ".join(f"{found.object}: {found.message}" for found in failed)
        raise SourceRefused(f"The source is not ready: {problems}.", " ".join(found.remedy for found in failed))


def without_obstacles(
    connection: Connection, source: SourceSettings, log: LogWriter, stored: Publication
) -> SourceSettings:
    """The source without the captured tables that cannot be captured now: those wait."""
    return without(source, _obstacles(connection, source, log, stored))


def without(source: SourceSettings, tables: Collection[TableId]) -> SourceSettings:
    """The source without these tables."""
    return source.model_copy(update={"tables": tuple(table for table in source.tables if table.name not in tables)})


def _obstacles(
    connection: Connection,
    source: SourceSettings,
    log: LogWriter,
    stored: Publication,
    remade: Collection[TableId] = frozenset(),
) -> dict[TableId, WaitReason]:
    """Why tables that were captured before cannot be captured now; a new table is refused instead."""
    waiting = captured_tables.waiting_tables(log.progress().marks).keys()
    tables = {entry.table for entry in stored.tables} | waiting
    found = publication.read(connection, source.publication)
    anew = waiting | set(remade)
    return obstacles.find(connection, source, tables, anew=anew, schemas=log.schemas, published=found)


def publish(
    source: SourceSettings, stored: Publication, log: LogWriter, again: Collection[TableId] = frozenset()
) -> Publication:
    """Make the publication send the configured tables, and record in the log the publication, the tables that wait, and
    those that begin again: those of `again`, recreated ones, and those whose key was replaced.

    A table that waits is dropped from the publication, so that UPDATE and DELETE work in the source's application.
    Raises SourceRefused if anything but the list of tables differs from `stored`.
    """
    before, keys_before = captured_tables.waiting_tables(log.progress().marks), key_marks.recorded_or_in_schemas(log)
    with connect(source) as connection:
        connection.execute(f"set lock_timeout = '{_LOCK_SECONDS}s'".encode())
        remade = recreated(connection, _absent(connection, source, stored), log.schemas)
        found_now = _obstacles(connection, source, log, stored, remade)
        still = {name: reason for name, reason in before.items() if name not in again}
        waits = {table.name: still[table.name] for table in source.tables if table.name in still} | found_now
        active = without(source, waits)
        begun = {*remade, *again} - waits.keys()
        kept = {entry.table for entry in stored.tables} - begun - waits.keys()
        found = publication.update_tables(connection, active, stored.of(kept), waits.keys())
        found = found.of({table.name for table in active.tables})
        if found_now:  # the message depends on whether they are still published
            messages = _obstacles(connection, source, log, stored, remade)
            waits |= {name: messages.get(name, reason) for name, reason in found_now.items()}
        for table in active.tables:
            if table.name in begun:  # records its oid
                describe(connection, table, masking_of(source)).recorded(log.schemas)
        keys_now = key_marks.current(connection, source.tables)
    failpoint.reached("tables.published")
    begun |= _rekeyed(keys_now, keys_before) - waits.keys()
    for table_name in begun:
        _log.info("Table %s begins again: all its rows are read again.", table_name)
    sent = {entry.table for entry in found.tables} - begun
    left = jobs.left({entry.table for entry in stored.tables if entry.table not in sent} | begun)
    keys = key_marks.mark(keys_now, keys_before, source.tables)
    marks = {publication.MARK: found.mark(), key_marks.MARK: keys, **left, **_wait_marks(before, waits)}
    if left or any(log.progress().marks.get(name) != text for name, text in marks.items()):
        log.append(Entry(LOG_SCHEMA.empty_table(), log.progress().end, marks))
        failpoint.reached("tables.noted")
    return found


def _rekeyed(now: key_marks.Keys, before: key_marks.Keys) -> set[TableId]:
    """The tables whose key was replaced; each is logged."""
    found = key_marks.replaced(now, before)
    for table in found:
        old, new = (", ".join(known[str(table)]) for known in (before, now))
        _log.warning("The key of table %s is now %s and was %s: it begins again under its new key.", table, new, old)
    return set(found)


def _wait_marks(before: Mapping[TableId, WaitReason], now: Mapping[TableId, WaitReason]) -> dict[str, str]:
    """The marks of tables that wait no more, and of those with a new reason to wait; the latter are logged."""
    marks: dict[str, str] = {}
    for table in before.keys() - now.keys():
        marks |= captured_tables.wait_mark(table, None)
    for table, reason in now.items():
        if before.get(table) != reason:
            _log.warning("Table %s waits: %s", table, reason)
            marks |= captured_tables.wait_mark(table, reason)
    return marks


def _absent(connection: Connection, source: SourceSettings, stored: Publication) -> list[TableId]:
    found = publication.read(connection, source.publication)
    sent = {entry.table for entry in found.tables} if found is not None else set()
    wanted = {table.name for table in source.tables}
    return [entry.table for entry in stored.tables if entry.table in wanted - sent]


def recreated(connection: Connection, tables: Sequence[TableId], schemas: Schemas) -> list[TableId]:
    """Those of these tables whose oid differs from that in the log: dropped and created again."""
    known = {schema.table: schema.oid for schema in schemas.newest()}
    here = {facts.table: facts.oid for facts in catalog.tables(connection, tables)}
    return [table for table in tables if table in here and known.get(table, here[table]) != here[table]]


def tables_waiting(
    source: SourceSettings, marks: Mapping[str, str], every: Iterable[Job] | None = None
) -> dict[TableId, WaitReason]:
    """The configured tables that are not up to date, each with the reason: they wait, or begin again. `every` are the
    backfills; None: those in the log's marks."""
    names = {table.name for table in source.tables}
    found = jobs.beginning_again(
        jobs.known(marks).values() if every is None else every
    ) | captured_tables.waiting_tables(marks)
    return {table: reason for table, reason in found.items() if table in names}


@dataclass(slots=True)
class TableChanges:
    """Changes the tables of a running capture. `run` is a thread; `apply` may be called from any but the reading
    thread."""

    settings: Settings
    log: LogWriter
    loop: CaptureLoop
    monitor: SourceMonitor
    backfills: Backfills
    published: Publication
    stop: threading.Event
    outcome: dict[str, object] = field(default_factory=dict)
    """The result of the last change of tables, for the status."""
    leaving: frozenset[TableId] = frozenset()
    """Removed tables whose last changes may still be in the WAL."""
    _change_needed: threading.Event = field(default_factory=threading.Event)
    _ready: dict[TableId, Lsn] = field(default_factory=dict)
    """Tables that can be captured again, each with the LSN that the stream must pass first."""
    _oids: dict[TableId, int] = field(default_factory=dict)
    """The oids of the captured tables at the last check."""

    def run(self, news: SettingsChange) -> None:
        """Apply every change of the pipeline file, and automatic changes of tables, until `stop`."""
        earliest = 0.0
        while not self.stop.wait(_POLL_SECONDS):
            settings = news()
            if settings is None and not (self._change_needed.is_set() and time.monotonic() >= earliest):
                continue
            self._change_needed.clear()
            try:
                self.apply(settings or self.settings)
            except MillraceError as error:
                earliest = time.monotonic() + _RETRY_SECONDS
                _log.error("The captured tables were not changed: %s", error)
                self.outcome = {"ok": False, "message": error.message, "remedy": error.remedy}

    def partitions(self) -> dict[TableId, PartitionSettings]:
        """The captured tables and their partition policies."""
        source = self.settings.source
        return {table.name: table.partitions or source.partitions for table in source.tables}

    def apply(self, settings: Settings) -> None:
        """Capture these tables from now on, with their existing rows; returns when the stream continues with them.

        Raises SourceRefused or ConfigError, and changes nothing, if one of them cannot be captured or if more than the
        list of tables has changed.
        """
        source = settings.source
        refuse_other_changes(self.settings.source, source)
        masking = masking_of(source)
        before = {table.name for table in self.settings.source.tables}
        added = [table for table in source.tables if table.name not in before]
        if added:
            known = frozenset({"slot", "publication", "slots", "senders"})
            refuse_unready(source.model_copy(update={"tables": tuple(added)}), known)
        done, refused = threading.Event(), list[SourceError]()
        again = {table.name for table in source.tables} & self._ready_to_begin()

        def change() -> None:
            try:
                with self.monitor.suspended() as expect:
                    self.published = publish(source, self.published, self.log, again)
                    expect(self.published)
                self.leaving = self._still_leaving(source)
                self.loop.set_tables(source, masking, self.leaving)
                self.backfills.set_tables(settings, self.log)
                self.settings = settings
                self._ready = {table: lsn for table, lsn in self._ready.items() if table not in again}
            except SourceError as error:
                refused.append(error)
            finally:
                done.set()

        self.loop.run_between_connections(change)
        while not done.wait(_POLL_SECONDS):
            if self.stop.is_set():
                return
        if refused:
            raise refused[0]
        names = [str(table.name) for table in source.tables]
        _log.info("Capturing %d tables: %s", len(names), ", ".join(names))
        self.outcome = {"ok": True, "message": "", "tables": names}

    def _still_leaving(self, source: SourceSettings) -> frozenset[TableId]:
        """Removed tables with changes in the WAL. None for a publication of all tables, which sends theirs for ever."""
        if self.published.all_tables:
            return frozenset()
        before = {table.name for table in self.settings.source.tables}
        return (self.leaving | before) - {table.name for table in source.tables}

    def _ready_to_begin(self) -> set[TableId]:
        """The tables that may begin again: the stream has passed the position at which they became capturable."""
        passed = self.loop.status.watermark
        return {table for table, lsn in self._ready.items() if passed >= lsn}

    def waiting(self) -> dict[TableId, WaitReason]:
        """The configured tables that are not up to date, each with the reason."""
        return tables_waiting(self.settings.source, self.log.progress().marks, self.backfills.jobs())

    def check(self, connection: Connection) -> None:
        """Find tables that must wait, and tables that can be captured again; called by the source monitor."""
        names = {table.name for table in self.settings.source.tables}
        listed = {entry.table for entry in self.published.tables}
        self._note_recreated(connection, names)
        found = _obstacles(connection, self.settings.source, self.log, self.published)
        waiting = captured_tables.waiting_tables(self.log.progress().marks).keys() & names
        if free := waiting - found.keys():
            here = self._position(connection)
            self._ready = {table: self._ready.get(table, here) for table in free}
        else:
            self._ready = {}
        keys = key_marks.current(connection, self.settings.source.tables)
        rekeyed = key_marks.replaced(keys, key_marks.recorded(self.log))
        if found.keys() & listed or found.keys() - waiting or rekeyed or self._ready_to_begin():
            self._change_needed.set()

    def _note_recreated(self, connection: Connection, tables: Collection[TableId]) -> None:
        """Tables whose oid differs from that at the last check or in the log wait and begin again.

        A publication of all tables sends their changes under the same name.
        """
        oids = {fact.table: fact.oid for fact in catalog.tables(connection, tables, leaves=False)}
        known = {schema.table: schema.oid for schema in self.log.schemas.newest() if schema.oid} | self._oids
        waiting = captured_tables.waiting_tables(self.log.progress().marks)
        remade = {table for table, oid in oids.items() if known.get(table, oid) != oid and table not in waiting}
        remedy = "It is read again automatically."
        reasons = {table: WaitReason(f"Table {table} was dropped and recreated.", remedy) for table in remade}
        if reasons:
            with suppress(LogFull):  # detected again at the next check
                marks = _wait_marks(waiting, {**waiting, **reasons})
                self.log.append(Entry(LOG_SCHEMA.empty_table(), self.log.progress().end, marks))
                self._oids |= oids
        else:
            self._oids |= oids

    def _position(self, connection: Connection) -> Lsn:
        """The source's current LSN: everything seen in its catalog so far is below it."""
        facts = slot.find(connection, self.settings.source.slot)
        return ZERO_LSN if facts is None else facts.source_lsn

    def may_be_absent(self, connection: Connection, tables: Sequence[TableId]) -> bool:
        """Whether these tables may be missing from the publication: they wait, or were recreated."""
        obstacles_now = _obstacles(connection, self.settings.source, self.log, self.published)
        waiting = obstacles_now.keys() | captured_tables.waiting_tables(self.log.progress().marks).keys()
        return not set(tables) - waiting - set(recreated(connection, tables, self.log.schemas))


def refuse_other_changes(before: SourceSettings, after: SourceSettings) -> None:
    """Raise ConfigError if more has changed than the list of tables."""
    plain = {"tables": ()}
    changed = [
        name
        for name, value in before.model_copy(update=plain)
        if getattr(after.model_copy(update=plain), name) != value
    ]
    former = {table.name: table for table in before.tables}
    changed += [f"tables: {table.name}" for table in after.tables if former.get(table.name, table) != table]
    if changed:
        raise ConfigError(
            f"source.{changed[0]} cannot be changed while the pipeline runs.", "Stop it and start it again."
        )
