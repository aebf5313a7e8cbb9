"""Slowly changing dimension type 2: every version of a row with the time from and to which it held.

`__START_AT` and `__END_AT` are named as in Spark's AUTO CDC; the current row has no end. The trap: a batch holds one
change per key, the newest, so a version that lived shorter than a batch leaves no row; the log has it.

A row's `_millrace_version` is that of the last change that touched it, its end included, and `_millrace_deleted` is
true once it has ended: so the guard against older changes and the readers' filter are those of type 1.
"""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from cdc.arrays import AnyArray, Bools, Ints
from sinks.delta.rows.changes import PARTIAL, TypedChanges, sorted_by
from sinks.delta.rows.rewrite import filled, places, taken
from sinks.delta.schema.layout import COMMITTED, DELETED, END_AT, START_AT, VERSION
from sinks.delta.write.merge import append, end_truncated, floor, marks, overwrite
from sinks.delta.write.writer import files, fits, scanned, target_size, touched
from sinks.rows.images import STORED_ROW_MISSING


def write_history(table: DeltaTable, given: TypedChanges, now: datetime) -> TypedChanges:
    """Close rows that changed and add their successors; returns the changes with what was set aside.

    A truncate carries no time of its own: where rows are told apart by time, it ends them `now`.
    """
    given = given.after_truncate(floor(table))
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
    fair = target_size(int(stored.bytes.sum()))
    region = touched(given, stored, fair)
    if region is not None and given.rows.num_rows > 1 and not fits(table, stored, region):
        return given.with_rejected(*(_write(table, half) for half in given.halves()))
    condition = region.condition() if region else ""
    rows = scanned(table, given.layout, given.layout.arrow.names, condition)
    result, orphans = put(rows, given)
    if result is not None and not stored.bytes.size:
        append(table, replace(given, rows=result), fair)
    elif result is not None:
        overwrite(table, result, condition, given.layout, file_size=fair, own=marks(table, given))
    return given.without(orphans, STORED_ROW_MISSING)


def put(stored: pa.Table, given: TypedChanges) -> tuple[pa.Table | None, Bools]:
    """The region's rows with these changes in their history (None if nothing changes), and which are orphans."""
    newest = _newest(stored, given)
    below = places(newest, given.rows, given.layout.key)
    row = taken(newest["row"], below, -1)
    version, ended = taken(newest[VERSION], below, -1), taken(newest[DELETED], below, True)
    newer = given.rows[VERSION].to_numpy() > version
    orphans = given.rows[PARTIAL].to_numpy() & newer & ended
    winners = newer & ~orphans
    if not winners.any():
        return None, orphans
    closing = winners & ~ended
    closed = _closed(stored, row[closing], given.rows.filter(pa.array(closing)))
    fresh = filled(stored, given, row).filter(pa.array(winners & ~_ends_nothing(given, ended)))
    rows = pa.concat_tables([closed, fresh.select(given.layout.arrow.names)])
    return sorted_by(rows, [*given.layout.key, START_AT]).cast(given.layout.arrow), orphans


def _ends_nothing(given: TypedChanges, ended: Bools) -> Bools:
    """A delete of a live row only closes it; one of a row that is not there stays as a tombstone of its own."""
    deletes: Bools = given.rows[DELETED].to_numpy()
    return deletes & ~ended


def _newest(stored: pa.Table, given: TypedChanges) -> pa.Table:
    """The last row of each key's history."""
    key = list(given.layout.key)
    numbered = stored.select([*key, VERSION, DELETED]).append_column("row", pa.array(np.arange(stored.num_rows)))
    if not stored.num_rows:
        return numbered
    # of two rows with one version, one was ended by the change that began the other: the live one is the last
    ordered = numbered.take(pc.sort_indices(numbered, sort_keys=[(VERSION, "ascending"), (DELETED, "descending")]))
    last = ordered.group_by(key, use_threads=False).aggregate([("row", "last")])
    return numbered.take(last["row_last"])


def _closed(stored: pa.Table, rows: Ints, changes: pa.Table) -> pa.Table:
    """The stored rows with these ones ended by these changes."""
    place = np.full(stored.num_rows, -1)
    place[rows] = np.arange(len(rows))
    ended = pa.array(place >= 0)
    at: AnyArray = pa.array(place, mask=place < 0)
    for name, source in ((VERSION, VERSION), (END_AT, START_AT), (COMMITTED, COMMITTED)):
        values: AnyArray = pc.if_else(ended, changes[source].take(at), stored[name])
        stored = stored.set_column(stored.column_names.index(name), name, values)
    flags: AnyArray = pc.or_(stored[DELETED], ended)
    return stored.set_column(stored.column_names.index(DELETED), DELETED, flags)


def _sequenced(given: TypedChanges) -> pa.Table:
    """The changes with their start; a delete that nothing precedes starts and ends at once."""
    rows = given.rows
    start = rows[COMMITTED] if _by_time(given) else rows[VERSION]
    end: AnyArray = pc.if_else(rows[DELETED], start, pa.scalar(None, start.type))
    for name, values in ((START_AT, start), (END_AT, end)):
        rows = rows.set_column(rows.column_names.index(name), name, values)
    return rows
