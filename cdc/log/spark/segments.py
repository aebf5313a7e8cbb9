"""The segment log as a Spark stream. Its offsets are sequence numbers.

See docs/adr/0003-spark-source.md for why it is a Python data source.
"""

import json
import time
from collections.abc import Iterator, Sequence
from itertools import chain

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
from cdc.log.batch_size import BatchSize
from cdc.log.segments.reader import SegmentReader, offset_of, sequence_of, storage_at
from cdc.log.segments.storage import LogLocation, View
from cdc.log.shares import BatchProgress, bucket_ranges, share_count
from cdc.log.spark import splits
from cdc.log.spark.packed_rows import OutputFormat
from cdc.log.spark.source import LogSource, PlannedShare, planned_shares
from cdc.log.spark.splits import Split
from cdc.model import Lsn
from cdc.ports import Offset

_FORMAT = "millrace_segments"
_BATCH_BYTES = 12 << 20
"""Bytes on disk of one packed micro-batch, or of one task's part of another. JSON images take five to ten times that in
memory, and a batch too large to pack is read twice."""
_TASK_CHANGES = 250_000
"""Changes of one share on a cluster, at most: small rows are limited by their number, not by _BATCH_BYTES."""
_ANSWER_SECONDS = 0.2
"""An idle query answers Spark five times a second and looks for entries more often. In a folder that costs 2.4 % of a
core, against 6.1 % when it answers at once."""
_TASK_ROWS = 20_000
"""Minimum rows per task: below this a second task costs more than it saves."""


def source(location: LogLocation) -> LogSource:
    """The Spark source for the log at a location."""
    # Spark redacts an option of this name in its UI and logs.
    return LogSource(SegmentSource, {"root": location.root, "secret": json.dumps(location.options)})


class _Partition(InputPartition):
    """What one task reads between two offsets. The last task of a batch adds the progress row."""

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
    """Spark's entry point: registered under one name and configured by options only."""

    @classmethod
    def name(cls) -> str:
        """The name for `format()`."""
        return _FORMAT

    def schema(self) -> StructType:
        """LOG_SCHEMA, or PACKED for a packed stream."""
        return from_arrow_schema(OutputFormat.of(self.options).schema)

    def streamReader(self, schema: StructType) -> "SegmentStream":  # noqa: N802 -- Spark's name
        """Plans one query. Spark runs it in its own Python process beside the driver."""
        size = BatchSize.of(self.options, _TASK_CHANGES)
        return SegmentStream(self._location, self._after, size, OutputFormat.of(self.options))

    def reader(self, schema: StructType) -> "SegmentBatch":
        """Everything between two offsets."""
        until = sequence_of(Offset(self.options["until"]))
        return SegmentBatch(self._location, self._after, until, OutputFormat.of(self.options))

    @property
    def _location(self) -> LogLocation:
        options = [(str(name), str(value)) for name, value in json.loads(self.options["secret"])]
        return LogLocation(self.options["root"], tuple(options))

    @property
    def _after(self) -> int:
        return sequence_of(Offset(self.options["after"]))


class _TaskPlanner:
    """Plans the tasks of a batch and runs one: shared by the streaming and the batch reader."""

    def __init__(self, location: LogLocation, output_format: OutputFormat) -> None:
        self._location = location
        self._output_format = output_format
        self._reader: SegmentReader | None = None

    def _log(self) -> SegmentReader:
        # Created on first use: Spark pickles this object and sends it to the process that plans.
        if self._reader is None:
            self._reader = SegmentReader(storage_at(self._location))
        return self._reader

    def _plan(self, after: int, until: int) -> Sequence[InputPartition]:
        if after >= until:
            return []
        view = self._log().view()
        if self._output_format.planned:
            return self._plan_shares(view, after, until)
        shares = splits.distribute(splits.plan(view, after, until), self._output_format.tasks, _TASK_ROWS)
        marker, count = splits.progress_at(view, until), len(shares)
        return [
            _Partition(share, after, until, marker if at == count - 1 else None, count)
            for at, share in enumerate(shares)
        ]

    def _plan_shares(self, view: View, after: int, until: int) -> Sequence[InputPartition]:
        rows = sum(split.rows for split in splits.plan(view, after, until))
        ranges = bucket_ranges(share_count(rows, self._output_format.tasks))
        end, _, _, offset = splits.progress_at(view, until)
        reached = BatchProgress(Lsn(end), offset)
        shares = {number: splits.share_of(after, until, *buckets) for number, buckets in enumerate(ranges)}
        return planned_shares(shares, len(ranges), reached)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Runs in a Spark worker."""
        if isinstance(partition, PlannedShare):
            yield partition.row()
            return
        if not isinstance(partition, _Partition):
            raise TypeError("the partition belongs to another source")
        rows = (table for split in partition.share for table in splits.read(self._log(), split))
        marker = [] if partition.marker is None else [splits.progress_row(*partition.marker)]
        yield from self._output_format.output(chain(rows, marker), partition.after, partition.until, partition.tasks)


class SegmentBatch(_TaskPlanner, DataSourceReader):
    """All rows between two offsets, unpacked: for a micro-batch that is too large to pack."""

    def __init__(self, location: LogLocation, after: int, until: int, output_format: OutputFormat) -> None:
        super().__init__(location, output_format)
        self._after = after
        self._until = until

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the batch."""
        return self._plan(self._after, self._until)


class SegmentStream(_TaskPlanner, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches from the names of segments. The position is kept in Spark's checkpoint only."""

    def __init__(self, location: LogLocation, after: int, size: BatchSize, output_format: OutputFormat) -> None:
        super().__init__(location, output_format)
        self._after = after
        self._size = size
        self._target: int | None = None

    def position(self, offset: dict[str, int]) -> Offset:
        """The log's own offset."""
        return offset_of(offset["sequence"])

    def initialOffset(self) -> dict[str, int]:  # noqa: N802 -- Spark's name
        """Where a query without a checkpoint begins."""
        return {"sequence": self._after}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 -- Spark's name
        """Back-pressure: about this many changes per batch."""
        return ReadMaxRows(self._size.changes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        """Remember where the log ends now."""
        self._target = self._log().view().chain.head

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802 -- Spark's name
        """The end of the next batch: whole entries, at least one if there is any."""
        self._size.ended()
        begin = start["sequence"]
        view = self._log().view() if self._target is not None else self._next(begin)
        if begin > view.chain.head:
            raise LogCorrupt(
                f"The checkpoint is at offset {begin}, but the log ends at {view.chain.head}.",
                "The checkpoint belongs to another log: remove it, and the sink is rebuilt from this log.",
            )
        if isinstance(limit, ReadAllAvailable):
            reached = view.chain.head
        else:
            size = _BATCH_BYTES * (1 if self._output_format.packed else self._output_format.tasks)
            reached = splits.advance(view, begin, self._size.changes, size)
        self._size.begun(full=reached < view.chain.head)
        return {"sequence": reached if self._target is None else max(min(reached, self._target), begin)}

    def _next(self, begin: int) -> View:
        """The log once it has new entries, or after a short wait: Spark itself would ask a hundred times a second."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (view := self._log().view()).chain.head == begin and time.monotonic() < deadline:
            time.sleep(self._log().poll_seconds)
        return view

    def reportLatestOffset(self) -> dict[str, int]:  # noqa: N802 -- Spark's name
        """The head, for the query's status."""
        return {"sequence": self._log().view().chain.head}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        """The tasks of one batch."""
        return self._plan(start["sequence"], end["sequence"])
