"""The Delta sink: one Delta table per source table.

Promise beyond `Sink`: `apply` may be called by several threads at once for different tables.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pyarrow as pa
from deltalake import DeltaTable

from cdc.errors import Rejected, SinkError
from cdc.failpoint import reached
from cdc.key_range import Removal
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Batch, Staged
from sinks.context import SinkContext
from sinks.delta.changelog import newest, write_changelog
from sinks.delta.files.storage import clear_staging
from sinks.delta.history import write_history
from sinks.delta.maintenance import MaintenancePolicy, MaintenanceResult, maintain
from sinks.delta.maintenance_schedule import MaintenanceSchedule
from sinks.delta.rows.changes import TypedChanges, changes, expected, named_as_source, sorted_by
from sinks.delta.rows.range_deletes import deletes
from sinks.delta.schema.keys import check_keys, refuse_null_keys
from sinks.delta.schema.layout import (
    DELETED,
    Evolution,
    LayoutOptions,
    TableLayout,
    evolve,
    folder,
    known_columns,
    new_layout,
)
from sinks.delta.schema.soft_deletes import DeleteCondition
from sinks.delta.settings import DeltaSettings
from sinks.delta.staging.commit import commit
from sinks.delta.staging.plan import StagingPlan, plan_of
from sinks.delta.staging.stage import StagedFiles, Task
from sinks.delta.store import DeltaStore, arrow_schema
from sinks.delta.stored_key import read_key
from sinks.delta.write.spark_merge import merge_by_spark
from sinks.delta.write.writer import MergeBySpark, WriteOptions, write
from sinks.fingerprints import Difference, Mark
from sinks.rows.stored_key import StoredKey

_THOROUGH_SECONDS = 60.0
"""How often a table's files are checked to exist, and tables in an object store are compared."""
_NO_IMAGES = pa.table({"key": pa.array([], pa.string()), "after": pa.array([], pa.string())})


def open_sink(settings: DeltaSettings, context: SinkContext) -> "DeltaSink":
    """Connects to nothing and creates nothing: `prepare` does."""
    return DeltaSink(settings, context)


