"""What the readers of Kafka and Debezium logs share: offsets, registered consumers, the Spark stream."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cdc.log.kafka.client import Cluster
from cdc.log.kafka.consumers import ConsumerPositions
from cdc.log.kafka.position import KafkaPosition
from cdc.log.kafka.read.ranges import Decode, RangeReader
from cdc.log.kafka.settings import KafkaConnectionSettings
from cdc.model import Lsn, TableId
from cdc.ports import Consumer, Offset

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

    from cdc.log.spark.source import LogSource


class TopicReader(ABC):
    """Cheap to create: connects on first use. Not for two threads at once."""

    def __init__(self, settings: KafkaConnectionSettings, decoded: Decode) -> None:
        self._cluster = Cluster(settings)
        self._ranges = RangeReader(self._cluster, decoded)
        self._consumers = ConsumerPositions(self._cluster)

    @abstractmethod
    def newest(self) -> KafkaPosition:
        """The position after everything that can be read now."""

    def start(self) -> Offset:
        """The offset before everything that Kafka retains."""
        return KafkaPosition().offset()

    def head(self) -> tuple[Offset, Lsn]:
        """The newest offset, and the LSN up to which the log is complete there."""
        position = self.newest()
        return position.offset(), position.end

    def frame(self, spark: "SparkSession", after: Offset | None = None, limit: int = 0) -> "DataFrame":
        """A streaming DataFrame of the log; micro-batches begin and end at positions."""
        return self._source().frame(spark, self.start() if after is None else after, limit)

    def packed(
        self, spark: "SparkSession", after: Offset | None, limit: int, columns: Sequence[str], tables: Sequence[TableId]
    ) -> "DataFrame":
        """The micro-batches of `frame`, reduced to some columns and tables (none: all), for `unpacked` only."""
        return self._source().packed(spark, self.start() if after is None else after, limit, columns, tables)

    def unpacked(self, batch: "DataFrame") -> "pa.Table | DataFrame":
        """The rows of a packed micro-batch; a DataFrame of LOG_SCHEMA if they are too large for the driver."""
        return self._source().unpacked(batch)

    def _source(self) -> "LogSource":
        from cdc.log.spark.kafka import source

        return source(self._cluster.settings)

    def consumers(self) -> Sequence[Consumer]:
        """Every registered consumer."""
        return self._consumers.all()

    def forget(self, consumer: str) -> None:
        """Unregister a consumer."""
        self._consumers.forget(consumer)

    def close(self) -> None:
        """Close the connections."""
        self._ranges.close()
        self._consumers.close()
        self._cluster.admin.close()
