"""Tables that come, go and are made again while the stream runs: nothing is restarted.

The publication is changed, the log is told, and the reader takes its new tables over, all between two connections of
the stream, when nothing is on its way. A crash in the middle is mended by the next start, which does the same.
"""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from cdc import failpoint
from cdc.capture import catalog, doctor, key_marks, publication
from cdc.capture.connect import Connection, connect
from cdc.capture.doctor import Verdict
from cdc.capture.publication import Publication
from cdc.capture.reader import Reader
from cdc.capture.watch import Watch
from cdc.config import Settings, SourceSettings
from cdc.errors import ConfigError, MillraceError, SourceError, SourceRefused
from cdc.model import LOG_SCHEMA, Entry, TableId
from cdc.ports import LogWriter, Schemas
from cdc.service.part import News
from snapshots import jobs
from snapshots.chunked import Backfills
from snapshots.rows import masking_of

_LOCK_SECONDS = 10
"""An ALTER PUBLICATION waits behind a vacuum of the table; the stream waits with it, so not for long."""
_LOOK_SECONDS = 0.5
_log = logging.getLogger(__name__)


def refuse_unready(source: SourceSettings, known: frozenset[str]) -> None:
    """Raise SourceRefused with everything that doctor finds wrong, but for the checks that are known to be well."""
    failed = [found for found in doctor.examine(source) if found.verdict is Verdict.FAIL and found.check not in known]
    if failed:
        said = "; ".join(f"{found.object}: {found.message}" for found in failed)
        raise SourceRefused(f"The source is not ready: {said}.", " ".join(found.remedy for found in failed))


def publish(source: SourceSettings, stored: Publication, log: LogWriter) -> Publication:
    """Make the publication send the configured tables, and note in the log what it is, and which tables begin again:
    those that were made again, and those whose key was replaced.

    Raises SourceRefused where anything but the list of tables differs from `stored`.
    """
    before = key_marks.noted(log)
    with connect(source) as connection:
        connection.execute(f"set lock_timeout = '{_LOCK_SECONDS}s'".encode())
        remade = made_again(connection, _absent(connection, source, stored), log.schemas)
        kept = tuple(entry for entry in stored.tables if entry.table not in remade)
        found = publication.follow(connection, source, replace(stored, tables=kept))
        now = key_marks.current(connection, source.tables)
    failpoint.reached("tables.published")
    rekeyed = key_marks.replaced(now, before)
    for table in rekeyed:
        old, new = (", ".join(known[str(table)]) for known in (before, now))
        _log.warning("Table %s is keyed by %s and was by %s: it begins again under its new key.", table, new, old)
    sent = {entry.table for entry in found.tables} - {*remade, *rekeyed}
    left = jobs.left(entry.table for entry in stored.tables if entry.table not in sent)
    marks = {publication.MARK: found.mark(), key_marks.MARK: key_marks.mark(now, before, source.tables), **left}
    if left or any(log.progress().marks.get(name) != text for name, text in marks.items()):
        log.append(Entry(LOG_SCHEMA.empty_table(), log.progress().end, marks))
        failpoint.reached("tables.noted")
    return found


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


@dataclass(slots=True)
class Following:
    """The tables of a running capture. `follow` from any thread but the reader's; `run` is a thread of its own."""

    settings: Settings
    log: LogWriter
    reader: Reader
    side: Watch
    backfills: Backfills
    published: Publication
    stop: threading.Event
    outcome: dict[str, object] = field(default_factory=dict)
    """How the last change of tables went, for the status."""
    _again: threading.Event = field(default_factory=threading.Event)
    _dropped: frozenset[TableId] = frozenset()

    def run(self, news: News) -> None:
        """Take over what the pipeline file says whenever it is news, and tables that were made again, until `stop`."""
        while not self.stop.wait(_LOOK_SECONDS):
            settings = news()
            if settings is None and not self._again.is_set():
                continue
            self._again.clear()
            try:
                self.follow(settings or self.settings)
            except MillraceError as error:
                _log.error("The tables stay as they were: %s", error)
                self.outcome = {"ok": False, "message": error.message, "remedy": error.remedy}

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

        def change() -> None:
            try:
                with self.side.averted() as expect:
                    self.published = publish(source, self.published, self.log)
                    expect(self.published)
                self.reader.follow(source, masking)
                self.backfills.follow(settings, self.log.progress().marks)
                self.settings = settings
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

    def look(self, connection: Connection) -> None:
        """Have tables whose key was replaced begin again."""
        now = key_marks.current(connection, self.settings.source.tables)
        if key_marks.replaced(now, key_marks.marked(self.log)):
            self._again.set()

    def absent(self, connection: Connection, tables: Sequence[TableId]) -> bool:
        """Whether it is in order that the publication has lost these tables: they were dropped.

        Those that were made again meanwhile are followed anew, and so will be the others when they are.
        """
        here = {facts.table for facts in catalog.tables(connection, tables)}
        remade = made_again(connection, tables, self.log.schemas)
        if here - set(remade):
            return False
        gone = frozenset(tables) - here
        for table in gone - self._dropped:
            _log.warning("Table %s was dropped; its rows stay in the stores until it is made again.", table)
        self._dropped = gone
        if remade:
            self._again.set()
        return True


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
