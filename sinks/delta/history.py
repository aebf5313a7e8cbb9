"""Slowly changing dimension type 2: every version of a row with its start and end.

`__START_AT` and `__END_AT` are named as in Spark's AUTO CDC; the current row has no end. The trap: a batch has one
change per key, the newest, so a version that was replaced within a batch leaves no row; Millrace's log has it.

A row's `_millrace_version` is that of the last change that wrote or ended it, and `_millrace_deleted` is true once it
has ended: so the comparison of versions and the readers' filter are those of type 1.
"""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.arrays import AnyArray, Bools, Ints
from sinks.delta.rows.changes import PARTIAL, TypedChanges, sorted_by
from sinks.delta.rows.rewrite import filled, matching_rows, values_at
from sinks.delta.schema.layout import COMMITTED, DELETED, END_AT, START_AT, VERSION
from sinks.delta.write.merge import append, commit_properties, end_truncated, last_truncate, overwrite
from sinks.delta.write.writer import files, fits, scanned, target_size, touched
from sinks.rows.images import STORED_ROW_MISSING


def write_history(table: DeltaTable, given: TypedChanges, now: datetime) -> TypedChanges:
    """End rows that changed and add their successors; returns the changes with what was rejected.

    A truncate has no commit time: with `sequence_by: commit_ts` it ends rows `now`.
    """
    given = given.after_truncate(last_truncate(table))
    if given.truncated:
        end_truncated(table, given, f"TIMESTAMP '{now.isoformat()}'" if _by_time(given) else str(given.truncated))
        given = replace(given, truncated=0)
    return _write(table, replace(given, rows=_sequenced(given)))


def _by_time(given: TypedChanges) -> bool:
    return pa.types.is_timestamp(given.layout.arrow.field(START_AT).type)


def _write(table: DeltaTable, given: TypedChanges) -> TypedChanges:
    """In one commit, or in several where the batch touches more than fits in memory."""
    if not given.rows.num_rows:
        return given
    stored = files(table, given.layout)
    file_size = target_size(int(stored.bytes.sum()))
    region = touched(given, stored, file_size)
    if region is not None and given.rows.num_rows > 1 and not fits(table, stored, region):
        return given.with_rejected(*(_write(table, half) for half in given.halves()))
    condition = region.condition() if region else ""
    rows = scanned(table, given.layout, given.layout.arrow.names, condition)
    result, orphans = _with_changes(rows, given)
    if result is not None and not stored.bytes.size:
        append(table, replace(given, rows=result), file_size)
    elif result is not None:
        overwrite(table, result, condition, given.layout, file_size=file_size, own=commit_properties(table, given))
    return given.without(orphans, STORED_ROW_MISSING)


def _with_changes(stored: pa.Table, given: TypedChanges) -> tuple[pa.Table | None, Bools]:
    """The region's rows with these changes added (None if nothing changes), and which changes are orphans."""
    newest = _newest(stored, given)
    matches = matching_rows(newest, given.rows, given.layout.key)
    row = values_at(newest["row"], matches, -1)
    version, ended = values_at(newest[VERSION], matches, -1), values_at(newest[DELETED], matches, True)
    newer = given.rows[VERSION].to_numpy() > version
    orphans = given.rows[PARTIAL].to_numpy() & newer & ended
    winners = newer & ~orphans
    if not winners.any():
        return None, orphans
    ending = winners & ~ended
    ended_rows = _ended(stored, row[ending], given.rows.filter(pa.array(ending)))
    added = filled(stored, given, row).filter(pa.array(winners & ~_only_ends(given, ended)))
    rows = pa.concat_tables([ended_rows, added.select(given.layout.arrow.names)])
    return sorted_by(rows, [*given.layout.key, START_AT]).cast(given.layout.arrow), orphans


def _only_ends(given: TypedChanges, ended: Bools) -> Bools:
    """Deletes of live rows, which only end them; a delete without a live row is stored as a tombstone."""
    deletes: Bools = given.rows[DELETED].to_numpy()
    return deletes & ~ended


def _newest(stored: pa.Table, given: TypedChanges) -> pa.Table:
    """The last row of each key's history."""
    key = list(given.layout.key)
    numbered = stored.select([*key, VERSION, DELETED]).append_column("row", pa.array(np.arange(stored.num_rows)))
    if not stored.num_rows:
        return numbered
    # two rows have the same version if one change ended the first and started the second: the live one is the last
    ordered = numbered.take(pc.sort_indices(numbered, sort_keys=[(VERSION, "ascending"), (DELETED, "descending")]))
    last = ordered.group_by(key, use_threads=False).aggregate([("row", "last")])
    return numbered.take(last["row_last"])


def _ended(stored: pa.Table, rows: Ints, changes: pa.Table) -> pa.Table:
    """The stored rows, with `rows` of them ended by these changes."""
    change = np.full(stored.num_rows, -1)
    change[rows] = np.arange(len(rows))
    ended = pa.array(change >= 0)
    at: AnyArray = pa.array(change, mask=change < 0)
    for name, source in ((VERSION, VERSION), (END_AT, START_AT), (COMMITTED, COMMITTED)):
        values: AnyArray = pc.if_else(ended, changes[source].take(at), stored[name])
        stored = stored.set_column(stored.column_names.index(name), name, values)
    flags: AnyArray = pc.or_(stored[DELETED], ended)
    return stored.set_column(stored.column_names.index(DELETED), DELETED, flags)


def _sequenced(given: TypedChanges) -> pa.Table:
    """The changes with their start; a delete also gets the same end."""
    rows = given.rows
    start = rows[COMMITTED] if _by_time(given) else rows[VERSION]
    end: AnyArray = pc.if_else(rows[DELETED], start, pa.scalar(None, start.type))
    for name, values in ((START_AT, start), (END_AT, end)):
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows
