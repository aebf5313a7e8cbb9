"""The interfaces of a log, a sink and a clock. The docstrings of their methods are the contract."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NewType, Protocol, runtime_checkable

import pyarrow as pa

from cdc.errors import RejectedItem
from cdc.key_range import Removal
from cdc.model import Entry, Lsn, Progress, TableId, TableSchema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Offset = NewType("Offset", str)
"""A position in a log, opaque to other modules. Only the log that returned it can compare it or read from it."""
Share = NewType("Share", str)
"""A part of a micro-batch, opaque to other modules. All changes of a key in the batch are in one share."""


class Clock(Protocol):
    """A clock that tests can replace."""

    def now(self) -> datetime:
        """Wall time, UTC. For display and lag, never for order."""

    def monotonic(self) -> float:
        """Seconds that never decrease. For deadlines."""

    def wait(self, seconds: float) -> None:
        """Sleep for that long."""


class Schemas(Protocol):
    """The schema registry of a log."""

    def record(self, schema: TableSchema) -> TableSchema:
        """Store a schema if it differs from its table's newest one; returns it with its id. Durable on return."""

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        """The schema that a change was written with. Raises LogCorrupt if unknown."""

    def newest(self) -> Sequence[TableSchema]:
        """The newest schema of every table, ordered by name."""


class Spool(Protocol):
    """One transaction too large for memory, on disk until it is complete. Readers see nothing of it before `publish`.

    After LogFull the caller may repeat the call: earlier rows are kept.
    """

    def write(self, rows: pa.Table) -> None:
        """Write rows to disk; may block while the disk is slow."""

    def publish(self, end: Lsn) -> None:
        """Make all rows visible and durable in one step."""

    def discard(self) -> None:
        """Remove the rows. A crash has the same effect."""


class LogWriter(Protocol):
    """The only writer of a log. Append order is log order."""

    def progress(self) -> Progress:
        """The durable position and marks. After a crash capture resumes here; it is never ahead of the rows."""

    def append(self, entry: Entry) -> None:
        """Append an entry, all or nothing; durable and visible on return. Blocks while the log is slow (back-pressure).

        Ignores an entry whose `end` is not beyond `progress().end`, which was appended before, unless it has new marks
        (snapshot chunks share one LSN). Raises LogFull (nothing was written, try later) or LogFenced (stop).
        """

    def spool(self) -> Spool:
        """Begin a large transaction."""

    @property
    def schemas(self) -> Schemas:
        """The schema registry of this log."""

    @property
    def append_interval(self) -> float:
        """Minimum useful seconds between two appends, given the fixed cost of an append for writer and readers."""

    def maintain(self) -> None:
        """Merge and apply retention. Call it now and then; another thread may call `append` meanwhile.

        A crash during it is harmless. Never removes changes that a registered consumer has not read.
        """

    def close(self) -> None:
        """Release locks and connections. A crash without this call must be harmless."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Whole transactions: rows in log order, the offset after them, and the LSN up to which they are complete."""

    offset: Offset
    end: Lsn
    rows: pa.Table


@dataclass(frozen=True, slots=True)
class Consumer:
    """A registered reader. Retention never removes changes that it has not read."""

    name: str
    offset: Offset
    reached: Lsn
    at: datetime
    order: int
    """The order of the offset: of two consumers of a log, the one with the smaller number has read less."""


@dataclass(frozen=True, slots=True)
class Lag:
    """How far a consumer is behind the head: bytes of WAL, entries of the log, and age of the oldest unread change."""

    consumer: str
    bytes: int
    entries: int
    seconds: float


