"""The seams: what a log, a sink and a clock promise. Read a method's docstring for its trap."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NewType, Protocol, runtime_checkable

import pyarrow as pa

from cdc.key_range import Removal
from cdc.model import Entry, Lsn, Progress, TableId, TableSchema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Offset = NewType("Offset", str)
"""A log's own place, opaque to everybody else. Only the log that gave it can compare or read from it."""


class Clock(Protocol):
    """Time from outside, so that what decides can be tested without waiting."""

    def now(self) -> datetime:
        """Wall time, UTC. For showing and for lag; never for order."""

    def monotonic(self) -> float:
        """Seconds that never go back. For deadlines."""

    def wait(self, seconds: float) -> None:
        """Give way for that long."""


class Schemas(Protocol):
    """The registry of table schemas, kept with the log."""

    def record(self, schema: TableSchema) -> TableSchema:
        """Store it if it differs from the newest one of its table; returns it with its id. Durable on return."""

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        """The schema that a change was written with. Raises LogCorrupt if unknown."""

    def newest(self) -> Sequence[TableSchema]:
        """The newest schema of every table, by name."""


class Spool(Protocol):
    """One transaction too large for memory, on its way. Nobody sees any of it before `publish`.

    After LogFull the same call may be made again: what was set aside before stays.
    """

    def write(self, rows: pa.Table) -> None:
        """Set rows aside on disk; may block while the disk is slow."""

    def publish(self, end: Lsn) -> None:
        """Make all of it visible and durable in one instant."""

    def discard(self) -> None:
        """Forget it. Also what a crash does."""


class LogWriter(Protocol):
    """The one writer of a log. Append order is log order."""

    def progress(self) -> Progress:
        """What is durable. After a crash this decides where reading goes on; it never runs ahead of the rows."""

    def append(self, entry: Entry) -> None:
        """Durable and visible on return, all or nothing. Blocks while the log is slow: that is back-pressure.

        An entry whose `end` is not beyond `progress().end` has been appended before and is ignored, unless it
        carries new marks (snapshot chunks share one LSN).
        Raises LogFull (nothing was written, try later) or LogFenced (stop).
        """

    def spool(self) -> Spool:
        """Begin a large transaction."""

    @property
    def schemas(self) -> Schemas:
        """The registry kept with this log."""

    @property
    def pace(self) -> float:
        """Least seconds between two appends that pays: what an append costs beyond its rows, for writer and readers."""

    def maintain(self) -> None:
        """Merge, retain: what keeps the log cheap for ever. Call now and then, also beside `append` in another thread.

        A crash in the middle of it is harmless. Never removes what a registered consumer has not read.
        """

    def close(self) -> None:
        """Let go of locks. May never be called: a crash must be as good."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Whole transactions read back: rows in log order, where they end, and up to which LSN they are complete."""

    offset: Offset
    end: Lsn
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class Consumer:
    """A registered reader. Retention never removes what it has not read."""

    name: str
    offset: Offset
    reached: Lsn
    at: datetime
    order: int
    """Where the offset lies: of two readers of a log, the one with the smaller number has read less."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a registered reader is behind the head: in bytes of WAL, entries of the log, and age of what waits."""

    consumer: str
    bytes: int
    entries: int
    seconds: float


