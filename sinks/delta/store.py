"""One Delta table on disk or in an object store: open, create, evolve, read, commit with retries."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.schema import Schema

from cdc import backoff
from cdc.errors import Busy, SinkError, StoreRefused
from cdc.model import TableId
from sinks.delta.deletion_vectors.live_table import LiveTable
from sinks.delta.deletion_vectors.writer import VectorWriter
from sinks.delta.files.faults import sink_error
from sinks.delta.files.storage import storage_of
from sinks.delta.files.transaction_log import TransactionAwareTable, sync
from sinks.delta.fingerprint import GONE, compared, files_missing, mark_of, missing_files
from sinks.delta.schema.layout import VERSION, Evolution, TableLayout
from sinks.delta.write.merge import TRUNCATED, WRITER, fence
from sinks.delta.write.writer import scanned, scanned_pieces
from sinks.fingerprints import Difference, Mark

if TYPE_CHECKING:
    from sinks.delta.schema.layout import AnyField

T = TypeVar("T")

_SCHEMA = "millrace.schema"
_APPEND_ONLY = "delta.appendOnly"

ATTEMPTS = 6
"""Attempts of a commit that conflicts with another writer or an OPTIMIZE, before Busy is raised. Each reads the log
again, so six outlast any single maintenance commit."""
_FIRST_DELAY, _LONGEST_DELAY = 0.02, 0.64


class DeltaStore:
    """One table. Not for two threads at once; different tables may be used in parallel."""

    def __init__(self, table: TableId, uri: str, options: Mapping[str, str], sleep: Callable[[float], None]) -> None:
        self.table = table
        self.uri = uri
        self._options = dict(options) or None
        self._sleep = sleep
        self._handle: DeltaTable | None = None
        self._storage = storage_of(uri, options)
        self.vectors = VectorWriter(self._storage) if self._storage is not None else None

    @property
    def folder(self) -> Path | None:
        """The table's folder, if it is on this machine."""
        return None if "://" in self.uri else Path(self.uri)

    def exists(self) -> bool:
        """Whether the table exists."""
        return self.guarded(lambda: DeltaTable.is_deltatable(self.uri, self._options))

    def current(self) -> DeltaTable:
        """The table as of its newest commit."""
        if self._handle is not None:
            with suppress(DeltaError, OSError):  # newer commits may have been cleaned up: then open it again
                self._handle.update_incremental()
                return self._handle
        self._handle = self.guarded(self._open)
        return self._handle

    def _open(self) -> DeltaTable:
        if self._storage is None:
            return DeltaTable(self.uri, storage_options=self._options)
        return TransactionAwareTable(self._storage, self._options)

    def schema(self) -> pa.Schema:
        """The table's columns as Arrow types."""
        return arrow_schema(self.current())

    def create(self, layout: TableLayout) -> None:
        """Create the table. Another writer may create it at the same time: one of them wins."""
        with suppress(CommitFailedError):
            self.guarded(lambda: self._create(layout))
        self._handle = None
        if not self.exists():
            raise Busy(f"table {self.table}: Delta could not create it.", "It is tried again.")

    def _create(self, layout: TableLayout) -> None:
        DeltaTable.create(
            self.uri,
            Schema.from_arrow(layout.arrow),
            mode="ignore",
            name=str(self.table),
            storage_options=self._options,
            # with retries, the loser of a race would commit its metadata to the winner's table
            commit_properties=CommitProperties(max_commit_retries=0),
        )

    def evolve(self, evolution: Evolution) -> None:
        """Add columns in one commit; widen, rename and remove columns in another one, which rewrites the table."""
        if evolution.added:
            fields = Schema.from_arrow(pa.schema(evolution.added)).fields
            self.commit(lambda table: table.alter.add_columns(fields))
        if evolution.rewritten:
            self.commit(lambda table: self._rewrite(table, evolution.rewritten))

    def _rewrite(self, table: DeltaTable, changed: Mapping[str, "AnyField | None"]) -> None:
        old = [field for field in arrow_schema(table) if changed.get(field.name, field) is not None]
        new = pa.schema([(changed.get(field.name) or field).with_nullable(True) for field in old])
        batches = pa.RecordBatchReader.from_stream(table.scan(columns=[field.name for field in old]))
        rows = pa.RecordBatchReader.from_batches(new, (_cast(batch, new) for batch in batches))
        write_deltalake(table, rows, mode="overwrite", schema_mode="overwrite", commit_properties=fence(table))

    def check_usable(self, *, appends_only: bool) -> None:
        """Raise SinkError for a table of another program in which Millrace cannot replace rows."""
        metadata = self.current().metadata()
        if metadata.partition_columns:
            raise self._unusable(f"is partitioned by {', '.join(metadata.partition_columns)}")
        if metadata.configuration.get(_APPEND_ONLY) == "true" and not appends_only:
            raise self._unusable(f"takes no changes of its rows ({_APPEND_ONLY})")

    def _unusable(self, why: str) -> SinkError:
        return SinkError(
            f"table {self.table}: the Delta table at {self.uri} {why}.",
            "Move it away, and Millrace creates its own; or choose another `path`.",
        )

    def mark(self) -> Mark:
        """See sinks.fingerprints."""
        return self.guarded(lambda: mark_of(self.current(), self._storage))

    def compared(self, known: Mark, *, thorough: bool) -> Mark | Difference:
        """The table's current mark, or why it differs from what was written; `thorough` checks its files, too."""
        folder = self.folder
        try:
            if not self.exists():
                return GONE
            found = self.guarded(lambda: compared(known, self._storage, self.current))
            if not thorough or folder is None or isinstance(found, Difference):
                return found
            missing = self.guarded(lambda: missing_files(self.current(), folder))
        except SinkError as error:
            if error.transient:
                raise
            return Difference(f"it cannot be read: {error.message}", error.remedy)
        return files_missing(missing) if missing else found

    def empty(self) -> None:
        """Remove all rows and the recorded truncate, in one commit. Raises SinkError for a table of another program."""
        if VERSION not in self.schema().names:
            raise SinkError(
                f"table {self.table}: the Delta table at {self.uri} was not written by Millrace.", "Move it away."
            )
        self.check_usable(appends_only=False)
        self.commit(self._empty)

    def _empty(self, table: DeltaTable) -> None:
        lsn = table.transaction_version(WRITER) or 0
        own = CommitProperties(app_transactions=[Transaction(WRITER, lsn), Transaction(TRUNCATED, 0)])
        write_deltalake(table, arrow_schema(table).empty_table(), mode="overwrite", commit_properties=own)

    def recorded_schema(self) -> int:
        """The id of the newest schema that the table was changed to, where it is recorded."""
        return schema_of(self.current())

    def record_schema(self, number: int) -> None:
        """Record a schema id, unless a newer one is recorded."""
        if number > self.recorded_schema():
            self.commit(lambda table: self.set_properties(table, {_SCHEMA: str(number)}))

    def set_properties(self, table: DeltaTable, wanted: Mapping[str, str]) -> None:
        """Set properties of the table, in one commit. Raises CommitFailedError where another writer committed first."""
        if self.vectors is None or not self.vectors.live.set_properties(table, wanted):
            table.alter.set_table_properties(dict(wanted), raise_if_not_exists=False)

    def with_vectors(self, live: LiveTable) -> DeltaTable | None:
        """The table as of its newest commit with deletion vectors enabled; None if its log cannot be read here."""
        table = self.current()
        if not self.guarded(lambda: live.follow(table)):
            return None
        if not live.enabled:
            self.commit(lambda newest: live.enable(newest) if live.follow(newest) and not live.enabled else None)
            table = self.current()
        return table if self.guarded(lambda: live.follow(table)) and live.enabled else None

    def has_vector_files(self) -> bool:
        """Whether deletion vectors are, or may be, in files of their own: those of other programs are."""
        table, vectors = self.current(), self.vectors
        known = vectors is not None and self.guarded(lambda: vectors.live.follow(table))
        return not known or vectors is None or vectors.live.has_vector_files

    def read(self, layout: TableLayout, columns: list[str], where: str = "") -> pa.Table:
        """These columns of the rows that meet the condition, in the layout's types."""
        return self.guarded(lambda: scanned(self.current(), layout, columns, where))

    def pieces(self, layout: TableLayout, columns: list[str], where: str) -> Iterator[pa.Table]:
        """`read`, a few thousand rows at a time."""
        rows = self.guarded(lambda: scanned_pieces(self.current(), layout, columns, where))
        while (piece := self.guarded(lambda: next(rows, None))) is not None:
            yield piece

    def commit(self, action: Callable[[DeltaTable], T]) -> T:
        """Run an action that commits, on the newest version; again after a conflict.

        Raises Busy after ATTEMPTS conflicts, Lost when the table is gone, SinkError for what an operator must fix.
        """
        for failures in range(1, ATTEMPTS + 1):
            table = self.current()
            before = table.version()
            try:
                result = self.guarded(partial(action, table))
                self.guarded(partial(self._sync, table, before))
                return result
            except CommitFailedError:
                self._handle = None
                self._sleep(backoff.delay(failures, _FIRST_DELAY, _LONGEST_DELAY))
        raise Busy(f"table {self.table}: other writers of the Delta table committed first, {ATTEMPTS} times in a row.")

    def commit_at(self, version: int, action: Callable[[DeltaTable], None]) -> None:
        """Run an action that commits on exactly this version. Raises Busy if there is a newer one."""
        table = self.current()
        try:
            if table.version() != version:
                raise CommitFailedError
            self.guarded(partial(action, table))
        except CommitFailedError:
            self._handle = None
            raise Busy(f"table {self.table}: another writer of the Delta table committed first.", "", 0.0) from None
        if table.version() != version:
            self.guarded(partial(self._sync, table, version))

    def _sync(self, table: DeltaTable, before: int) -> None:
        if table.version() == before:
            self.guarded(table.update_incremental)  # Spark commits without this handle
        if self.folder is not None:
            sync(self.folder, before, table.version())

    def guarded(self, action: Callable[[], T]) -> T:
        """Turn Delta's errors into Millrace's; CommitFailedError passes through."""
        try:
            return action()
        except CommitFailedError:
            raise
        except (DeltaError, OSError) as error:
            self._handle = None
            found = sink_error(self.table, self._storage, self.uri, error)
            raise found from (None if isinstance(found, StoreRefused) else error)  # the text has the access key


def schema_of(table: DeltaTable) -> int:
    """The id of the newest schema that a table was changed to, where it is recorded."""
    return int(table.metadata().configuration.get(_SCHEMA, 0))


def arrow_schema(table: DeltaTable) -> pa.Schema:
    """The table's columns as Arrow types."""
    exported: Any = table.schema().to_arrow()
    return pa.schema(exported)


def _cast(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(
        [batch.column(number).cast(field.type) for number, field in enumerate(schema)], schema=schema
    )
