"""When tables are cared for: now and then, one at a time, in a thread beside the stream."""

import logging
import threading
import time
from collections.abc import Callable

from cdc.errors import MillraceError
from cdc.model import TableId, TableSchema
from sinks.delta.maintenance import MaintenanceResult

_log = logging.getLogger(__name__)


class MaintenanceSchedule:
    """Runs a round for a table that is written, at most once in so many seconds; never while another round runs.

    The first round comes after a quarter of that time, so that a process that is often restarted still gets there.
    """

    def __init__(
        self,
        every: float,
        care: Callable[[TableSchema], MaintenanceResult],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._every = every
        self._care = care
        self._clock = clock
        self._due: dict[TableId, float] = {}
        self._round: threading.Thread | None = None
        self._lock = threading.Lock()

    def written(self, schema: TableSchema) -> None:
        """Say that a table was written; starts a round if one is due. Returns at once."""
        now = self._clock()
        with self._lock:
            due = self._due.setdefault(schema.table, now + self._every / 4)
            if not self._every or now < due or (self._round is not None and self._round.is_alive()):
                return
            self._due[schema.table] = now + self._every
            self._round = threading.Thread(target=self._run, args=(schema,), name="delta-care", daemon=True)
            self._round.start()

    def finish(self, deadline: float) -> None:
        """Wait for the round in hand; one that is cut off leaves files that the next one removes."""
        if self._round is not None:
            self._round.join(deadline)

    def _run(self, schema: TableSchema) -> None:
        try:
            done = self._care(schema)
        except MillraceError as error:
            _log.warning("care for %s failed and is tried later: %s", schema.table, error)
        else:
            _log.info(
                "cared for %s: %d tombstones forgotten, %d stretches sorted, %d files removed, %d left to the stream",
                schema.table, done.purged, done.rewritten, done.removed, done.yielded,
            )  # fmt: skip
