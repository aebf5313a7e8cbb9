"""A Kafka log as a Spark stream: a micro-batch begins and ends at position markers, so it has whole transactions.

Why not Spark's own Kafka source: it asks each partition for its newest offset at a different moment, so a batch could
contain a transaction's marker without some of its rows; and Spark's JSON functions reformat numbers and lose digits.
"""

import json
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from zlib import crc32

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from cdc.config.secret import Secret
from cdc.errors import LogCorrupt
from cdc.log.batch_size import BatchSize
from cdc.log.debezium.decode import DebeziumDecoder
from cdc.log.debezium.log import DebeziumReader, DebeziumSettings
from cdc.log.kafka.client import Cluster
from cdc.log.kafka.envelope.encode import topic_of
from cdc.log.kafka.position import KafkaPosition, topics_of
from cdc.log.kafka.read.ranges import (
    OffsetRange,
    RangeReader,
    check_topics,
    decode_envelopes,
    messages_between,
    ranges_between,
    read_share,
    require_kept,
    share_of,
)
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaConnectionSettings, KafkaSettings
from cdc.log.shares import BatchProgress, share_count
from cdc.log.spark.packed_rows import OutputFormat
from cdc.log.spark.source import LogSource, PlannedShare, planned_shares
from cdc.log.spark.splits import progress_row
from cdc.ports import Offset

_FORMAT = "millrace_kafka"
_TASK_CHANGES = 100_000
"""Changes of one share on a cluster, at most: how many bytes they have is not known before they are read."""
_TASK_MESSAGES = 20_000
"""Minimum messages per task: below this a second task costs more than it saves."""

SparkOffset = dict[str, str]


def source(settings: KafkaConnectionSettings) -> LogSource:
    """The Spark source for a log's topics."""
    encoded = settings.model_dump_json(exclude={"password", "key_password"})
    # Spark redacts an option of this name in its UI and logs.
    secret = json.dumps([settings.password.reveal(), settings.key_password.reveal()])
    return LogSource(KafkaSource, {"settings": encoded, "password": secret})


class KafkaSource(DataSource):
    """Spark's entry point: registered under one name and configured by options only."""

    @classmethod
    def name(cls) -> str:
        """The name for `format()`."""
        return _FORMAT

    def schema(self) -> StructType:
        """LOG_SCHEMA, or PACKED for a packed stream."""
        return from_arrow_schema(OutputFormat.of(self.options).schema)

    def streamReader(self, schema: StructType) -> "KafkaStream":  # noqa: N802 -- Spark's name
        """Plans one query. Spark runs it in its own Python process beside the driver."""
        size = BatchSize.of(self.options, _TASK_CHANGES)
        return KafkaStream(self._connection, Offset(self.options["after"]), size, OutputFormat.of(self.options))

    def reader(self, schema: StructType) -> "KafkaBatch":
        """Everything between two offsets."""
        offsets = Offset(self.options["after"]), Offset(self.options["until"])
        return KafkaBatch(self._connection, *offsets, OutputFormat.of(self.options))

    @property
    def _connection(self) -> tuple[str, str]:
        return self.options["settings"], self.options["password"]


class _Task(InputPartition):
    """What one task reads between two positions. The last task of a batch adds the progress row."""

    def __init__(
        self, share: Sequence[OffsetRange], after: KafkaPosition, until: KafkaPosition, last: bool, tasks: int
    ) -> None:
        super().__init__(None)
        self.share = tuple(share)
        self.after = after
        self.until = until
        self.last = last
        self.tasks = tasks


class _TaskPlanner:
    """Plans the tasks of a batch and runs one: shared by the streaming and the batch reader."""

    def __init__(self, connection: tuple[str, str], output_format: OutputFormat) -> None:
        self._connection = connection
        self._output_format = output_format

    def _plan(self, after: KafkaPosition, until: KafkaPosition) -> Sequence[InputPartition]:
        if after.marker >= until.marker:
            return []
        check_topics(_cluster(*self._connection), after, until)
        if self._output_format.planned:
            return self._plan_shares(after, until)
        ranges = self._selected(ranges_between(after, until))
        if not self._output_format.packed:  # the driver says it better than a task
            require_kept(_cluster(*self._connection), ranges, topics_of(until))
        shares = distribute(ranges, self._output_format.tasks)
        last = len(shares) - 1
        return [_Task(share, after, until, at == last, len(shares)) for at, share in enumerate(shares)]

    def _selected(self, ranges: Sequence[OffsetRange]) -> Sequence[OffsetRange]:
        """Those of the selected tables' topics; of all tables if none is selected."""
        prefix = _settings_of(*self._connection).prefix
        topics = {topic_of(prefix, table) for table in self._output_format.selection.tables}
        return [item for item in ranges if not topics or item.topic in topics]

    def _plan_shares(self, after: KafkaPosition, until: KafkaPosition) -> Sequence[InputPartition]:
        ranges = ranges_between(after, until)
        count = share_count(messages_between(after, until), self._output_format.tasks)
        shares: dict[int, list[OffsetRange]] = {}
        for item in ranges:  # by name, not by size: a partition stays in the share of the same number
            shares.setdefault((crc32(item.topic.encode()) + item.partition) % count, []).append(item)
        reached = BatchProgress(until.end, until.offset())
        named = {number: share_of(share) for number, share in shares.items()}
        return planned_shares(named or {0: share_of(())}, count, reached)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Runs in a Spark worker."""
        if isinstance(partition, PlannedShare):
            yield partition.row()
            return
        if not isinstance(partition, _Task):
            raise TypeError("the partition belongs to another source")
        until = partition.until
        rows = self._changes(partition.share)
        marker = [progress_row(until.end, until.end, until.newest, until.offset())] if partition.last else []
        parts = chain(rows, marker)
        yield from self._output_format.output(parts, partition.after.offset(), until.offset(), partition.tasks)

    def _changes(self, share: Sequence[OffsetRange]) -> Iterator[pa.Table]:
        """What will be packed is limited by its bytes, everything else is read some messages at a time."""
        if self._output_format.packed:
            return (part.rows for part in _ranges(*self._connection).read(share))
        return read_share(_ranges(*self._connection), share_of(share))


class KafkaBatch(_TaskPlanner, DataSourceReader):
    """All rows between two positions, unpacked: for a micro-batch that is too large to pack."""

    def __init__(self, connection: tuple[str, str], after: Offset, until: Offset, output_format: OutputFormat) -> None:
        super().__init__(connection, output_format)
        self._after = after
        self._until = until

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks of the batch."""
        return self._plan(KafkaPosition.of(self._after), KafkaPosition.of(self._until))