class LogReader(Protocol):
    """Reads a log. Any number of readers, in any process, while the writer writes."""

    def start(self) -> Offset:
        """The offset before the oldest retained entry."""

    def removed(self) -> Lsn:
        """The LSN up to which retention has removed changes; 0 while the log is complete.

        The trap: a reader that begins at `start` does not see rows that have not changed since this LSN.
        """

    def head(self) -> tuple[Offset, Lsn]:
        """The offset after the newest visible entry, and the LSN up to which the log is complete there."""

    def marks(self) -> Mapping[str, str]:
        """The marks that are durable now. The trap: they may be newer than what this reader has read."""

    def seek(self, point: Lsn | datetime) -> Offset:
        """An offset before every transaction that ends after that LSN, or that committed at or after that time."""

    def read(self, after: Offset, until: Offset | None = None) -> Iterator[Slice]:
        """Slices after an offset, in order, without a JVM. Ends at the head as of the call."""

    def frame(self, spark: "SparkSession", after: Offset | None = None, limit: int = 0) -> "DataFrame":
        """A streaming DataFrame of LOG_SCHEMA. Each micro-batch ends with a PROGRESS_TABLE row.

        `limit` is the approximate number of changes per micro-batch (0: the log's default); entries are never split.
        `after` is used only if the query has no checkpoint yet. The trap: the rows of one transaction are in one
        micro-batch only if they are in one of the log's slices.
        """

    def packed(
        self, spark: "SparkSession", after: Offset | None, limit: int, columns: Sequence[str], tables: Sequence[TableId]
    ) -> "DataFrame":
        """The micro-batches of `frame`, reduced to some columns and tables (none: all), for `unpacked` only.

        They pass through Spark as a few binary blocks, for a driver that needs the rows themselves.
        """

    def unpacked(self, batch: "DataFrame") -> "pa.Table | DataFrame":
        """The rows of a packed micro-batch; a DataFrame of LOG_SCHEMA if they are too large for the driver."""

    def planned(self, spark: "SparkSession", after: Offset | None, limit: int) -> "DataFrame":
        """The micro-batches of `frame` as plans: one row of `cdc.log.shares.PLANNED` per share, for as many
        tasks as Spark runs in parallel, and without the changes themselves: each task calls `read_share`."""

    def read_share(self, share: Share) -> Iterator[pa.Table]:
        """The changes of a share, in any process that can reach the log, in pieces of bounded size. Changes of one key
        are in the order of the log."""

    @property
    def poll_seconds(self) -> float:
        """How often a reader that waits for the next entry should look at `head`, given what that costs."""

    def consumers(self) -> Sequence[Consumer]:
        """Every registered consumer."""

    def lags(self) -> Sequence[Lag]:
        """How far each registered consumer is behind."""

    def commit(self, consumer: str, reached: Lsn, offset: Offset | None = None) -> None:
        """Record that a consumer has applied everything up to an offset, and so up to that LSN; registers it.

        Never moves back. The trap: entries may share an LSN (those of a snapshot do), so without the offset only the
        first entry that ends there counts as read.
        """

    def forget(self, consumer: str) -> None:
        """Unregister a consumer: retention no longer keeps changes for it."""

    @property
    def schemas(self) -> Schemas:
        """The schema registry of this log."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The folded changes of one table: at most one row per key, columns of `sinks.fold.spark.FOLDED`.

    `truncated` is the version of the newest truncate in the batch (0: none). The sink removes every stored row with a
    smaller version, and every stored row that one of `removed` takes, before it applies the rows of the batch; the
    batch no longer contains rows that `removed` takes.
    """

    schema: TableSchema
    rows: pa.Table
    truncated: int = 0
    removed: tuple[Removal, ...] = ()


@dataclass(frozen=True, slots=True)
class Staged:
    """What one task wrote for a later commit: opaque bytes for `commit_staged`, and the rows that the store rejects."""

    content: bytes
    rejected: Sequence[RejectedItem] = ()


class Sink(Protocol):
    """A store that replicates the source.

    `apply` may be called again with the same or older rows at any time: after a crash, in a replay, from a backfill.
    Not called from two threads at once.
    """

    @property
    def name(self) -> str:
        """The configured name; unique in the pipeline."""

    def prepare(self, schema: TableSchema) -> None:
        """Create or evolve a table. Called before its first batch and at each new schema."""

    def apply(self, batch: Batch) -> None:
        """On return the stored version of every key is at least the given one; older rows are ignored.

        Partial rows (non-empty `unchanged`) keep the stored values of those columns. If the stored row is gone, the
        sink rejects the key with reason `stored row missing` instead of writing an incomplete row. Raises Busy, Lost or
        Rejected; after Busy and Lost any part may have been applied.
        """

    def stored(self, schema: TableSchema) -> pa.Table:
        """Every row of the store, ordered by key. All in memory: see StoredPieces for large tables."""

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        """The rows that `stored` would return if the store had these images (columns key, after), in the same order.

        `verify` calls it for one block of a table at a time.
        """

    def close(self) -> None:
        """Close connections."""


@runtime_checkable
class StoredPieces(Protocol):
    """A sink whose tables can be compared without loading them into memory."""

    def stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> "Iterator[pa.Table]":
        """The rows of `stored` in pieces of bounded size and in any order; a row may occur twice.

        `keys` are texts of `row_comparison.key_texts`: a store that can look up single rows returns only those, each
        once; others may return more. Called while the pipeline runs, and while another thread calls `expected`.
        """


@runtime_checkable
class ShapesTables(Protocol):
    """A sink whose tables have other columns than the source's: `stored` and `expected` give rows of these."""

    def stored_schema(self, schema: TableSchema) -> TableSchema:
        """The store's columns for a schema of the source."""


@runtime_checkable
class StagingSink(Protocol):
    """A sink whose rows are written by several tasks at once, invisible until one commit of the driver."""

    def plan(self, schema: TableSchema) -> bytes:
        """In the driver, after `prepare`: what the tasks need to know of the table (its version, its files).

        Empty if tasks cannot write for this table, or not this time: then `apply` writes its rows, in one place.
        """

    def stage(self, batch: Batch, plan: bytes, part: str = "") -> Staged:
        """In a task: write the batch's files without making them visible. Batches of different tasks have different
        keys. `batch` has neither truncates nor removed ranges.

        Running twice changes nothing: files that no commit names are removed by maintenance later. `part` names the
        task's part of the key space, the same in every batch whose tasks are split in the same way ("3 of 16"): a task
        merges small files of its own part. Not called from two threads at once.
        """

    def commit_staged(self, schema: TableSchema, plan: bytes, staged: Sequence[bytes]) -> None:
        """In the driver: make everything staged visible in one commit.

        Raises Busy if the table has changed since `plan` so that it must be planned and staged again.
        """
