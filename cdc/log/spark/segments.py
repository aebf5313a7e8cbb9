"""The segment log as a Spark stream: offsets are sequence numbers, nothing is listed but the hot folder.

See docs/adr/0003-spark-source.md for why it is a Python data source.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from cdc.errors import LogCorrupt
from cdc.log.segments.folder import View
from cdc.log.segments.reader import SegmentReader, offset_of, sequence_of
from cdc.log.spark import splits
from cdc.log.spark.packed_rows import Shape
from cdc.log.spark.source import LogSource
from cdc.log.spark.splits import Split
from cdc.ports import Offset

_FORMAT = "millrace_segments"
_DEFAULT_ROWS = 50_000
_BATCH_BYTES = 12 << 20
"""Bytes on disk of one micro-batch: JSON images inflate five- to tenfold, and what cells cannot hold is read twice."""
_PATIENCE = 0.2
_GLANCE = 0.01
"""An idle query looks every 10 ms and answers Spark five times a second: 2.4 % of a core, against 6.1 % when it answers
each question at once."""
_TASK_ROWS = 20_000
"""Least rows of a task: below this a second task costs more than it saves."""


def source(root: Path) -> LogSource:
    """The source that reads the log in a folder."""
    return LogSource(SegmentSource, {"root": str(root.absolute())}, _DEFAULT_ROWS)


class _Partition(InputPartition):
    """What one task reads of what lies between two offsets; the last one of a batch ends with the marker."""

    def __init__(
        self, share: Sequence[Split], after: int, until: int, marker: tuple[int, int, int, Offset] | None, tasks: int
    ) -> None:
        super().__init__(None)
        self.share = tuple(share)
        self.after = offset_of(after)
        self.until = offset_of(until)
        self.marker = marker
        self.tasks = tasks


class SegmentSource(DataSource):
    """Registered under one name; everything else travels as options."""

    @classmethod
    def name(cls) -> str:
        """What `format()` takes."""
        return _FORMAT

    def schema(self) -> StructType:
        """The log's; or that of the cells, for a packed stream."""
        return from_arrow_schema(Shape.of(self.options).schema)

    def streamReader(self, schema: StructType) -> "SegmentStream":  # noqa: N802 -- Spark's name
        """One per query, in a process of its own beside the driver."""
        return SegmentStream(self._root, self._after, int(self.options["limit"]), Shape.of(self.options))

    def reader(self, schema: StructType) -> "SegmentBatch":
        """Everything between two offsets."""
        until = sequence_of(Offset(self.options["until"]))
        return SegmentBatch(self._root, self._after, until, Shape.of(self.options))

    @property
    def _root(self) -> Path:
        return Path(self.options["root"])

    @property
    def _after(self) -> int:
        return sequence_of(Offset(self.options["after"]))


class _Partitions:
    """The tasks of a batch, and what each gives: the same for a stream and for a batch of its own."""

    def __init__(self, root: Path, shape: Shape) -> None:
        self._root = root
        self._shape = shape
        self._reader: SegmentReader | None = None

    def _segments(self) -> SegmentReader:
        # Made late: the object itself is pickled and sent to the process that plans.
        if self._reader is None:
            self._reader = SegmentReader(self._root)
        return self._reader

    def _planned(self, after: int, until: int) -> Sequence[InputPartition]:
        if after >= until:
            return []
        view = self._segments().view()
        shares = splits.spread(splits.pieces(view, after, until), self._shape.tasks, _TASK_ROWS)
        marker, count = splits.reached(view, until), len(shares)
        return [
            _Partition(share, after, until, marker if at == count - 1 else None, count)
            for at, share in enumerate(shares)
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task; runs in a worker."""
        if not isinstance(partition, _Partition):
            raise TypeError("a partition of another source")
        rows = (table for piece in partition.share for table in splits.read(self._root, piece))
        marker = [] if partition.marker is None else [splits.progress_row(*partition.marker)]
        yield from self._shape.given(chain(rows, marker), partition.after, partition.until, partition.tasks)


class SegmentBatch(_Partitions, DataSourceReader):
    """All rows between two offsets, each on its own: for a micro-batch that is too large for cells."""

    def __init__(self, root: Path, after: int, until: int, shape: Shape) -> None:
        super().__init__(root, shape)
        self._after = after
        self._until = until

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the batch."""
        return self._planned(self._after, self._until)


class SegmentStream(_Partitions, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches from the names of segments. Spark's checkpoint holds the only position that counts."""

    def __init__(self, root: Path, after: int, limit: int, shape: Shape) -> None:
        super().__init__(root, shape)
        self._after = after
        self._limit = limit
        self._target: int | None = None

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 -- Spark's name
        """Where a query without a checkpoint begins."""
        return {"sequence": self._after}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 -- Spark's name
        """Back-pressure: about so many changes a batch."""
        return ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        """Remember where the log ends now."""
        self._target = self._segments().view().chain.head

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 -- Spark's name
        """The end of the next batch: whole entries, at least one if there is any."""
        begin = start["sequence"]
        view = self._segments().view() if self._target is not None else self._next(begin)
        if begin > view.chain.head:
            raise LogCorrupt(
                f"The checkpoint stands at offset {begin}, the log ends at {view.chain.head}.",
                "They do not belong together: remove the checkpoint, and it is built again from the log.",
            )
        if isinstance(limit, ReadAllAvailable):
            reached = view.chain.head
        else:
            rows = limit.max_rows if isinstance(limit, ReadMaxRows) else self._limit
            reached = splits.advance(view, begin, rows, _BATCH_BYTES)
        return {"sequence": reached if self._target is None else max(min(reached, self._target), begin)}

    def _next(self, begin: int) -> View:
        """The log once there is something new, or after a while: Spark itself would ask a hundred times a second."""
        deadline = time.monotonic() + _PATIENCE
        while (view := self._segments().view()).chain.head == begin and time.monotonic() < deadline:
            time.sleep(_GLANCE)
        return view

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 -- Spark's name
        """The head, for the query's status."""
        return {"sequence": self._segments().view().chain.head}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """The tasks of one batch."""
        return self._planned(start["sequence"], end["sequence"])
