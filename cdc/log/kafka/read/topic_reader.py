"""What readers of topics share, whoever wrote these: places as offsets, registered consumers, the stream of Spark."""

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
    """Cheap to make: nothing is connected before the first question. One thread at a time asks."""

    def __init__(self, settings: KafkaConnectionSettings, decoded: Decode) -> None:
        self._cluster = Cluster(settings)
        self._ranges = RangeReader(self._cluster, decoded)
        self._consumers = ConsumerPositions(self._cluster)

    @abstractmethod
    def newest(self) -> KafkaPosition:
        """After everything that can be read now."""

    def start(self) -> Offset:
        """Before whatever Kafka still keeps."""
        return KafkaPosition().offset()

    def head(self) -> tuple[Offset, Lsn]:
        """The newest place, and the LSN it brings a reader to."""
        place = self.newest()
        return place.offset(), place.end

    def frame(self, spark: "SparkSession", after: Offset | None = None, limit: int = 0) -> "DataFrame":
        """Micro-batches that begin and end at places."""
        return self._source().frame(spark, self.start() if after is None else after, limit)

    def packed(
        self, spark: "SparkSession", after: Offset | None, limit: int, columns: Sequence[str], tables: Sequence[TableId]
    ) -> "DataFrame":
        """The micro-batches of `frame`, of some columns and tables (none: all), for `unpacked` only."""
        return self._source().packed(spark, self.start() if after is None else after, limit, columns, tables)

    def unpacked(self, batch: "DataFrame") -> "pa.Table | DataFrame":
        """The rows of a packed micro-batch; a DataFrame of LOG_SCHEMA where they are too many to hold."""
        return self._source().unpacked(batch)

    def _source(self) -> "LogSource":
        from cdc.log.spark.kafka import source

        return source(self._cluster.settings)

    def consumers(self) -> Sequence[Consumer]:
        """Every registered reader."""
        return self._consumers.all()

    def forget(self, consumer: str) -> None:
        """Unregister a reader."""
        self._consumers.forget(consumer)

    def close(self) -> None:
        """Let go of the connections."""
        self._ranges.close()
        self._consumers.close()
        self._cluster.admin.close()
