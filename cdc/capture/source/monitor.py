"""Checks publication and slot while the stream runs: capture stops if they were changed by hand.

Postgres silently applies a changed publication to the stream from the next change on: a filter added by hand would lose
changes unnoticed.
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
    """The result of the last check."""

    retained_bytes: int = 0
    wal_status: str = ""
    source_lsn: Lsn = ZERO_LSN
    safe_bytes: int | None = None
    at: datetime | None = None


MayBeAbsent = Callable[[Connection, Sequence[TableId]], bool]
"""Whether these tables may be missing from the publication."""


class SourceMonitor:
    """Checks the source every heartbeat, in a thread. `alarm` is called there with an error that must stop capture."""

    def __init__(self, source: SourceSettings, published: Publication, alarm: Callable[[SourceError], None]) -> None:
        self.may_be_absent: MayBeAbsent = lambda _connection, _tables: False
        """Decides about tables that are missing from the publication."""
        self.also_check: Callable[[Connection], None] = lambda _connection: None
        """Called after each successful check."""
        self._source = source
        self._published = published
        self._alarm = alarm
        self._stop = threading.Event()
        self._comparing = threading.Lock()
        self.state = SourceState()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @contextmanager
    def suspended(self) -> Iterator[Callable[[Publication], None]]:
        """Publication checks are suspended while the block changes it; the block passes the new one to the callable."""
        with self._comparing:
            yield self._expect

    def _expect(self, published: Publication) -> None:
        self._published = published

    def close(self) -> None:
        """Stop the thread. A check in progress is not waited for: it changes nothing, and the server may hang."""
        self._stop.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.check()
            except SourceLost:
                pass  # the capture loop handles it, and the next check may succeed
            except SourceError as error:
                self._alarm(error)
                return
            self._stop.wait(self._source.heartbeat_seconds)

    def check(self) -> None:
        """Check once. Raises SourceError if capture must stop."""
        with brief(self._source, "millrace watch") as connection:
            facts = slot.find(connection, self._source.slot)
            if facts is None:
                raise SlotLost(f"Slot {self._source.slot} was dropped.", slot.RESYNC)
            now = datetime.now(UTC)
            self.state = SourceState(facts.retained_bytes, facts.wal_status, facts.source_lsn, facts.safe_bytes, now)
            if facts.wal_status == "lost":
                raise SlotLost(f"Slot {facts.name} was invalidated.", slot.RESYNC)
            with self._comparing:
                self._compare(connection)
            self.also_check(connection)

    def _compare(self, connection: Connection) -> None:
        found = publication.read(connection, self._source.publication)
        stored = self._published
        if found is not None:
            found = found.of({entry.table for entry in stored.tables})
        sent = {entry.table for entry in found.tables} if found is not None else set()
        gone = [entry.table for entry in stored.tables if entry.table not in sent]
        if found is not None and gone and self.may_be_absent(connection, gone):
            stored = replace(stored, tables=tuple(entry for entry in stored.tables if entry.table in sent))
        compare(found, stored)


def compare(found: Publication | None, stored: Publication) -> None:
    """Raise SourceRefused unless the publication sends the captured tables as it did at the start of the stream."""
    if found is None:
        raise SourceRefused(
            f"Publication {stored.name} was dropped. Changes made since then are lost, even if it is created again.",
            slot.RESYNC,
        )
    if found.mark() == stored.mark():
        return
    if changes := publication.altered(stored, found, [entry.table for entry in stored.tables]):
        raise SourceRefused(f"Publication {stored.name} was changed: {'; '.join(changes)}.", publication.RESYNC)
