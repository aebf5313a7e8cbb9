"""The part of a log reader that gives the log to Spark: the same for every kind of log. Imports no Spark itself."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cdc.model import Lsn, TableId
from cdc.ports import LogReader, Offset, Share

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from cdc.log.spark.source import LogSource


class SparkReader(LogReader, ABC):
    """`cdc.ports.LogReader` by means of the kind's Spark source."""

    @property
    def poll_seconds(self) -> float:
        """A look at the log costs next to nothing."""
        return 0.01

    @abstractmethod
    def start(self) -> Offset:
        """Before the oldest change that is kept."""

    @abstractmethod
    def reached(self, offset: Offset) -> Lsn:
        """The LSN up to which the log is complete at an offset that is still kept."""

    @abstractmethod
    def source(self) -> "LogSource":
        """The Spark source of this log. Import it inside: not every process that reads a log has Spark."""

    @abstractmethod
    def read_share(self, share: Share) -> "Iterator[pa.Table]":
        """The changes of a share, in pieces."""

    def frame(self, spark: "SparkSession", after: Offset | None = None, limit: int = 0) -> "DataFrame":
        """A streaming DataFrame of the log; micro-batches begin and end at positions."""
        return self.source().frame(spark, self.start() if after is None else after, limit)

    def packed(
        self, spark: "SparkSession", after: Offset | None, limit: int, columns: Sequence[str], tables: Sequence[TableId]
    ) -> "DataFrame":
        """The micro-batches of `frame`, reduced to some columns and tables (none: all), for `unpacked` only."""
        return self.source().packed(spark, self.start() if after is None else after, limit, columns, tables)

    def planned(self, spark: "SparkSession", after: Offset | None, limit: int) -> "DataFrame":
        """The micro-batches of `frame` as plans, one row per share."""
        return self.source().planned(spark, self.start() if after is None else after, limit)

    def unpacked(self, batch: "DataFrame") -> "pa.Table | DataFrame":
        """The rows of a packed micro-batch; a DataFrame of LOG_SCHEMA if they are too large for the driver."""
        return self.source().unpacked(batch)
