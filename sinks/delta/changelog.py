"""An append-only changelog: every change that a batch brings is a row of its own, told apart by key and version.

A change is written once, whatever is replayed. Deletes are rows with `_millrace_deleted`, columns that a change did not
bring are named in `_millrace_unchanged`. A truncate is no row: its version is kept in the table's log.
The trap: batches are folded, so of changes of one key in one batch only the newest is here; the log has them all.
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from sinks.delta.rows.changes import TypedChanges
from sinks.delta.schema.layout import DELETED, VERSION, TableLayout
from sinks.delta.write.merge import append, floor
from sinks.delta.write.writer import LEAST_FILE, scanned, write


def write_changelog(table: DeltaTable, given: TypedChanges) -> TypedChanges:
    """Add the changes that are not there yet; returns them with what was set aside."""
    given = given.after_truncate(floor(table))
    if given.truncated:
        append(table, replace(given, rows=given.rows.slice(0, 0)), LEAST_FILE)
    return write(table, replace(given, truncated=0))


def newest(table: DeltaTable, layout: TableLayout) -> pa.Table:
    """The rows that the changes add up to. Columns that the newest change did not bring are null in it."""
    rows = scanned(table, layout, layout.arrow.names, f"{VERSION} >= {floor(table)}")
    if not rows.num_rows:
        return rows
    numbered = rows.append_column("row", pa.array(np.arange(rows.num_rows)))
    ordered = numbered.take(pc.sort_indices(numbered, sort_keys=[(VERSION, "ascending")]))
    key = [name for name in layout.key if name != VERSION]
    last = ordered.group_by(key, use_threads=False).aggregate([("row", "last")])
    found = rows.take(last["row_last"])
    return found.filter(pc.invert(found[DELETED]))