class KafkaStream(_TaskPlanner, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches from markers. The position is kept in Spark's checkpoint only."""

    def __init__(
        self, connection: tuple[str, str], after: Offset, size: BatchSize, output_format: OutputFormat
    ) -> None:
        super().__init__(connection, output_format)
        self._size = size
        self._after = after
        self._target: KafkaPosition | None = None

    def position(self, offset: SparkOffset) -> Offset:
        """The log's own offset."""
        return Offset(offset["place"])

    def initialOffset(self) -> SparkOffset:  # noqa: N802 -- Spark's name
        """Where a query without a checkpoint begins."""
        return {"place": self._after}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 -- Spark's name
        """Back-pressure: about this many messages per batch."""
        return ReadMaxRows(self._size.changes)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        """Remember where the log ends now."""
        self._target = self._log().newest()

    def latestOffset(self, start: SparkOffset, limit: ReadLimit) -> SparkOffset:  # noqa: N802 -- Spark's name
        """The end of the next batch: whole transactions, at least one if there is any."""
        self._size.ended()
        begin = KafkaPosition.of(Offset(start["place"]))
        newest = self._log().newest()
        if begin.marker > newest.marker:
            raise LogCorrupt(
                f"The checkpoint is at marker {begin.marker}, but the log ends at {newest.marker}.",
                "The checkpoint belongs to another log: remove it, and the sink is rebuilt from this log.",
            )
        if isinstance(limit, ReadAllAvailable):
            reached = newest
        else:
            reached = self._log().next_position(begin, self._size.changes)
        self._size.begun(full=reached.marker < newest.marker)
        if self._target is not None and reached.marker > self._target.marker:
            reached = self._target if self._target.marker > begin.marker else begin
        return {"place": reached.offset() if reached.marker > begin.marker else start["place"]}

    def reportLatestOffset(self) -> SparkOffset:  # noqa: N802 -- Spark's name
        """The head, for the query's status."""
        return {"place": self._log().newest().offset()}

    def partitions(self, start: SparkOffset, end: SparkOffset) -> Sequence[InputPartition]:
        """The tasks of one batch."""
        return self._plan(KafkaPosition.of(Offset(start["place"])), KafkaPosition.of(Offset(end["place"])))

    def _log(self) -> KafkaReader | DebeziumReader:
        return _reader(*self._connection)


def distribute(whole: Sequence[OffsetRange], tasks: int) -> list[list[OffsetRange]]:
    """Distribute whole partitions over at most `tasks` shares; fewer if there is little to read, at least one."""
    total = sum(item.end - (item.start or 0) for item in whole)
    count = max(1, min(tasks, len(whole), total // _TASK_MESSAGES))
    shares: list[list[OffsetRange]] = [[] for _ in range(count)]
    weights = [0] * count
    for item in sorted(whole, key=lambda item: (item.start or 0) - item.end):
        lightest = weights.index(min(weights))
        shares[lightest].append(item)
        weights[lightest] += item.end - (item.start or 0)
    return shares


def _settings_of(settings: str, password: str) -> KafkaSettings | DebeziumSettings:
    encoded = json.loads(settings)
    kind = DebeziumSettings if encoded["kind"] == "debezium" else KafkaSettings
    own, of_key = (Secret(each) for each in json.loads(password))
    return kind.model_validate({**encoded, "password": own, "key_password": of_key})


@cache
def _cluster(settings: str, password: str) -> Cluster:
    return Cluster(_settings_of(settings, password))


@cache
def _reader(settings: str, password: str) -> KafkaReader | DebeziumReader:
    """Cached for the life of the process, which is that of the query."""
    own_settings = _settings_of(settings, password)
    return DebeziumReader(own_settings) if isinstance(own_settings, DebeziumSettings) else KafkaReader(own_settings)


@cache
def _ranges(settings: str, password: str) -> RangeReader:
    """Cached for the life of the worker process, which Spark reuses for the next batch."""
    own_settings = _settings_of(settings, password)
    decoded = (
        DebeziumDecoder(own_settings.placeholder) if isinstance(own_settings, DebeziumSettings) else decode_envelopes
    )
    return RangeReader(_cluster(settings, password), decoded, prefetch=True)
