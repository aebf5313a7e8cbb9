"""Reads a log through its Spark data source, as rows or packed: the same for every kind of log."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit
from pyspark.sql.types import StructType

from cdc.log.batch_size import USUAL_CHANGES
from cdc.log.shares import PLANNED, BatchProgress
from cdc.log.spark.packed_rows import Selection, TooLarge, unpack
from cdc.model import TableId
from cdc.ports import Offset, Share

SparkOffset = dict[str, Any]
"""An offset as Spark writes it into a checkpoint. Members that a log's stream does not know are ignored by it."""


class LogStream(Protocol):
    """What the stream of every kind of log gives a source that is built on it. Can be pickled until it is used."""

    def position(self, offset: SparkOffset) -> Offset:
        """The log's own offset."""

    def initialOffset(self) -> SparkOffset:  # noqa: N802 -- Spark's name
        """The offset that the stream was opened with."""

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        """Let the stream end where the log ends now."""

    def latestOffset(self, start: SparkOffset, limit: ReadLimit) -> SparkOffset:  # noqa: N802 -- Spark's name
        """The end of the next batch; `start` itself at the end of the log."""

    def reportLatestOffset(self) -> SparkOffset:  # noqa: N802 -- Spark's name
        """The end of the log."""

    def partitions(self, start: SparkOffset, end: SparkOffset) -> Sequence[InputPartition]:
        """The tasks of a batch."""

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The changes of a task, with LOG_SCHEMA, each once; one of the tasks also has a row of PROGRESS_TABLE."""


@dataclass(frozen=True, slots=True)
class LogSource:
    """A data source with the options of one log."""

    kind: type[DataSource]
    options: Mapping[str, str] = field(repr=False)  # a password may be among them

    def frame(self, spark: SparkSession, after: Offset, limit: int) -> DataFrame:
        """The stream after an offset, with about `limit` changes per micro-batch (0: the usual number)."""
        return spark.readStream.format(self.kind.name()).options(**self._options(spark, after, limit)).load()

    def stream(self, after: Offset, limit: int, tasks: int, table: TableId) -> LogStream:
        """The stream of one table for another source, which registers itself, not this one. With limit 0 the batches of
        a query that is behind grow (`cdc.log.batch_size`)."""
        selection = Selection(tables=(str(table),)).encoded()
        own = {"after": after, "limit": str(limit), "tasks": str(tasks), "selection": selection}
        return cast("LogStream", self.kind({**self.options, **own}).streamReader(StructType()))

    def packed(
        self, spark: SparkSession, after: Offset, limit: int, columns: Sequence[str], tables: Sequence[TableId]
    ) -> DataFrame:
        """The same stream packed, with some columns and tables only. `unpacked` decodes a micro-batch."""
        packing = Selection(tuple(columns), tuple(map(str, tables))).packing()
        return spark.readStream.format(self.kind.name()).options(**self._options(spark, after, limit), **packing).load()

    def planned(self, spark: SparkSession, after: Offset, limit: int) -> DataFrame:
        """The same stream as plans: one row per share (`cdc.log.shares`), without the changes. With limit 0 the batches
        of a query that is behind grow (`cdc.log.batch_size`)."""
        options = {**self._options(spark, after, limit), "limit": str(limit), "planned": "true"}
        return spark.readStream.format(self.kind.name()).options(**options).load()

    def unpacked(self, batch: DataFrame) -> pa.Table | DataFrame:
        """The rows of a packed micro-batch; if too large for the driver, a DataFrame that reads them again."""
        found = unpack(batch.toArrow())
        if not isinstance(found, TooLarge):
            return found
        spark = batch.sparkSession
        between = {"until": found.until, "selection": found.selection}
        encoded = self._options(spark, Offset(found.after), 0)
        return spark.read.format(self.kind.name()).options(**encoded, **between).load()

    def _options(self, spark: SparkSession, after: Offset, limit: int) -> dict[str, str]:
        register(spark, self.kind)
        tasks = str(spark.sparkContext.defaultParallelism)
        return {**self.options, "after": after, "limit": str(limit or USUAL_CHANGES), "tasks": tasks}


def register(spark: SparkSession, source: type[DataSource]) -> None:
    """Register a source with a session and its workers.

    Spark checks whether the name is taken in the thread's active session, not in the session that registers. If another
    active session had the source, Spark would refuse it here and then not find it.
    """
    _let_workers_import(spark)
    spark._jvm.SparkSession.setActiveSession(spark._jsparkSession)  # type: ignore[union-attr]
    spark.dataSource.register(source)


def _let_workers_import(spark: SparkSession) -> None:
    """Put this package on the workers' path: they unpickle its classes by name, wherever the driver was started."""
    ours = str(Path(__file__).parents[3])
    environment = spark.sparkContext.environment
    paths = environment.get("PYTHONPATH", "").split(os.pathsep)
    if ours not in paths:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, ours]))


class PlannedShare(InputPartition):
    """One task of a planned micro-batch."""

    def __init__(self, share: Share, part: str, progress: BatchProgress | None) -> None:
        super().__init__(None)
        self.share = share
        self.part = part
        self.progress = None if progress is None else progress.encoded()

    def row(self) -> pa.RecordBatch:
        """One row of PLANNED."""
        columns = [pa.array([value], pa.string()) for value in (self.share, self.part, self.progress)]
        return pa.RecordBatch.from_arrays(columns, schema=PLANNED)


def planned_shares(shares: Mapping[int, Share], count: int, progress: BatchProgress) -> Sequence[PlannedShare]:
    """The tasks of a micro-batch: shares by their number, of `count` that divide all keys."""
    last = max(shares)
    return [
        PlannedShare(share, f"{number} of {count}", progress if number == last else None)
        for number, share in shares.items()
    ]
