"""A look at publication and slot from the side while the stream runs: changes by hand are noticed, not survived.

Postgres applies a changed publication to the stream from the next change on, without a word: a filter that somebody
added would lose changes in silence.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from cdc.capture.source import publication, slot
from cdc.capture.source.connect import Connection, brief
from cdc.capture.source.publication import Publication
from cdc.config.settings import SourceSettings
from cdc.errors import SlotLost, SourceError, SourceLost, SourceRefused
from cdc.model import ZERO_LSN, Lsn, TableId


@dataclass(frozen=True, slots=True)
class SourceState:
    """What the last look found."""

    retained_bytes: int = 0
    wal_status: str = ""
    source_lsn: Lsn = ZERO_LSN
    safe_bytes: int | None = None
    at: datetime | None = None


Absent = Callable[[Connection, Sequence[TableId]], bool]
"""Whether it is in order that these tables are not in the publication any more."""


class SourceMonitor:
    """Looks every heartbeat. `alarm` is called, in the watching thread, with what makes going on wrong."""

    def __init__(self, source: SourceSettings, published: Publication, alarm: Callable[[SourceError], None]) -> None:
        self.absent: Absent = lambda _connection, _tables: False
        """Who may know why tables are gone from the publication."""
        self.also: Callable[[Connection], None] = lambda _connection: None
        """What else is to be looked at each time."""
        self._source = source
        self._published = published
        self._alarm = alarm
        self._stop = threading.Event()
        self._looking = threading.Lock()
        self.seen = SourceState()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin looking."""
        self._thread.start()

    @contextmanager
    def averted(self) -> Iterator[Callable[[Publication], None]]:
        """Change the publication unseen; the block tells what it is afterwards, where it has changed."""
        with self._looking:
            yield self._expect

    def _expect(self, published: Publication) -> None:
        self._published = published

    def close(self) -> None:
        """Stop looking. A look under way is left to itself: it changes nothing, and its server may be silent."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except SourceLost:
                pass  # the reader notices by itself, and the next look may succeed
            except SourceError as error:
                self._alarm(error)
                return
            self._stop.wait(self._source.heartbeat_seconds)

    def look(self) -> None:
        """Look once; raises what is wrong."""
        with brief(self._source, "millrace watch") as connection:
            facts = slot.find(connection, self._source.slot)
            if facts is None:
                raise SlotLost(f"Slot {self._source.slot} was dropped.", slot.RESYNC)
            now = datetime.now(UTC)
            self.seen = SourceState(facts.retained_bytes, facts.wal_status, facts.source_lsn, facts.safe_bytes, now)
            if facts.wal_status == "lost":
                raise SlotLost(f"Slot {facts.name} was invalidated.", slot.RESYNC)
            with self._looking:
                self._compare(connection)
            self.also(connection)

    def _compare(self, connection: Connection) -> None:
        found = publication.read(connection, self._source.publication)
        stored = self._published
        if found is not None:
            found = found.of({entry.table for entry in stored.tables})
        sent = {entry.table for entry in found.tables} if found is not None else set()
        gone = [entry.table for entry in stored.tables if entry.table not in sent]
        if found is not None and gone and self.absent(connection, gone):
            stored = replace(stored, tables=tuple(entry for entry in stored.tables if entry.table in sent))
        compare(found, stored)


def compare(found: Publication | None, stored: Publication) -> None:
    """Raise SourceRefused unless the publication sends the captured tables as it did when the stream was started."""
    if found is None:
        raise SourceRefused(
            f"Publication {stored.name} was dropped. Changes made since cannot be read any more, even if it is made "
            "again.",
            slot.RESYNC,
        )
    if found.mark() == stored.mark():
        return
    if said := publication.altered(stored, found, [entry.table for entry in stored.tables]):
        raise SourceRefused(f"Publication {stored.name} was changed: {'; '.join(said)}.", publication.RESYNC)
