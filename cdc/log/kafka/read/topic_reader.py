"""What the readers of Kafka and Debezium logs share: offsets, registered consumers, the Spark stream."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.log.kafka.client import Cluster
from cdc.log.kafka.consumers import ConsumerPositions
from cdc.log.kafka.position import KafkaPosition
from cdc.log.kafka.read.ranges import Decode, RangeReader, read_share
from cdc.log.kafka.settings import KafkaConnectionSettings
from cdc.log.spark_reader import SparkReader
from cdc.model import Lsn
from cdc.ports import Consumer, Offset, Share

if TYPE_CHECKING:
    from cdc.log.spark.source import LogSource


class TopicReader(SparkReader):
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

    def reached(self, offset: Offset) -> Lsn:
        """The LSN of the position."""
        return KafkaPosition.of(offset).end

    def source(self) -> "LogSource":
        """The topics as a Spark source."""
        from cdc.log.spark.kafka import source

        return source(self._cluster.settings)

    def read_share(self, share: Share) -> Iterator[pa.Table]:
        """The changes of a share, in pieces."""
        return read_share(self._ranges, share)

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
