"""Reads the log without Spark, from the start of the process until Spark's first batch (docs/adr/0024-recovery.md).

A JVM with a session and the workers of its first batch takes 10 to 30 seconds, and a sink needs none of them for an
ordinary batch. So the sinks that share a query get their batches from here meanwhile: the same rows, the same fold, the
same buffer. Huge transactions are left to Spark, which need not hold them in memory.
"""

import threading

from cdc.errors import MillraceError
from cdc.model import ZERO_LSN, Lsn
from cdc.ports import LogReader, Offset, Slice
from sinks.apply.batch_buffer import BatchBuffer
from sinks.apply.batch_schedule import NEAR
from sinks.apply.errors import Stopped
from sinks.fold.folded import of_slices
from sinks.spark.shared_query import size as memory_of

_BATCH_ROWS = 20_000
_BATCH_BYTES = 16 << 20
_POLL_SECONDS = 0.1


class DirectReader:
    """A thread that puts the batches after a position into a buffer, until it is ended.

    Spark may begin anywhere before the place where this reader ends: what is applied twice changes nothing.
    """

    def __init__(self, log: LogReader, buffer: BatchBuffer, after: Offset, reached: Lsn) -> None:
        self.position = (after, reached)
        """After the last batch that a sink has begun to take."""
        self.error: str | None = None
        """Why it ended by itself."""
        self._log = log
        self._buffer = buffer
        self._stop = threading.Event()
        self._first = True
        self._thread = threading.Thread(target=self._run, name="direct-reader", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End after the present batch."""
        self._stop.set()

    def end(self) -> Lsn:
        """End, and wait for it; returns the LSN up to which the buffer has everything."""
        self._stop.set()
        self._thread.join()
        return self.position[1]

    def hand_over(self, reached: Lsn) -> bool:
        """Spark has read a batch up to this LSN (0: a part of a batch): whether the buffer needs it. Ends this reader.

        Spark's first batch takes as long as many later ones, which is not to be waited for: if this reader has passed
        it meanwhile, it ends only at the second.
        """
        first, self._first = self._first, False
        if first and ZERO_LSN < reached < self.position[1]:
            return False
        end = self.end()  # also at a part: no batch of this reader may come between the parts, to a sink that joins
        return not reached or reached >= end

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                if not self._put_next():
                    self._stop.wait(_POLL_SECONDS)
        except Stopped:
            return
        except MillraceError as error:
            self.error = str(error)

    def _put_next(self) -> bool:
        """Put one batch; False if there is none. Does not begin what is far behind: it may be one huge transaction."""
        after, reached = self.position
        head, end = self._log.head()
        if head == after or end - reached > NEAR:
            return False
        slices = self._slices(after)
        if not slices:
            return False
        folded = of_slices(slices, self._log.schemas)
        self._buffer.put(folded, memory_of(folded))
        self.position = (slices[-1].offset, slices[-1].end)
        return True

    def _slices(self, after: Offset) -> list[Slice]:
        found: list[Slice] = []
        rows = size = 0
        for piece in self._log.read(after):
            found.append(piece)
            rows, size = rows + piece.rows.num_rows, size + piece.rows.nbytes
            if rows >= _BATCH_ROWS or size >= _BATCH_BYTES:
                break
        return found
