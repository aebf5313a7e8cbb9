"""A Kafka log as a Spark stream: a micro-batch begins and ends at markers, so it holds whole transactions.

Why not Spark's own Kafka source: it asks each partition for its newest offset at a moment of its own, so a batch can
hold a transaction's marker without some of its rows; and its JSON functions write numbers anew, which loses digits.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from cdc.config.secret import Secret
from cdc.errors import LogCorrupt
from cdc.log.debezium.decode import DebeziumDecoder
from cdc.log.debezium.log import DebeziumReader, DebeziumSettings
from cdc.log.kafka.client import Cluster
from cdc.log.kafka.position import KafkaPosition
from cdc.log.kafka.read.between import check, ranges
from cdc.log.kafka.read.ranges import OffsetRange, RangeReader, envelopes
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaConnectionSettings, KafkaSettings
from cdc.log.spark.packed_rows import Shape
from cdc.log.spark.source import LogSource
from cdc.log.spark.splits import progress_row
from cdc.ports import Offset

_FORMAT = "millrace_kafka"
_BATCH_MESSAGES = 50_000
_TASK_MESSAGES = 20_000
"""Least messages of a task: below this a second task costs more than it saves."""

Where = dict[str, str]


def source(settings: KafkaConnectionSettings) -> LogSource:
    """The source that reads a log's topics."""
    told = settings.model_dump_json(exclude={"password", "key_password"})
    # Spark redacts options of this name wherever it shows them.
    secret = json.dumps([settings.password.reveal(), settings.key_password.reveal()])
    return LogSource(KafkaSource, {"settings": told, "password": secret}, _BATCH_MESSAGES)


class KafkaSource(DataSource):
    """Registered under one name; everything else travels as options."""

    @classmethod
    def name(cls) -> str:
        """What `format()` takes."""
        return _FORMAT

    def schema(self) -> StructType:
        """The log's; or that of the cells, for a packed stream."""
        return from_arrow_schema(Shape.of(self.options).schema)

    def streamReader(self, schema: StructType) -> "KafkaStream":  # noqa: N802 -- Spark's name
        """One per query, in a process of its own beside the driver."""
        return KafkaStream(
            self._brokers, Offset(self.options["after"]), int(self.options["limit"]), Shape.of(self.options)
        )

    def reader(self, schema: StructType) -> "KafkaBatch":
        """Everything between two offsets."""
        places = Offset(self.options["after"]), Offset(self.options["until"])
        return KafkaBatch(self._brokers, *places, Shape.of(self.options))

    @property
    def _brokers(self) -> tuple[str, str]:
        return self.options["settings"], self.options["password"]


class _Task(InputPartition):
    """What one task reads of what lies between two places; the last one of a batch ends with the marker."""

    def __init__(
        self, share: Sequence[OffsetRange], after: KafkaPosition, until: KafkaPosition, last: bool, tasks: int
    ) -> None:
        super().__init__(None)
        self.share = tuple(share)
        self.after = after
        self.until = until
        self.last = last
        self.tasks = tasks


