"""The capture process: publication, slot, first snapshot, then the stream, all into the log. No JVM.

The order matters: publication before slot (a slot never sees one that is younger), the slot's identity into the log
before the first row, the snapshot before the stream.
"""

import logging
import sys
import threading
from collections.abc import Callable
from contextlib import closing

import cdc.log
from cdc.capture import doctor, publication, slot, watch
from cdc.capture.connect import connect
from cdc.capture.doctor import Verdict
from cdc.capture.publication import Publication
from cdc.capture.reader import Reader
from cdc.clock import SystemClock
from cdc.config import Settings
from cdc.errors import SourceRefused
from cdc.model import LOG_SCHEMA, Entry
from cdc.ports import LogWriter
from cdc.service import part
from cdc.service.capture_status import CaptureStatus
from cdc.service.upkeep import Upkeep
from snapshots.chunked import Backfills
from snapshots.initial import run_initial
from snapshots.rows import masking_of

INTENT_MARK = "source.intent"
"""Written before the slot is made: a slot of that name without the mark `source` is then known to be ours."""
_SLOT_SECONDS = 120.0

_log = logging.getLogger(__name__)


def run(settings: Settings, stop: threading.Event) -> None:
    """Capture until `stop` is set. Raises what a restart cannot cure, and what a fresh start may."""
    with closing(cdc.log.open_writer(settings)) as log, CaptureStatus(settings.state) as status:
        preflight(settings, known=slot.MARK in log.progress().marks)
        published = _published(settings, log)
        if slot.MARK not in log.progress().marks:
            begin(settings, log, published, status, stop)
        if not stop.is_set():
            _follow(settings, log, published, status, stop)


def preflight(settings: Settings, known: bool) -> None:
    """Raise SourceRefused with everything that doctor finds wrong. A known slot is judged by its position instead."""
    with connect(settings.source):
        pass  # an unreachable source is tried again, not refused
    failed = [found for found in doctor.examine(settings.source) if found.verdict is Verdict.FAIL]
    failed = [found for found in failed if not (known and found.check in {"slot", "publication"})]
    if failed:
        said = "; ".join(f"{found.object}: {found.message}" for found in failed)
        raise SourceRefused(f"The source is not ready: {said}.", " ".join(found.remedy for found in failed))


def _published(settings: Settings, log: LogWriter) -> Publication:
    """The publication: made at the first start, followed at later ones, and what it is now noted in the log."""
    stored = log.progress().marks.get(publication.MARK)
    with connect(settings.source) as connection:
        if stored is None:
            return publication.ensure(connection, settings.source)
        found = publication.follow(connection, settings.source, Publication.of_mark(stored))
    if found.mark() != stored:
        log.append(Entry(LOG_SCHEMA.empty_table(), log.progress().end, {publication.MARK: found.mark()}))
    return found


def begin(
    settings: Settings, log: LogWriter, published: Publication, status: CaptureStatus, stop: threading.Event
) -> None:
    """Make the slot, note it in the log, and read the first snapshot."""
    _claim(settings, log)
    status.say("creating slot")
    with slot.create(settings.source, _SLOT_SECONDS, _waiting(status)) as made:
        identity = slot.SourceIdentity.of_created(made)
        marks = {slot.MARK: identity.mark(), publication.MARK: published.mark()}
        log.append(Entry(LOG_SCHEMA.empty_table(), made.consistent_point, marks))
        status.say("snapshot")
        run_initial(settings, made, log, status.snapshot, stop)


def _claim(settings: Settings, log: LogWriter) -> None:
    """Make sure that the slot about to be made is ours: drop one that we left, refuse one that somebody else has."""
    name = settings.source.slot
    with connect(settings.source) as connection:
        found = slot.find(connection, name)
        if found is not None:
            if log.progress().marks.get(INTENT_MARK) != name:
                raise SourceRefused(
                    f"Slot {name} exists, but this log knows nothing of it.",
                    f"Configure another source.slot, or drop it: select pg_drop_replication_slot('{name}')",
                )
            slot.drop(connection, name)
    log.append(Entry(LOG_SCHEMA.empty_table(), log.progress().end, {INTENT_MARK: name}))


def _waiting(status: CaptureStatus) -> Callable[[str], None]:
    def say(what: str) -> None:
        _log.info("%s", what)
        status.say("creating slot", what)

    return say


def _follow(
    settings: Settings, log: LogWriter, published: Publication, status: CaptureStatus, stop: threading.Event
) -> None:
    """The stream, and beside it: backfills, a look at slot and publication, and the log's upkeep."""
    clock = SystemClock()
    backfills = Backfills(settings, log, clock)
    masking, scratch = masking_of(settings.source), settings.state / "scratch"
    reader = Reader(settings.source, log, clock, scratch, masking=masking, listener=backfills)
    side = watch.Watch(settings.source, published, reader.fail)
    status.follow(reader, side, backfills)
    with Upkeep(log), closing(side), closing(backfills):
        side.start()
        backfills.start()
        reader.run(stop)


if __name__ == "__main__":
    sys.exit(part.main("capture", run))