class LogReader(Protocol):
    """Any number of readers, in any process, while the writer writes."""

    def start(self) -> Offset:
        """Before the oldest entry that is kept."""

    def removed(self) -> Lsn:
        """The LSN up to which retention has removed changes; 0 while the log still has its beginning.

        A reader that begins at `start` never sees a row that has not changed since.
        """

    def head(self) -> tuple[Offset, Lsn]:
        """After the newest visible entry, and the LSN it brings a reader to."""

    def seek(self, point: Lsn | datetime) -> Offset:
        """The offset after which every transaction ending beyond that LSN, or committed at or after that time, lies."""

    def read(self, after: Offset, until: Offset | None = None) -> Iterator[Slice]:
        """Slices after an offset, in order, without a JVM. Ends at the head that it met at the start."""

    def frame(self, spark: "SparkSession", after: Offset | None = None, limit: int = 0) -> "DataFrame":
        """A streaming DataFrame of LOG_SCHEMA. Each micro-batch ends with a PROGRESS_TABLE marker row.

        `limit` is about how many changes a micro-batch may hold (0: the log's own default); entries are never cut.
        `after` counts only when the query has no checkpoint yet. The trap: rows of one transaction stay in one
        micro-batch only as long as the log's slices do.
        """

    def packed(
        self, spark: "SparkSession", after: Offset | None, limit: int, columns: Sequence[str], tables: Sequence[TableId]
    ) -> "DataFrame":
        """The micro-batches of `frame`, of some columns and tables (none: all), for `unpacked` only.

        They pass Spark unopened, as a few blobs of Arrow: for whoever wants the rows themselves in the driver.
        """

    def unpacked(self, batch: "DataFrame") -> "pa.Table | DataFrame":
        """The rows of a packed micro-batch; a DataFrame of LOG_SCHEMA where they are too many to hold."""

    def consumers(self) -> Sequence[Consumer]:
        """Every registered reader."""

    def lags(self) -> Sequence[Lag]:
        """How far each registered reader is behind."""

    def commit(self, consumer: str, reached: Lsn, offset: Offset | None = None) -> None:
        """Record that a reader has applied everything up to an offset, which brings it to that LSN; registers it.

        Never goes back. The trap: entries may share an LSN (those of a snapshot do), so without the offset only the
        first of those that end there is taken as read.
        """

    def forget(self, consumer: str) -> None:
        """Release what retention keeps for this reader."""

    @property
    def schemas(self) -> Schemas:
        """The registry kept with this log."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The folded changes of one table: at most one row per key, columns of `sinks.fold.spark.FOLDED`.

    `truncated` is the version of the newest truncate in the batch (0: none): every stored row with a smaller
    version goes, before the rows of the batch are applied. So goes every stored row that one of `removed` takes; rows
    of the batch that they take are not in it any more.
    """

    schema: TableSchema
    rows: pa.Table
    truncated: int = 0
    removed: tuple[Removal, ...] = ()


class Sink(Protocol):
    """A store that is kept equal to the source.

    `apply` may be called again with the same or older rows at any time: after a crash, in a replay, from a
    backfill. One thread calls at a time per sink.
    """

    @property
    def name(self) -> str:
        """As configured; unique in the pipeline."""

    def prepare(self, schema: TableSchema) -> None:
        """Make room for a table: create or evolve it. Called before its first batch and at each new schema."""

    def apply(self, batch: Batch) -> None:
        """On return every key's stored version is at least the given one; older rows were ignored.

        Partial rows (non-empty `unchanged`) keep the stored values of those columns; where the stored row is
        gone, the key is reported as rejected with reason `stored row missing` instead of being written half.
        Raises Busy, Lost or Rejected; after Busy and Lost any part may have been applied.
        """

    def stored(self, schema: TableSchema) -> pa.Table:
        """Every live row as the store holds it, ordered by key. Whole in memory: see StoredPieces for large tables."""

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        """The rows that `stored` would give if the store held these images (columns key, after), ordered alike.

        `verify` calls it for one block of a table at a time.
        """

    def close(self) -> None:
        """Let go of connections."""


@runtime_checkable
class StoredPieces(Protocol):
    """A sink whose tables need not fit into memory to be compared."""

    def stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> "Iterator[pa.Table]":
        """The rows of `stored` in pieces of bounded size and in any order; a row may come twice.

        `keys` are texts of `row_comparison.key_texts`: a store that can be asked for single rows gives only those,
        each once; others may give more. Called beside a running pipeline, and `expected` in another thread meanwhile.
        """
