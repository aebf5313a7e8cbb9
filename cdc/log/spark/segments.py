"""The segment log as a Spark stream: offsets are sequence numbers, nothing is listed but the hot folder.

See docs/adr/0003-spark-source.md for why it is a Python data source.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from cdc.errors import LogCorrupt
from cdc.log.folder import View
from cdc.log.reading import SegmentReader
from cdc.log.spark import pieces
from cdc.log.spark.pieces import Piece
from cdc.model import LOG_SCHEMA
from cdc.ports import Offset

_FORMAT = "millrace_segments"
_DEFAULT_ROWS = 50_000
_BATCH_BYTES = 64 << 20
"""Bytes on disk of one micro-batch: JSON images inflate five- to tenfold, and two batches live at once."""
_PATIENCE = 0.2
_GLANCE = 0.01
"""An idle query looks every 10 ms and answers Spark five times a second: 2.4 % of a core, against 6.1 % when it answers
each question at once."""
_TASK_ROWS = 20_000
"""Least rows of a task: below this a second task costs more than it saves."""
_SMALL_ROWS, _SMALL_BYTES = 5_000, 512 << 10
"""What is folded without Spark: rows, and bytes on disk, which may be ten times as many in memory."""


def frame(spark: SparkSession, root: Path, after: int, limit: int = 0) -> DataFrame:
    """The stream after a sequence number; `limit` rows a micro-batch (0: 50,000)."""
    register(spark, SegmentSource)
    options = {
        "root": str(root.absolute()),
        "after": str(after),
        "limit": str(limit or _DEFAULT_ROWS),
        "tasks": str(spark.sparkContext.defaultParallelism),
    }
    return spark.readStream.format(_FORMAT).options(**options).load()


def is_small(batch: DataFrame) -> bool:
    """Whether a micro-batch has few rows and bytes: only then it is a single partition, marker and all."""
    partitions: int = batch._jdf.queryExecution().toRdd().getNumPartitions()
    return partitions == 1


def register(spark: SparkSession, source: type[DataSource]) -> None:
    """Make a source known to a session and to its workers.

    Spark looks whether the name is taken in the thread's active session, not in the one that registers: with another
    session active that has the source, it would refuse it here and then not find it.
    """
    _let_workers_import(spark)
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)  # type: ignore[union-attr]
    spark.dataSource.register(source)


def _let_workers_import(spark: SparkSession) -> None:
    """Workers unpickle our classes by name; they need our folder on their path wherever the driver was started."""
    ours = str(Path(__file__).parents[3])
    environment = spark.sparkContext.environment
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if ours not in paths:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, ours]))


class _Share(InputPartition):
    """What one task reads; the last one of a batch ends with the marker."""

    def __init__(self, root: str, share: Sequence[Piece], marker: tuple[int, int, int, Offset] | None) -> None:
        super().__init__(None)
        self.root = root
        self.share = tuple(share)
        self.marker = marker


class SegmentSource(DataSource):
    """Registered under one name; everything else travels as options."""

    @classmethod
    def name(cls) -> str:
        """What `format()` takes."""
        return _FORMAT

    def schema(self) -> StructType:
        """Always the log's."""
        return from_arrow_schema(LOG_SCHEMA)

    def streamReader(self, schema: StructType) -> "SegmentStream":  # noqa: N802 -- Spark's name
        """One per query, in a process of its own beside the driver."""
        options = self.options
        return SegmentStream(Path(options["root"]), int(options["after"]), int(options["limit"]), int(options["tasks"]))


class SegmentStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches from the names of segments. Spark's checkpoint holds the only position that counts."""

    def __init__(self, root: Path, after: int, limit: int, tasks: int) -> None:
        self._root = root
        self._after = after
        self._limit = limit
        self._tasks = tasks
        self._target: int | None = None
        self._reader: SegmentReader | None = None

    def _segments(self) -> SegmentReader:
        # Made late: the object itself is pickled and sent to the process that plans.
        if self._reader is None:
            self._reader = SegmentReader(self._root)
        return self._reader

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
            reached = pieces.advance(view, begin, rows, _BATCH_BYTES)
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
        if start["sequence"] >= end["sequence"]:
            return []
        view = self._segments().view()
        whole = pieces.pieces(view, start["sequence"], end["sequence"])
        shares = pieces.spread(whole, self._tasks, _TASK_ROWS)
        if len(shares) == 1 and not pieces.few(whole, _SMALL_ROWS, _SMALL_BYTES):
            shares.append([])  # see is_small
        last = len(shares) - 1
        marker = pieces.reached(view, end["sequence"])
        return [_Share(str(self._root), share, marker if at == last else None) for at, share in enumerate(shares)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task; runs in a worker."""
        if not isinstance(partition, _Share):
            raise TypeError("a partition of another source")
        for piece in partition.share:
            yield from pieces.read(Path(partition.root), piece)
        if partition.marker is not None:
            yield pieces.progress_row(*partition.marker)
