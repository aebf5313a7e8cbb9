"""The format `millrace`: one table's changes, built on the Spark source of the log that the pipeline file names.

The log's own source plans and reads (`LogStream`); here its changes become rows. Planning runs in Python processes
beside the driver, which open the pipeline file; tasks get neither that file nor the credentials of source and sinks.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from os import cpu_count

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

import cdc.log
from cdc.config.pipeline_file import load
from cdc.config.settings import Settings
from cdc.errors import ChangeRefused, ChangesRemoved, ConfigError
from cdc.log.batch_size import USUAL_CHANGES
from cdc.log.spark.source import LogStream, SparkOffset
from cdc.log.spark_reader import SparkReader
from cdc.model import TableSchema
from cdc.ports import Offset
from pyspark_millrace import positions
from pyspark_millrace.columns import TableColumns, table_columns
from pyspark_millrace.options import ReadOptions, SchemaChanges, parse, require_batch, require_streamed
from pyspark_millrace.positions import CommitRange
from pyspark_millrace.rows import RowReader
from sinks import registry

FORMAT = "millrace"
_SHOWN = 60
"""Characters of an offset in a message: that of a Kafka log names every topic."""
_LISTED = 20


class MillraceSource(DataSource):
    """Spark's entry point. Spark creates it, asks for its schema, and then carries it to the processes that plan."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)
        self._asked = parse(options)
        self._columns: TableColumns | None = None

    @classmethod
    def name(cls) -> str:
        """The name for `format()`."""
        return FORMAT

    def schema(self) -> StructType:
        """The table's columns as of now; they stay those of the query until it starts again."""
        self._columns = table_columns(_newest_schema(_opened(self._asked), self._asked), self._asked.columns)
        return self._columns.spark

    def reader(self, schema: StructType) -> "ChangeBatch":
        """Everything between two points of the log."""
        require_batch(self.options)
        return ChangeBatch(self._planner())

    def streamReader(self, schema: StructType) -> "ChangeStream":  # noqa: N802 -- Spark's name
        """Everything from a point of the log on."""
        require_streamed(self.options)
        return ChangeStream(self._planner())

    def _planner(self) -> "_Planner":
        if self._columns is None:
            raise ConfigError(
                f"The columns of {self._asked.table} come from the log, not from the method schema().",
                "Leave schema() out, and choose columns with the option 'columns'.",
            )
        return _Planner(self._asked, self._columns)


class _Share(InputPartition):
    """What one task reads: a partition of the log's own source, and how to turn it into rows."""

    def __init__(self, inner: InputPartition, commits: CommitRange, start: str) -> None:
        super().__init__(None)
        self.inner = inner
        self.commits = commits
        self.start = start


