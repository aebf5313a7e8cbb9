"""Logs around a log: one that checks before it accepts rows, and one that waits while there is no space."""

import logging
import threading
from collections.abc import Callable

import pyarrow as pa

from cdc.errors import LogFull
from cdc.model import Entry, Lsn, Progress
from cdc.ports import LogWriter, Schemas, Spool

_RETRY_SECONDS = 1.0
_log = logging.getLogger(__name__)


class GuardedLog:
    """A log that calls `check` before it accepts rows, and records schemas in `schemas`.

    `check` raises LogFull. An entry without rows is always accepted: its marks let the replication slot advance.
    """

    def __init__(self, log: LogWriter, schemas: Schemas, check: Callable[[], None] = lambda: None) -> None:
        self._log = log
        self._schemas = schemas
        self._check = check

    def progress(self) -> Progress:
        """What is durable."""
        return self._log.progress()

    def append(self, entry: Entry) -> None:
        """Durable on return. Raises LogFull."""
        if entry.rows.num_rows:
            self._check()
        self._log.append(entry)

    def spool(self) -> Spool:
        """Begin a large transaction; each write is checked."""
        return _GuardedSpool(self._log.spool(), self._check)

    @property
    def schemas(self) -> Schemas:
        """The registry that was given."""
        return self._schemas

    @property
    def append_interval(self) -> float:
        """The log's own."""
        return self._log.append_interval

    def maintain(self) -> None:
        """Merge and retain, as the log does."""
        self._log.maintain()

    def close(self) -> None:
        """Release the log's locks."""
        self._log.close()


class _GuardedSpool:
    def __init__(self, spool: Spool, check: Callable[[], None]) -> None:
        self._spool = spool
        self._check = check

    def write(self, rows: pa.Table) -> None:
        """Write rows to disk. Raises LogFull."""
        self._check()
        self._spool.write(rows)

    def publish(self, end: Lsn) -> None:
        """Make the whole transaction visible."""
        self._spool.publish(end)

    def discard(self) -> None:
        """Remove what was written."""
        self._spool.discard()


class WaitingLog(GuardedLog):
    """A log whose appends wait until there is space. `report` receives the reason, and an empty text at the end."""

    def __init__(self, log: LogWriter, stop: threading.Event, report: Callable[[str], None]) -> None:
        super().__init__(log, log.schemas)
        self._stop = stop
        self._report = report

    def append(self, entry: Entry) -> None:
        """Durable on return. Raises LogFull only when `stop` is set."""
        waited = False
        while True:
            try:
                super().append(entry)
            except LogFull as error:
                if not waited:
                    _log.warning("%s Appending waits for space.", error)
                waited = True
                self._report(str(error))
                if self._stop.wait(_RETRY_SECONDS):
                    raise
            else:
                if waited:
                    _log.info("There is room again in the log.")
                    self._report("")
                return