class _Tasks:
    """The tasks of a batch, and what each gives: the same for a stream and for a batch of its own."""

    def __init__(self, brokers: tuple[str, str], shape: Shape) -> None:
        self._brokers = brokers
        self._shape = shape

    def _planned(self, after: KafkaPosition, until: KafkaPosition) -> Sequence[InputPartition]:
        if after.marker >= until.marker:
            return []
        check(_cluster(*self._brokers), after, until)
        shares = spread(ranges(after, until), self._shape.tasks)
        last = len(shares) - 1
        return [_Task(share, after, until, at == last, len(shares)) for at, share in enumerate(shares)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task; runs in a worker."""
        if not isinstance(partition, _Task):
            raise TypeError("a partition of another source")
        until = partition.until
        rows = (part.rows for part in _ranges(*self._brokers).read(partition.share))
        marker = [progress_row(until.end, until.end, until.newest, until.offset())] if partition.last else []
        parts = chain(rows, marker)
        yield from self._shape.given(parts, partition.after.offset(), until.offset(), partition.tasks)


class KafkaBatch(_Tasks, DataSourceReader):
    """All rows between two places, each on its own: for a micro-batch that is too large for cells."""

    def __init__(self, brokers: tuple[str, str], after: Offset, until: Offset, shape: Shape) -> None:
        super().__init__(brokers, shape)
        self._after = after
        self._until = until

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the batch."""
        return self._planned(KafkaPosition.of(self._after), KafkaPosition.of(self._until))


class KafkaStream(_Tasks, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches from markers. Spark's checkpoint holds the only position that counts."""

    def __init__(self, brokers: tuple[str, str], after: Offset, limit: int, shape: Shape) -> None:
        super().__init__(brokers, shape)
        self._limit = limit
        self._after = after
        self._target: KafkaPosition | None = None

    def initialOffset(self) -> Where:  # noqa: N802 -- Spark's name
        """Where a query without a checkpoint begins."""
        return {"place": self._after}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 -- Spark's name
        """Back-pressure: about so many messages a batch."""
        return ReadMaxRows(self._limit)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        """Remember where the log ends now."""
        self._target = self._log().newest()

    def latestOffset(self, start: Where, limit: ReadLimit) -> Where:  # noqa: N802 -- Spark's name
        """The end of the next batch: whole transactions, at least one if there is any."""
        begin = KafkaPosition.of(Offset(start["place"]))
        newest = self._log().newest()
        if begin.marker > newest.marker:
            raise LogCorrupt(
                f"The checkpoint stands at marker {begin.marker}, the log ends at {newest.marker}.",
                "They do not belong together: remove the checkpoint, and the store is built again from the log.",
            )
        if isinstance(limit, ReadAllAvailable):
            reached = newest
        else:
            messages = limit.max_rows if isinstance(limit, ReadMaxRows) else self._limit
            reached = self._log().next_place(begin, messages)
        if self._target is not None and reached.marker > self._target.marker:
            reached = self._target if self._target.marker > begin.marker else begin
        return {"place": reached.offset() if reached.marker > begin.marker else start["place"]}

    def reportLatestOffset(self) -> Where:  # noqa: N802 -- Spark's name
        """The head, for the query's status."""
        return {"place": self._log().newest().offset()}

    def partitions(self, start: Where, end: Where) -> Sequence[InputPartition]:
        """The tasks of one batch."""
        return self._planned(KafkaPosition.of(Offset(start["place"])), KafkaPosition.of(Offset(end["place"])))

    def _log(self) -> KafkaReader | DebeziumReader:
        return _reader(*self._brokers)


def spread(whole: Sequence[OffsetRange], tasks: int) -> list[list[OffsetRange]]:
    """Whole partitions over at most `tasks` shares, fewer where there is little to read; at least one share."""
    total = sum(item.end - (item.start or 0) for item in whole)
    count = max(1, min(tasks, len(whole), total // _TASK_MESSAGES))
    shares: list[list[OffsetRange]] = [[] for _ in range(count)]
    weights = [0] * count
    for item in sorted(whole, key=lambda item: (item.start or 0) - item.end):
        lightest = weights.index(min(weights))
        shares[lightest].append(item)
        weights[lightest] += item.end - (item.start or 0)
    return shares


def _typed(settings: str, password: str) -> KafkaSettings | DebeziumSettings:
    told = json.loads(settings)
    kind = DebeziumSettings if told["kind"] == "debezium" else KafkaSettings
    own, of_key = (Secret(each) for each in json.loads(password))
    return kind.model_validate({**told, "password": own, "key_password": of_key})


@cache
def _cluster(settings: str, password: str) -> Cluster:
    return Cluster(_typed(settings, password))


@cache
def _reader(settings: str, password: str) -> KafkaReader | DebeziumReader:
    """Kept for the life of the process, which is the query's."""
    typed = _typed(settings, password)
    return DebeziumReader(typed) if isinstance(typed, DebeziumSettings) else KafkaReader(typed)


@cache
def _ranges(settings: str, password: str) -> RangeReader:
    """Kept for the life of the worker: Spark uses it again for the next batch."""
    typed = _typed(settings, password)
    decoded = DebeziumDecoder(typed.placeholder) if isinstance(typed, DebeziumSettings) else envelopes
    return RangeReader(_cluster(settings, password), decoded, ahead=True)
