"""One query for all sinks that keep pace: the log is read and folded once, and each sink takes batches at its speed.

The query waits for no store: it only keeps what a slow one has not taken yet, up to a limit, and beyond it the sink
leaves. Its checkpoint is worth nothing after a restart, because it may be ahead of every sink: what counts is each
sink's position in the log, and the query begins anew at the least of them. docs/adr/0011-shared-query.md says why.
"""

import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.config.settings import SinkSettings
from cdc.errors import MillraceError
from cdc.model import Lsn
from cdc.ports import LogReader
from sinks.apply.applier import Applier, Stopped
from sinks.apply.batch_buffer import BatchBuffer
from sinks.fold.folded import Folded, joined
from sinks.spark.brief_errors import brief
from sinks.spark.query import ReadStart, collected, ended, stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

NAME = "convoy"
_OVERHEAD = 8 << 10
"""Bytes of a batch besides its rows: a table of one row takes 9.5 kB."""


class SharedQuery:
    """The shared query. Made anew for every start."""

    def __init__(self, log: LogReader, checkpoints: Path, base: Lsn) -> None:
        self.ring = BatchBuffer(base)
        self._log = log
        self._folder = checkpoints / NAME
        self._query: StreamingQuery | None = None
        self._error = ""

    def start(self, spark: "SparkSession", reading: ReadStart) -> None:
        """Begin where the reading says, whatever an earlier query left behind."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._query = stream(spark, self._log, reading, self._folder, brief(self._batch))

    def failure(self) -> str | None:
        """Why the query ended; None while it runs."""
        query = self._query
        if query is None or query.isActive:
            return None
        error = query.exception()
        return self._error or (type(error).__name__ if error else "ended")

    def halt(self) -> None:
        """Hand nothing out any more, and stop."""
        self.ring.close()
        if self._query is not None:
            ended(self._query, NAME)

    def _batch(self, changes: "DataFrame", _number: int) -> None:
        try:
            for folded in collected(changes, self._log):
                self.ring.put(folded, size(folded))
        except Stopped:
            return  # no harm if Spark takes the batch for done: its checkpoint is thrown away at the next start
        except MillraceError as error:
            self._error = str(error)
            raise


class SharedQuerySink:
    """A sink aboard: takes batches in a thread of its own until it leaves, for whatever reason."""

    def __init__(self, settings: SinkSettings, applier: Applier, ring: BatchBuffer) -> None:
        self.error: str | None = None
        """Why it left; None if it was only too slow, or everything ended."""
        self._settings = settings
        self._applier = applier
        self._ring = ring
        self._thread = threading.Thread(target=self._run, name=f"aboard-{settings.name}", daemon=True)
        self._thread.start()

    @property
    def aboard(self) -> bool:
        """Whether it still takes batches."""
        return self._thread.is_alive() and self._settings.name in self._ring.aboard

    def leave(self, deadline: float) -> None:
        """Take no more; waits for the batch in hand."""
        self._ring.leave(self._settings.name)
        self._thread.join(deadline)

    def _run(self) -> None:
        error: str | None = "ended unexpectedly"
        try:
            while several := self._ring.take(self._settings.name):
                self._apply(several)
            error = None
        except Stopped:
            error = None
        except MillraceError as known:
            error = str(known)
        finally:
            self.error = error
            self._ring.leave(self._settings.name)

    def _apply(self, several: "list[Folded]") -> None:
        started = time.monotonic()
        self._applier.apply(joined([folded.only(self._settings.tables) for folded in several]))
        self._applier.status.took(time.monotonic() - started)


def size(folded: Folded) -> int:
    """Bytes of memory, about: of a tiny batch, hardly any are its rows'."""
    return _OVERHEAD + sum(_OVERHEAD + int(batch.rows.nbytes) for batch in folded.batches)
