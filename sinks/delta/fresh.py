"""A fresh view: a Delta table merged with the changes in the log that the sink has not applied yet.

Readers need not wait for the sink. The rules are those of the merge itself (`rows.rewrite`), so the view shows what the
table will have once the sink has caught up. Rows that the sink will reject are shown as the table has them.

The order of reading is the promise: first the sink's position, then the table, then the log after that position. A
change that the sink merges in between is read twice, and versions decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.arrays import AnyArray
from cdc.errors import ConfigError, SinkError
from cdc.json_text.typed import no_values
from cdc.key_range import Removal
from cdc.model import LOG_SCHEMA, Lsn, TableId, TableSchema
from cdc.ports import Batch, LogReader, Offset
from sinks.delta.rows.changes import TypedChanges, changes
from sinks.delta.rows.range_deletes import deletes, is_removed
from sinks.delta.rows.rewrite import decide, matching_rows, new_rows
from sinks.delta.schema.layout import DELETED, VERSION, Evolution, TableLayout
from sinks.delta.schema.types import widens
from sinks.delta.store import arrow_schema
from sinks.delta.write.merge import last_truncate
from sinks.delta.write.spark_merge import frame_of
from sinks.delta.write.writer import files, target_size, touched
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from sinks.delta.sink import DeltaSink
    from sinks.shape.sink import ShapedSink


@dataclass(frozen=True, slots=True)
class Fresh:
    """One version of the Delta table, and the newest rows of the keys that changed after it.

    Columns and types are the table's; `arrow` and `spark` leave deleted rows out.
    """

    table: DeltaTable | None
    """None: the sink has not created it yet."""
    evolution: Evolution
    """The layout of the newest schema, and what the table still needs for it."""
    changed: pa.Table
    """The newest rows of the keys that changed after the table's version, tombstones included."""
    truncated: int
    """Rows of the table with a smaller version are truncated (0: none)."""
    reached: Lsn
    """The view has every transaction that ends at or before this LSN."""

    @property
    def layout(self) -> TableLayout:
        """The columns of the view."""
        return self.evolution.layout

    def arrow(self) -> pa.Table:
        """All rows, in memory: for DuckDB, Polars, pandas, or pyarrow itself."""
        live = self.changed.filter(pc.invert(self.changed[DELETED]))
        if self.table is None:
            return live
        condition = f"NOT {DELETED} AND {VERSION} >= {self.truncated}"
        rows = _scan(self.table, self.evolution, condition)
        unchanged = np.ones(rows.num_rows, np.bool_)
        matches = matching_rows(rows, self.changed, self.layout.key)
        unchanged[matches[matches >= 0]] = False
        return pa.concat_tables([rows.filter(pa.array(unchanged)), live])

    def spark(self, session: "SparkSession") -> "DataFrame":
        """All rows, as a DataFrame that reads the Delta table itself: only changed keys pass through this process."""
        changed = frame_of(session, self.changed)
        live = changed.where(f"NOT {DELETED}")
        if self.table is None:
            return live
        reader = session.read.format("delta").option("versionAsOf", self.table.version())
        rows = reader.load(self.table.table_uri).where(f"NOT {DELETED} AND {VERSION} >= {self.truncated}")
        for old, new in _renamed(self.evolution).items():
            rows = rows.withColumnRenamed(old, new)
        unchanged = rows.join(changed.select(*self.layout.key), list(self.layout.key), "left_anti")
        return unchanged.unionByName(live, allowMissingColumns=True).select(*self.layout.arrow.names)


def fresh_view(
    sink: "DeltaSink", log: LogReader, table: TableId, consumer: str = "", shape: "ShapedSink | None" = None
) -> Fresh:
    """The table as of the head of the log. Raises ConfigError for sinks that do not store current rows (type 1).

    `shape` is the sink that shapes the tables, if one does. A change that it would read from the source again is shown
    as the table has it. `consumer` is the name under which the log has the position of this table while it is paused or
    lost.
    """
    if not sink.plain:
        raise ConfigError(
            f"sink {sink.name} stores history or changes; a fresh view needs current rows.",
            "Use a sink with `stored_as_scd_type: 1` and without `append_only`.",
        )
    known = {one.name: one.offset for one in log.consumers()}
    after = known.get(consumer) or known.get(sink.name) or log.start()
    delta = sink.pinned(table)
    rows, reached = _changes_after(log, table, after)
    schema = _schema(log, table)
    newest = sink.layout_in(delta, schema if shape is None else shape.stored_schema(schema))
    batches = gather(ranked(rows), log.schemas).batches
    if shape is not None:
        batches = [shape.shaped(batch).batch for batch in batches]
    truncated = max([batch.truncated for batch in batches] + [last_truncate(delta) if delta else 0])
    parts = [_changed(delta, sink.layout_in(delta, batch.schema), batch, truncated) for batch in batches]
    fitted = [_fitted(part, newest.layout) for part in parts]
    return Fresh(delta, newest, pa.concat_tables([newest.layout.arrow.empty_table(), *fitted]), truncated, reached)


