"""An append-only changelog: every change of a batch is a row of its own, identified by key and version.

A replay writes no change twice. Deletes are rows with `_millrace_deleted`; `_millrace_unchanged` names the columns that
a change did not include. A truncate is no row: its version is in the table's transaction log.
The trap: batches are folded, so only the newest change of a key in a batch is here; Millrace's log has all of them.
"""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from sinks.delta.rows.changes import TypedChanges
from sinks.delta.schema.layout import DELETED, VERSION, TableLayout
from sinks.delta.write.merge import append, last_truncate
from sinks.delta.write.writer import LEAST_FILE, scanned, write


def write_changelog(table: DeltaTable, given: TypedChanges) -> TypedChanges:
    """Add the changes that the table does not have; returns them with what was rejected."""
    given = given.after_truncate(last_truncate(table))
    if given.truncated:
        append(table, replace(given, rows=given.rows.slice(0, 0)), LEAST_FILE)
    return write(table, replace(given, truncated=0))


def newest(table: DeltaTable, layout: TableLayout) -> pa.Table:
    """The newest change of each key, without deletes. Columns that it did not include are null."""
    rows = scanned(table, layout, layout.arrow.names, f"{VERSION} >= {last_truncate(table)}")
    if not rows.num_rows:
        return rows
    numbered = rows.append_column("row", pa.array(np.arange(rows.num_rows)))
    ordered = numbered.take(pc.sort_indices(numbered, sort_keys=[(VERSION, "ascending")]))
    key = [name for name in layout.key if name != VERSION]
    last = ordered.group_by(key, use_threads=False).aggregate([("row", "last")])
    found = rows.take(last["row_last"])
    return found.filter(pc.invert(found[DELETED]))
