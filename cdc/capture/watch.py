"""A look at publication and slot from the side while the stream runs: changes by hand are noticed, not survived.

Postgres applies a changed publication to the stream from the next change on, without a word: a filter that somebody
added would lose changes in silence.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from cdc.capture import publication, slot
from cdc.capture.connect import connect
from cdc.config import SourceSettings
from cdc.errors import SlotLost, SourceError, SourceLost, SourceRefused

_RESYNC = "Undo the change, or take a new snapshot with: millrace resync"


@dataclass(frozen=True, slots=True)
class Seen:
    """What the last look found."""

    retained_bytes: int = 0
    wal_status: str = ""


class Watch:
    """Looks every heartbeat. `alarm` is called, in the watching thread, with what makes going on wrong."""

    def __init__(self, source: SourceSettings, fingerprint: str, alarm: Callable[[SourceError], None]) -> None:
        self._source = source
        self._fingerprint = fingerprint
        self._alarm = alarm
        self._stop = threading.Event()
        self.seen = Seen()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Begin looking."""
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._stop.set()
        self._thread.join()

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
        with connect(self._source, "millrace watch") as connection:
            facts = slot.find(connection, self._source.slot)
            if facts is None:
                raise SlotLost(f"Slot {self._source.slot} was dropped.", slot.RESYNC)
            self.seen = Seen(facts.retained_bytes, facts.wal_status)
            if facts.wal_status == "lost":
                raise SlotLost(f"Slot {facts.name} was invalidated.", slot.RESYNC)
            compare(publication.read(connection, self._source.publication), self._source, self._fingerprint)


def compare(found: publication.Publication | None, source: SourceSettings, fingerprint: str) -> None:
    """Raise SourceRefused unless the publication is the one that the log was filled through."""
    if found is None:
        raise SourceRefused(
            f"Publication {source.publication} was dropped. Changes made since cannot be read any more, even if it "
            "is made again.",
            slot.RESYNC,
        )
    if found.fingerprint() != fingerprint:
        said = publication.differences(found, source) or ["a row filter or its list of columns changed"]
        raise SourceRefused(f"Publication {source.publication} was changed: {'; '.join(said)}.", _RESYNC)