class DeltaSink:
    """See `Sink`."""

    def __init__(self, settings: DeltaSettings, context: SinkContext) -> None:
        self._settings = settings
        self._context = context
        self._stores: dict[TableId, DeltaStore] = {}
        self._layouts: dict[TableId, tuple[TableSchema, TableLayout]] = {}
        self._maintenance = MaintenanceSchedule(settings.maintain_minutes * 60, self.maintain)
        self._thorough_at = 0.0

    @property
    def name(self) -> str:
        """The configured name."""
        return self._settings.name

    def prepare(self, schema: TableSchema) -> None:
        """Create the table, or change its columns to the schema as the settings say."""
        check_keys(schema, self._settings.keys.get(schema.table))
        store, options = self.store(schema.table), self._layout_options(schema.table)
        if not store.exists():
            self._make_root()
            store.create(new_layout(schema, options))
        store.check_usable(appends_only=self._settings.append_only)
        if self._settings.engine == "spark" and self._settings.deletion_vectors and store.vectors is not None:
            store.with_vectors(store.vectors.live)  # Spark writes them only where they are enabled
        evolution = self._evolution(schema, store)
        store.evolve(evolution)
        if options.dropped == "remove":
            store.record_schema(schema.id)
        self._layouts[schema.table] = (schema, evolution.layout)

    def apply(self, batch: Batch) -> None:
        """Write the batch, usually in one commit. Rejects rows with values that do not fit, and orphans."""
        store = self.store(batch.schema.table)
        given = changes(batch, self._layout(batch.schema))
        refuse_null_keys(given)
        for removal in batch.removed:
            self._remove(store, given.layout, removal)
        reached("delta.before_commit")
        written = store.commit(lambda table: self._write(store, table, given))
        reached("delta.after_commit")
        self._maintenance.written(batch.schema)
        if written.rejected:
            raise Rejected(written.rejected)

    def _remove(self, store: DeltaStore, layout: TableLayout, removal: Removal) -> None:
        """In commits of their own, before the batch's: a crash in between repeats them, which changes nothing."""
        for gone in deletes(store.current(), layout, removal):
            store.commit(partial(self._write, store, given=gone))

    def plan(self, schema: TableSchema) -> bytes:
        """See cdc.ports.StagingSink. Empty where only `apply` writes: for history (type 2) and changelogs, without
        deletion vectors, for keys without file statistics, in stores where a commit could replace another one, and when
        small files have to be merged; and with `engine: spark`."""
        if not self.plain or not self._settings.deletion_vectors or self._settings.engine == "spark":
            return b""
        found = plan_of(self.store(schema.table), self._layout(schema))
        return found.encoded() if found is not None else b""

    def stage(self, batch: Batch, plan: bytes, part: str = "") -> Staged:
        """See cdc.ports.StagingSink. Reads nothing of the table's log: the plan has it."""
        store, planned = self.store(batch.schema.table), StagingPlan.decoded(plan)
        if store.vectors is None:
            raise SinkError(f"table {batch.schema.table}: tasks cannot write it here.", "Use the same settings there.")
        given = changes(batch, self._evolved(batch.schema, planned.stored, planned.schema_id).layout)
        refuse_null_keys(given)
        task = Task(store.vectors.live.storage, planned, store.vectors.keys, part)
        staged, rest = store.guarded(lambda: task.stage(given))
        return Staged(staged.encoded(), rest.rejected)

    def commit_staged(self, schema: TableSchema, plan: bytes, staged: Sequence[bytes]) -> None:
        """See cdc.ports.StagingSink."""
        files = [StagedFiles.decoded(content) for content in staged]
        reached("delta.before_commit")
        commit(self.store(schema.table), StagingPlan.decoded(plan), files)
        reached("delta.after_commit")
        self._maintenance.written(schema)

    def stored(self, schema: TableSchema) -> pa.Table:
        """Live rows under the source's column names, in key order; types of sinks.delta.schema.types."""
        pieces = [self.expected(schema, _NO_IMAGES), *self.stored_pieces(schema)]
        rows = pa.concat_tables(pieces).combine_chunks()
        return sorted_by(rows, [column.name for column in schema.key]) if rows.num_rows else rows

    def stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """See cdc.ports.StoredPieces. A changelog is one piece: the newest change of a key can be in any file."""
        layout, store = self._layout(schema), self.store(schema.table)
        if not store.exists():
            return  # not created yet
        if layout.changelog:
            yield named_as_source(schema, layout, store.guarded(lambda: newest(store.current(), layout)))
            return
        for piece in store.pieces(layout, [one.name for one in layout.placed], f"NOT {DELETED}"):
            yield named_as_source(schema, layout, piece)

    def stored_key(self, schema: TableSchema, key: str) -> StoredKey:
        """See sinks.rows.stored_key.KeyReader."""
        return read_key(self._new_store(schema.table), self._layout(schema), schema, key)

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        """What `stored` should give. A value that does not fit its column is null: its rejected row then differs."""
        return expected(schema, self._layout(schema), images)

    def mark_table(self, schema: TableSchema) -> Mark:
        """See sinks.fingerprints.Fingerprinted."""
        return self._new_store(schema.table).mark()

    def compare_marks(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        """See sinks.fingerprints.Fingerprinted. Uses its own handles; looks at object stores once a minute."""
        thorough = time.monotonic() >= self._thorough_at
        if thorough:
            self._thorough_at = time.monotonic() + _THOROUGH_SECONDS
        stores = {table: self._new_store(table) for table in known}
        chosen = {table: store for table, store in stores.items() if thorough or store.folder is not None}
        return {table: store.compared(known[table], thorough=thorough) for table, store in chosen.items()}

    def recreate(self, schema: TableSchema) -> None:
        """See sinks.fingerprints.Fingerprinted. Empties the table by a commit; its old versions stay."""
        self._stores.pop(schema.table, None)
        self._layouts.pop(schema.table, None)
        store = self._new_store(schema.table)
        if store.exists():
            store.empty()

    def maintain(self, schema: TableSchema) -> MaintenanceResult:
        """One round of maintenance, on a handle of its own: may run during `apply`, in any thread or process."""
        store = self._new_store(schema.table)
        tombstones = timedelta(hours=self._settings.keep_tombstones_hours)
        history = timedelta(hours=self._settings.keep_history_hours)
        policy = MaintenancePolicy(tombstones, history, vector_files=store.has_vector_files())
        layout = self._evolution(schema, store).layout
        if store.folder is not None:
            clear_staging(store.folder)
        now = datetime.now(UTC)
        return store.guarded(lambda: maintain(store.current(), layout, policy, now, store.set_properties))

    @property
    def threads(self) -> int:
        """Tables written in parallel: a commit waits for the disk most of the time."""
        return 4

    @property
    def plain(self) -> bool:
        """Whether tables have current rows (type 1), not history or changes."""
        return self._settings.stored_as_scd_type == 1 and not self._settings.append_only

    def pinned(self, table: TableId) -> DeltaTable | None:
        """The current version of the Delta table, on a handle of its own; None if it does not exist yet."""
        store = self._new_store(table)
        return store.current() if store.exists() else None

    def layout_in(self, table: DeltaTable | None, schema: TableSchema) -> Evolution:
        """The layout of a schema in a version of its Delta table, and what the table needs for it."""
        options = self._layout_options(schema.table)
        return evolve(schema, arrow_schema(table), options) if table else Evolution(new_layout(schema, options))

    def facts(self) -> dict[str, str]:
        """See sinks.apply.store_connection.Described."""
        kind = f"type {self._settings.stored_as_scd_type}"
        return {"path": self._settings.path, "stored as": kind, "current rows": f"NOT {DELETED}"}

    def close(self) -> None:
        """Wait for a round of maintenance; nothing else is open."""
        self._maintenance.finish(10.0)
        self._stores.clear()
        self._layouts.clear()

    def store(self, table: TableId) -> DeltaStore:
        """The Delta table of a source table; it may not exist yet."""
        if table not in self._stores:
            self._stores[table] = self._new_store(table)
        return self._stores[table]

    def _new_store(self, table: TableId) -> DeltaStore:
        uri = f"{self._settings.path.rstrip('/')}/{self._settings.target(table) or folder(table)}"
        options = {name: secret.reveal() for name, secret in self._settings.storage_options.items()}
        return DeltaStore(table, uri, options, self._context.wait)

    def _by_spark(self, store: DeltaStore) -> MergeBySpark | None:
        """Spark's MERGE, for tables on a local disk only: in an object store, Spark and `deltalake` prevent conflicting
        commits each in its own way, and neither sees the other's."""
        session = self._context.spark
        if session is None or store.folder is None or self._settings.engine == "native":
            return None
        return lambda table, given: merge_by_spark(session(), table, given)

    def _layout(self, schema: TableSchema) -> TableLayout:
        known = self._layouts.get(schema.table)
        if known is not None and known[0] == schema:
            return known[1]
        store = self.store(schema.table)
        if not store.exists():
            return new_layout(schema, self._layout_options(schema.table))
        layout = self._evolution(schema, store).layout
        self._layouts[schema.table] = (schema, layout)
        return layout

    def _evolution(self, schema: TableSchema, store: DeltaStore) -> Evolution:
        recorded = store.recorded_schema() if self._settings.dropped_columns == "remove" else 0
        return self._evolved(schema, store.schema(), recorded)

    def _evolved(self, schema: TableSchema, stored: pa.Schema, recorded: int) -> Evolution:
        options = self._layout_options(schema.table)
        if options.dropped == "remove" and schema.id < recorded:
            older = known_columns(schema, stored, options)  # a replay must not bring removed columns back
            return evolve(older, stored, replace(options, dropped="keep"))
        return evolve(schema, stored, options)

    def _layout_options(self, table: TableId) -> LayoutOptions:
        settings = self._settings
        condition = settings.apply_as_deletes.get(table)
        return LayoutOptions(
            as_text=frozenset(settings.as_text.get(table, ())),
            type_change=settings.type_change,
            scd_type=settings.stored_as_scd_type,
            sequence_by=settings.sequence_by,
            append_only=settings.append_only,
            renamed=settings.renamed_columns.get(table, {}),
            dropped=settings.dropped_columns,
            deletes=DeleteCondition.parse(condition) if condition else None,
        )

    def _write(self, store: DeltaStore, table: DeltaTable, given: TypedChanges) -> TypedChanges:
        if self._settings.append_only:
            return write_changelog(table, given)
        if self._settings.stored_as_scd_type == 2:
            return write_history(table, given, datetime.now(UTC))
        vectors = store.vectors if self._settings.deletion_vectors else None
        by_spark, only_spark = self._by_spark(store), self._settings.engine == "spark"
        if only_spark and by_spark is None:
            raise SinkError(f"table {store.table}: engine: spark needs a Spark session.", "Use engine: native here.")
        return write(table, given, WriteOptions(by_spark, vectors, only_spark))

    def _make_root(self) -> None:
        if "://" not in self._settings.path:
            Path(self._settings.path).mkdir(parents=True, exist_ok=True, mode=0o700)