def _changes_after(log: LogReader, table: TableId, after: Offset) -> tuple[pa.Table, Lsn]:
    """The changes of a table after an offset, and the position up to which they are complete."""
    pieces, (until, reached) = [LOG_SCHEMA.empty_table()], log.head()
    for piece in log.read(after, until):
        pieces.append(piece.rows.filter(pc.field("table") == str(table)))
    return pa.concat_tables(pieces), reached


def _schema(log: LogReader, table: TableId) -> TableSchema:
    for schema in log.schemas.newest():
        if schema.table == table:
            return schema
    raise ConfigError(f"Table {table} is not in the log.", "Name a captured table, as schema.name.")


def _changed(delta: DeltaTable | None, evolution: Evolution, batch: Batch, truncated: int) -> pa.Table:
    """The complete newest rows of a batch's keys. Versions decide between the batch and the table."""
    layout = evolution.layout
    given = changes(batch, layout).after_truncate(truncated)
    stored = layout.arrow.empty_table() if delta is None else _stored_rows(delta, given, evolution, truncated)
    for removal in batch.removed:
        stored = stored.filter(pa.array(~is_removed(stored, layout, removal)))
    newest = new_rows(stored, given, decide(stored, given))
    return newest if delta is None else _with_removed(newest, delta, layout, batch.removed)


def _with_removed(rows: pa.Table, delta: DeltaTable, layout: TableLayout, removed: Sequence[Removal]) -> pa.Table:
    """The rows, and tombstones of the table's rows in removed ranges; of a key in both, the row."""
    for removal in removed:
        for gone in deletes(delta, layout, removal):
            new = matching_rows(rows, gone.rows, layout.key) < 0
            rows = pa.concat_tables([rows, gone.rows.select(rows.column_names).filter(pa.array(new))])
    return rows


def _stored_rows(delta: DeltaTable, given: TypedChanges, evolution: Evolution, truncated: int) -> pa.Table:
    """The stored rows of the region that the changes touch, without truncated ones."""
    stored = files(delta, given.layout)
    bounded = given.rows.num_rows and not _renamed(evolution)  # else the files still have the key under its old name
    region = touched(given, stored, target_size(int(stored.bytes.sum()))) if bounded else None
    near = f" AND ({region.condition()})" if region else ""
    return _scan(delta, evolution, f"{VERSION} >= {truncated}{near}")


def _scan(delta: DeltaTable, evolution: Evolution, condition: str) -> pa.Table:
    """Rows of the table in the columns of a layout to which the sink may not have changed it yet."""
    old = {new: old for old, new in _renamed(evolution).items()}
    existing, wanted = arrow_schema(delta).names, evolution.layout.arrow
    names = {name: old.get(name, name) for name in wanted.names if old.get(name, name) in existing}
    scan = delta.scan(columns=list(names.values()), predicate=condition)
    rows = pa.RecordBatchReader.from_stream(scan).read_all().rename_columns(list(names))
    return _fitted(rows.cast(pa.schema([wanted.field(name) for name in names])), evolution.layout)


def _renamed(evolution: Evolution) -> dict[str, str]:
    """Columns that still have their old name in the table."""
    changed = evolution.rewritten.items()
    return {old: field.name for old, field in changed if field is not None and field.name != old}


def _fitted(rows: pa.Table, layout: TableLayout) -> pa.Table:
    """Rows under another layout of their table: columns that they lack are null; columns that it lacks are dropped."""
    arrays: list[AnyArray] = []
    for field in layout.arrow:
        stored = rows.schema.field(field.name).type if field.name in rows.column_names else None
        if stored is not None and not widens(stored, field.type):
            raise SinkError(
                f"table {layout.table}: column {field.name} changes its type in changes that are not applied yet.",
                "Wait until the sink has applied them: millrace wait",
            )
        arrays.append(no_values(rows.num_rows, field.type) if stored is None else rows[field.name].cast(field.type))
    return pa.Table.from_arrays(arrays, schema=layout.arrow)
