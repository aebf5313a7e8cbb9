"""Runs the maintenance of Delta tables: at intervals, one table at a time, in a thread of its own."""

import logging
import threading
import time
from collections.abc import Callable

from cdc.errors import MillraceError
from cdc.model import TableId, TableSchema
from sinks.delta.maintenance import MaintenanceResult

_log = logging.getLogger(__name__)


class MaintenanceSchedule:
    """Runs a round for a table that is written, at most once in `every` seconds; never while another round runs.

    The first round follows after a quarter of that time, so that a process that is often restarted still has one.
    """

    def __init__(
        self,
        every: float,
        maintain: Callable[[TableSchema], MaintenanceResult],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._maintain = maintain
        self._clock = clock
        self._due: dict[TableId, float] = {}
        self._round: threading.Thread | None = None
        self._lock = threading.Lock()

    def written(self, schema: TableSchema) -> None:
        """Report that a table was written; starts a round if one is due. Returns at once."""
        now = self._clock()
        with self._lock:
            due = self._due.setdefault(schema.table, now + self._every / 4)
            if not self._every or now < due or (self._round is not None and self._round.is_alive()):
                return
            self._due[schema.table] = now + self._every
            self._round = threading.Thread(target=self._run, args=(schema,), name="delta-maintenance", daemon=True)
            self._round.start()

    def finish(self, deadline: float) -> None:
        """Wait for the current round; an interrupted one leaves files that the next one removes."""
        if self._round is not None:
            self._round.join(deadline)

    def _run(self, schema: TableSchema) -> None:
        try:
            done = self._maintain(schema)
        except MillraceError as error:
            _log.warning("maintenance of %s failed and is tried again later: %s", schema.table, error)
        else:
            _log.info(
                "maintained %s: %d tombstones removed, %d key ranges rewritten, %d files removed, %d steps yielded",
                schema.table, done.purged, done.rewritten, done.removed, done.yielded,
            )  # fmt: skip
