"""One query for all sinks that keep up: the log is read and folded once, and each sink takes batches at its own speed.

The query does not wait for a slow store: it buffers batches for it up to a limit, beyond which the sink leaves. Its
checkpoint may be ahead of every sink, so it is deleted at each start: the query starts at the least of the sinks'
positions in the log (docs/adr/0011-shared-query.md).
"""

import shutil
import threading
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from cdc.config.settings import SinkSettings
from cdc.errors import MillraceError
from cdc.model import Lsn
from cdc.ports import LogReader
from sinks.apply.applier import Applier
from sinks.apply.batch_buffer import BatchBuffer
from sinks.apply.errors import Stopped
from sinks.fold.folded import Folded, joined
from sinks.spark.batch_reader import BatchReader
from sinks.spark.brief_errors import brief
from sinks.spark.query import ReadStart, stop_query, stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

NAME = "convoy"
_OVERHEAD = 8 << 10
"""Bytes of a batch besides its rows: a table of one row takes 9.5 kB in memory."""


class SharedQuery:
    """The shared query. Every start needs a new object."""

    def __init__(self, log: LogReader, checkpoints: Path, base: Lsn) -> None:
        self.buffer = BatchBuffer(base)
        self._log = log
        self._folder = checkpoints / NAME
        self._reader = BatchReader(log, self._folder)
        self._query: StreamingQuery | None = None
        self._error = ""
        self.wanted: Callable[[Lsn], bool] = lambda _reached: True
        """Asked before a batch that reaches this LSN is put. False if a direct reader has put its changes already."""

    def start(self, spark: "SparkSession", reading: ReadStart) -> None:
        """Start where `reading` says; deletes the checkpoint of an earlier query."""
        shutil.rmtree(self._folder, ignore_errors=True)
        self._query = stream(spark, self._log, reading, self._folder, brief(self._batch))

    @property
    def started(self) -> bool:
        """Whether Spark reads the log, or is about to."""
        return self._query is not None

    def failure(self) -> str | None:
        """Why the query ended; None while it runs, and before its start."""
        query = self._query
        if query is None or query.isActive:
            return None
        error = query.exception()
        return self._error or (type(error).__name__ if error else "ended")

    def halt(self) -> None:
        """Close the buffer and stop the query."""
        self.buffer.close()
        if self._query is not None:
            stop_query(self._query, NAME)

    def _batch(self, changes: "DataFrame", number: int) -> None:
        try:
            for folded in chain(self._reader.read(changes, number), self._reader.follow(lambda: self.buffer.closed)):
                if self.wanted(folded.reached):
                    self.buffer.put(folded, size(folded))
        except Stopped:
            return  # Spark may record the batch as done: the checkpoint is deleted at the next start
        except MillraceError as error:
            self._error = str(error)
            raise


class SharedQuerySink:
    """A sink of the shared query: applies its batches in a thread of its own until it leaves."""

    def __init__(self, settings: SinkSettings, applier: Applier, buffer: BatchBuffer) -> None:
        self.error: str | None = None
        """Why it left; None if it was too slow or the process ends."""
        self._settings = settings
        self._applier = applier
        self._buffer = buffer
        self._thread = threading.Thread(target=self._run, name=f"shared-{settings.name}", daemon=True)
        self._thread.start()

    @property
    def active(self) -> bool:
        """Whether it still takes batches."""
        return self._thread.is_alive() and self._settings.name in self._buffer.members

    def leave(self, deadline: float) -> None:
        """Leave the shared query; waits for the current batch."""
        self._buffer.leave(self._settings.name)
        self._thread.join(deadline)

    def _run(self) -> None:
        error: str | None = "ended unexpectedly"
        try:
            while several := self._buffer.take(self._settings.name):
                self._apply(several)
            error = None
        except Stopped:
            error = None
        except MillraceError as known:
            error = str(known)
        finally:
            self.error = error
            self._buffer.leave(self._settings.name)

    def _apply(self, several: "list[Folded]") -> None:
        started = time.monotonic()
        self._applier.apply(joined([folded.only(self._settings.tables) for folded in several]))
        self._applier.status.add_batch_time(time.monotonic() - started)


def size(folded: Folded) -> int:
    """Approximate bytes in memory; of a tiny batch, most are overhead."""
    return _OVERHEAD + sum(_OVERHEAD + int(batch.rows.nbytes) for batch in folded.batches)