class _Planner:
    """Plans the tasks of a read and runs one: shared by stream and batch. Pickled without the open log."""

    def __init__(self, asked: ReadOptions, columns: TableColumns) -> None:
        self.asked = asked
        self._columns = columns
        self._rows = RowReader(columns, asked.rules)

    @cached_property
    def log(self) -> SparkReader:
        """The log, opened once in each process that plans; never in a task."""
        return _opened(self.asked)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "log"}

    def stream(self, after: Offset) -> LogStream:
        """The log's own stream of the table, which begins there."""
        tasks = self.asked.partitions or cpu_count() or 1
        return self.log.source().stream(after, self.asked.limit, tasks, self.asked.table)

    def shares(
        self, stream: LogStream, start: SparkOffset, end: SparkOffset, commits: CommitRange
    ) -> list[InputPartition]:
        """The tasks between two offsets."""
        self._require_same_columns()
        shown = stream.position(start)[:_SHOWN]
        with self._naming(shown):
            return [_Share(part, commits, shown) for part in stream.partitions(start, end)]

    def _require_same_columns(self) -> None:
        """A schema is in the registry before its first row is in the log: if the newest is known once the end of a
        batch is, no row of the batch has a later one."""
        if self.asked.schema_changes is SchemaChanges.IGNORE:
            return
        if what := self._columns.change_in(_newest_schema(self.log, self.asked)):
            raise ChangeRefused(
                f"Table {self.asked.table} has changed since the query started: {what}.",
                "Start the query again: it goes on from its checkpoint with the new columns. Or set the option"
                " 'schemaChanges' to ignore.",
            )

    def read(self, stream: LogStream, share: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task. Runs in a Spark worker."""
        if not isinstance(share, _Share):  # Spark's own, for a read without tasks
            return
        with self._naming(share.start):
            for changes in stream.read(share.inner):
                mine = share.commits.rows_of(_of_table(changes, str(self.asked.table)))
                if mine.num_rows:
                    yield self._rows.rows(mine)

    @contextmanager
    def _naming(self, start: str) -> Iterator[None]:
        """Name table and offset where retention removed what is to be read."""
        try:
            yield
        except ChangesRemoved as error:
            raise ChangesRemoved(
                f"Table {self.asked.table} cannot be read from offset {start} of the log. {error.message}",
                "Begin again without the checkpoint and what was written with it: from = start reads what is left, and"
                " `millrace backfill` writes every row into the log again. To keep changes until they are read, give"
                " the option 'consumer', or raise log.retention_hours.",
            ) from None


class ChangeBatch(DataSourceReader):
    """The changes between two points, planned when Spark plans the query."""

    def __init__(self, planner: _Planner) -> None:
        self._planner = planner
        self._stream = planner.stream(planner.log.start())

    def partitions(self) -> Sequence[InputPartition]:
        """The tasks: those of one batch of a stream after another, so that each reads a bounded part of the log."""
        log, asked = self._planner.log, self._planner.asked
        first, commits = positions.begin(log, asked.begin)
        commits = positions.until(log, asked.until, commits)
        stream = self._planner.stream(first)
        stream.prepareForTriggerAvailableNow()
        start, found = stream.initialOffset(), list[InputPartition]()
        while (end := stream.latestOffset(start, ReadMaxRows(_usual(asked)))) != start:
            found += self._planner.shares(stream, start, end, commits)
            if log.reached(stream.position(end)) >= commits.until_lsn:
                break
            start = end
        return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return self._planner.read(self._stream, partition)


class ChangeStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Micro-batches of whole transactions. The position is kept in Spark's checkpoint; a consumer is a copy of it."""

    def __init__(self, planner: _Planner) -> None:
        self._planner = planner
        self._stream = planner.stream(planner.log.start())

    def initialOffset(self) -> SparkOffset:  # noqa: N802 -- Spark's name
        """Where a query without a checkpoint begins. From here on retention waits for the consumer."""
        offset, commits = positions.begin(self._planner.log, self._planner.asked.begin)
        self._hold(offset)
        return {**self._planner.stream(offset).initialOffset(), **commits.encoded()}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 -- Spark's name
        """About this many changes of the log per batch, of all tables."""
        return ReadMaxRows(_usual(self._planner.asked))

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 -- Spark's name
        """Remember where the log ends now."""
        self._stream.prepareForTriggerAvailableNow()

    def latestOffset(self, start: SparkOffset, limit: ReadLimit) -> SparkOffset:  # noqa: N802 -- Spark's name
        """The end of the next batch."""
        return {**self._stream.latestOffset(start, limit), **CommitRange.decoded(start).encoded()}

    def reportLatestOffset(self) -> SparkOffset:  # noqa: N802 -- Spark's name
        """The end of the log, for the query's status."""
        return self._stream.reportLatestOffset()

    def partitions(self, start: SparkOffset, end: SparkOffset) -> Sequence[InputPartition]:
        """The tasks of one batch."""
        return self._planner.shares(self._stream, start, end, CommitRange.decoded(start))

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of one task."""
        return self._planner.read(self._stream, partition)

    def commit(self, end: SparkOffset) -> None:
        """Spark has written everything up to there: retention may remove it."""
        self._hold(self._stream.position(end))

    def _hold(self, offset: Offset) -> None:
        if self._planner.asked.consumer:
            log = self._planner.log
            log.commit(self._planner.asked.consumer, log.reached(offset), offset)


def _usual(asked: ReadOptions) -> int:
    return asked.limit or USUAL_CHANGES


def _of_table(changes: pa.RecordBatch, table: str) -> pa.RecordBatch:
    """Without progress rows, which pass every filter of the log."""
    return changes.filter(pc.equal(changes.column("table"), pa.scalar(table)))


def _opened(asked: ReadOptions) -> SparkReader:
    settings = load(asked.pipeline, cdc.log.settings_kinds(), registry.settings_kinds())
    _require_free(asked.consumer, settings)
    reader = cdc.log.open_reader(settings)
    if not isinstance(reader, SparkReader):
        raise ConfigError(
            f"{asked.pipeline}: Spark cannot read a log of kind {settings.log.kind}.", "See docs/spark-reader.md."
        )
    return reader


def _require_free(consumer: str, settings: Settings) -> None:
    """The positions of sinks are in the same list: theirs must not be moved by somebody else."""
    taken = [sink.name for sink in settings.sinks if f"{consumer}.".startswith(f"{sink.name}.")]
    if taken:
        raise ConfigError(
            f"Option 'consumer': {consumer!r} is the name of a position of sink {taken[0]!r}.", "Choose another name."
        )


def _newest_schema(log: SparkReader, asked: ReadOptions) -> TableSchema:
    schemas = log.schemas.newest()
    found = next((schema for schema in schemas if schema.table == asked.table), None)
    if found is None:
        known = ", ".join(str(schema.table) for schema in schemas[:_LISTED]) or "none"
        raise ConfigError(
            f"Table {asked.table} is not in the log of {asked.pipeline}.",
            f"Its tables: {known}. A table is in the log once capture has started with it in source.tables.",
        )
    return found
