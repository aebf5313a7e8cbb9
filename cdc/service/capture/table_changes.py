"""Tables that come, go and are made again while the stream runs: nothing is restarted.

The publication is changed, the log is told, and the reader takes its new tables over, all between two connections of
the stream, when nothing is on its way. A crash in the middle is mended by the next start, which does the same.
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
from cdc.service.daemon.process import News
from snapshots.backfill import jobs
from snapshots.backfill.coordinator import Backfills
from snapshots.backfill.jobs import Job
from snapshots.tables.rows import describe, masking_of

_LOCK_SECONDS = 10
"""An ALTER PUBLICATION waits behind a vacuum of the table; the stream waits with it, so not for long."""
_LOOK_SECONDS = 0.5
_RETRY_SECONDS = 30.0
"""After a change that nobody asked for has failed, perhaps behind a lock: every try interrupts the stream."""
_log = logging.getLogger(__name__)


def refuse_unready(source: SourceSettings, known: frozenset[str]) -> None:
    """Raise SourceRefused with everything that doctor finds wrong, but for the checks that are known to be well."""
    failed = [found for found in doctor.examine(source) if found.verdict is Verdict.FAIL and found.check not in known]
    if failed:
        said = "; ".join(f"{found.object}: {found.message}" for found in failed)
        raise SourceRefused(f"The source is not ready: {said}.", " ".join(found.remedy for found in failed))


def unobstructed(connection: Connection, source: SourceSettings, log: LogWriter, stored: Publication) -> SourceSettings:
    """The source without the captured tables that something is in the way of: those wait, the others flow."""
    return without(source, _obstacles(connection, source, log, stored))


def without(source: SourceSettings, tables: Collection[TableId]) -> SourceSettings:
    """The source with these tables left out."""
    return source.model_copy(update={"tables": tuple(table for table in source.tables if table.name not in tables)})


def _obstacles(
    connection: Connection,
    source: SourceSettings,
    log: LogWriter,
    stored: Publication,
    remade: Collection[TableId] = frozenset(),
) -> dict[TableId, WaitReason]:
    """What is in the way of tables that the log has captured before; a new one is refused instead."""
    waiting = captured_tables.waiting(log.progress().marks).keys()
    tables = {entry.table for entry in stored.tables} | waiting
    found = publication.read(connection, source.publication)
    anew = waiting | set(remade)
    return obstacles.find(connection, source, tables, anew=anew, schemas=log.schemas, published=found)


def publish(
    source: SourceSettings, stored: Publication, log: LogWriter, again: Collection[TableId] = frozenset()
) -> Publication:
    """Make the publication send the configured tables, and note in the log what it is, which tables wait, and which
    begin again: those of `again`, those that were made again, and those whose key was replaced.

    A table that waits is taken out, so that the source's application goes on with it, whatever it lacks.
    Raises SourceRefused where anything but the list of tables differs from `stored`.
    """
    before, keys_before = captured_tables.waiting(log.progress().marks), key_marks.noted(log)
    with connect(source) as connection:
        connection.execute(f"set lock_timeout = '{_LOCK_SECONDS}s'".encode())
        remade = made_again(connection, _absent(connection, source, stored), log.schemas)
        found_now = _obstacles(connection, source, log, stored, remade)
        still = {name: reason for name, reason in before.items() if name not in again}
        waits = {table.name: still[table.name] for table in source.tables if table.name in still} | found_now
        active = without(source, waits)
        begun = {*remade, *again} - waits.keys()
        kept = {entry.table for entry in stored.tables} - begun - waits.keys()
        found = publication.follow(connection, active, stored.of(kept), waits.keys())
        found = found.of({table.name for table in active.tables})
        if found_now:  # what is said depends on whether they are still published
            said = _obstacles(connection, source, log, stored, remade)
            waits |= {name: said.get(name, reason) for name, reason in found_now.items()}
        for table in active.tables:
            if table.name in begun:  # known by its oid from here on
                describe(connection, table, masking_of(source)).recorded(log.schemas)
        keys_now = key_marks.current(connection, source.tables)
    failpoint.reached("tables.published")
    begun |= _rekeyed(keys_now, keys_before) - waits.keys()
    for table_name in begun:
        _log.info("Table %s begins again: it is read anew.", table_name)
    sent = {entry.table for entry in found.tables} - begun
    left = jobs.left({entry.table for entry in stored.tables if entry.table not in sent} | begun)
    over = {
        name: text
        for table in before.keys() - waits.keys()
        for name, text in captured_tables.marked(table, None).items()
    }
    keys = key_marks.mark(keys_now, keys_before, source.tables)
    marks = {publication.MARK: found.mark(), key_marks.MARK: keys, **left, **over, **_told(before, waits)}
    if left or any(log.progress().marks.get(name) != text for name, text in marks.items()):
        log.append(Entry(LOG_SCHEMA.empty_table(), log.progress().end, marks))
        failpoint.reached("tables.noted")
    return found


def _rekeyed(now: key_marks.Keys, before: key_marks.Keys) -> set[TableId]:
    """The tables whose key was replaced; said in the log lines."""
    found = key_marks.replaced(now, before)
    for table in found:
        old, new = (", ".join(known[str(table)]) for known in (before, now))
        _log.warning("Table %s is keyed by %s and was by %s: it begins again under its new key.", table, new, old)
    return set(found)


def _told(before: Mapping[TableId, WaitReason], now: Mapping[TableId, WaitReason]) -> dict[str, str]:
    """The marks of tables that wait for a reason which the log does not know; said in the log lines too."""
    marks: dict[str, str] = {}
    for table, reason in now.items():
        if before.get(table) != reason:
            _log.warning("Table %s waits: %s", table, reason)
            marks |= captured_tables.marked(table, reason)
    return marks


def _absent(connection: Connection, source: SourceSettings, stored: Publication) -> list[TableId]:
    found = publication.read(connection, source.publication)
    sent = {entry.table for entry in found.tables} if found is not None else set()
    wanted = {table.name for table in source.tables}
    return [entry.table for entry in stored.tables if entry.table in wanted - sent]


def made_again(connection: Connection, tables: Sequence[TableId], schemas: Schemas) -> list[TableId]:
    """Those of these tables that are others than the log knows by their name: dropped, and made again."""
    known = {schema.table: schema.oid for schema in schemas.newest()}
    here = {facts.table: facts.oid for facts in catalog.tables(connection, tables)}
    return [table for table in tables if table in here and known.get(table, here[table]) != here[table]]


def waiting_of(
    source: SourceSettings, marks: Mapping[str, str], every: Iterable[Job] | None = None
) -> dict[TableId, WaitReason]:
    """The captured tables that are not followed, each with the reason: they wait, or begin again. `every` are the
    backfills, if not as the log knows them."""
    names = {table.name for table in source.tables}
    found = jobs.beginning_again(jobs.known(marks).values() if every is None else every) | captured_tables.waiting(
        marks
    )
    return {table: reason for table, reason in found.items() if table in names}


@dataclass(slots=True)
class TableChanges:
    """The tables of a running capture. `follow` from any thread but the reader's; `run` is a thread of its own."""

    settings: Settings
    log: LogWriter
    reader: CaptureLoop
    side: SourceMonitor
    backfills: Backfills
    published: Publication
    stop: threading.Event
    outcome: dict[str, object] = field(default_factory=dict)
    """How the last change of tables went, for the status."""
    leaving: frozenset[TableId] = frozenset()
    """Tables besides the configured ones whose last changes may still be under way."""
    _again: threading.Event = field(default_factory=threading.Event)
    _ready: dict[TableId, Lsn] = field(default_factory=dict)
    """Tables that wait although nothing is in their way any more, each with the LSN that the stream has to pass."""
    _oids: dict[TableId, int] = field(default_factory=dict)
    """The captured tables as the last look saw them."""

    def run(self, news: News) -> None:
        """Take over what the pipeline file says whenever it is news, and tables that were made again, until `stop`."""
        earliest = 0.0
        while not self.stop.wait(_LOOK_SECONDS):
            settings = news()
            if settings is None and not (self._again.is_set() and time.monotonic() >= earliest):
                continue
            self._again.clear()
            try:
                self.follow(settings or self.settings)
            except MillraceError as error:
                earliest = time.monotonic() + _RETRY_SECONDS
                _log.error("The tables stay as they were: %s", error)
                self.outcome = {"ok": False, "message": error.message, "remedy": error.remedy}

    def partitions(self) -> dict[TableId, PartitionSettings]:
        """The captured tables, and what happens to rows that come or go with their partitions."""
        source = self.settings.source
        return {table.name: table.partitions or source.partitions for table in source.tables}

    def follow(self, settings: Settings) -> None:
        """Capture these tables from now on, each with the rows it has already; returns as the stream goes on with them.

        Raises SourceRefused or ConfigError, and changes nothing, where one of them cannot be captured or where more
        than the list of tables has changed.
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
        again = {table.name for table in source.tables} & self._beginning()

        def change() -> None:
            try:
                with self.side.averted() as expect:
                    self.published = publish(source, self.published, self.log, again)
                    expect(self.published)
                self.leaving = self._still_leaving(source)
                self.reader.follow(source, masking, self.leaving)
                self.backfills.follow(settings, self.log)
                self.settings = settings
                self._ready = {table: lsn for table, lsn in self._ready.items() if table not in again}
            except SourceError as error:
                refused.append(error)
            finally:
                done.set()

        self.reader.between(change)
        while not done.wait(_LOOK_SECONDS):
            if self.stop.is_set():
                return
        if refused:
            raise refused[0]
        names = [str(table.name) for table in source.tables]
        _log.info("Capturing %d tables: %s", len(names), ", ".join(names))
        self.outcome = {"ok": True, "message": "", "tables": names}

    def _still_leaving(self, source: SourceSettings) -> frozenset[TableId]:
        """A publication of all tables goes on sending what the pipeline gave up: nothing of that is wanted."""
        if self.published.all_tables:
            return frozenset()
        before = {table.name for table in self.settings.source.tables}
        return (self.leaving | before) - {table.name for table in source.tables}

    def _beginning(self) -> set[TableId]:
        """The tables that may begin again: the stream has passed all that was in their way."""
        passed = self.reader.status.watermark
        return {table for table, lsn in self._ready.items() if passed >= lsn}

    def waiting(self) -> dict[TableId, WaitReason]:
        """The captured tables that are not followed for now, each with the reason."""
        return waiting_of(self.settings.source, self.log.progress().marks, self.backfills.jobs())

    def look(self, connection: Connection) -> None:
        """Find, each time that the source is looked at, tables that have to wait, and those that wait no longer."""
        names = {table.name for table in self.settings.source.tables}
        listed = {entry.table for entry in self.published.tables}
        self._note_made_again(connection, names)
        found = _obstacles(connection, self.settings.source, self.log, self.published)
        waiting = captured_tables.waiting(self.log.progress().marks).keys() & names
        if free := waiting - found.keys():
            here = self._position(connection)
            self._ready = {table: self._ready.get(table, here) for table in free}
        else:
            self._ready = {}
        keys = key_marks.current(connection, self.settings.source.tables)
        rekeyed = key_marks.replaced(keys, key_marks.marked(self.log))
        if found.keys() & listed or found.keys() - waiting or rekeyed or self._beginning():
            self._again.set()

    def _note_made_again(self, connection: Connection, tables: Collection[TableId]) -> None:
        """Tables that are others than at the last look, or than the log knows them, wait and begin again.

        A publication of all tables sends them under their name as if nothing had happened.
        """
        oids = {fact.table: fact.oid for fact in catalog.tables(connection, tables, leaves=False)}
        known = {schema.table: schema.oid for schema in self.log.schemas.newest() if schema.oid} | self._oids
        waiting = captured_tables.waiting(self.log.progress().marks)
        made = {table for table, oid in oids.items() if known.get(table, oid) != oid and table not in waiting}
        reason = "It is read again by itself."
        notes = {table: WaitReason(f"Table {table} was dropped and made again.", reason) for table in made}
        if notes:
            with suppress(LogFull):  # noticed again at the next look
                self.log.append(Entry(LOG_SCHEMA.empty_table(), self.log.progress().end, _told(waiting, notes)))
                self._oids |= oids
        else:
            self._oids |= oids

    def _position(self, connection: Connection) -> Lsn:
        """Where the source is now: what was seen of its catalog is below."""
        facts = slot.find(connection, self.settings.source.slot)
        return ZERO_LSN if facts is None else facts.source_lsn

    def absent(self, connection: Connection, tables: Sequence[TableId]) -> bool:
        """Whether it is in order that the publication has lost these tables: they wait, or were made again."""
        obstructed = _obstacles(connection, self.settings.source, self.log, self.published)
        excused = obstructed.keys() | captured_tables.waiting(self.log.progress().marks).keys()
        return not set(tables) - excused - set(made_again(connection, tables, self.log.schemas))


def refuse_other_changes(before: SourceSettings, after: SourceSettings) -> None:
    """Raise ConfigError where more has changed than which tables are captured."""
    plain = {"tables": ()}
    changed = [
        name
        for name, value in before.model_copy(update=plain)
        if getattr(after.model_copy(update=plain), name) != value
    ]
    kept = {table.name: table for table in before.tables}
    changed += [f"tables: {table.name}" for table in after.tables if kept.get(table.name, table) != table]
    if changed:
        raise ConfigError(
            f"source.{changed[0]} cannot be changed while the pipeline runs.", "Stop it and start it again."
        )
