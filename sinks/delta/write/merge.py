"""Commits by `deltalake`: merge, append, overwrite.

In a merge newer versions win, older ones change nothing, and partial rows keep the stored columns that they lack.
"""

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.table import TableMerger

from sinks.delta.rows.changes import PARTIAL, TypedChanges, keep_flag
from sinks.delta.schema.layout import DELETED, END_AT, KEY_TEXT, VERSION, TableLayout
from sinks.delta.write.region import quoted

WRITER = "millrace.lsn"
"""The application id of every commit by Millrace; its number is the LSN that the table has reached.

It does not decide which changes are skipped: versions do, row by row, so a reset checkpoint loses nothing. It fences
off other writers: Delta refuses a commit if another one with the same application id was made after the table was read,
so two writers never append the same key."""

TRUNCATED = "millrace.truncated"
"""The application id whose number is the version of the newest truncate: older changes are ignored, of every key."""


def merge(table: DeltaTable, changes: TypedChanges, within: str = "", *, tombstones: bool = True) -> dict[str, int]:
    """Merge in one commit, or in none if nothing changes. `within` limits the target files that are read.

    Rows that a truncate removes become tombstones, or are deleted: the truncate's version alone excludes older changes.
    The trap: orphans are neither written nor reported; reject them first.
    """
    on = [f"target.{quoted(name)} = source.{quoted(name)}" for name in changes.layout.key]
    merger = table.merge(
        changes.rows,
        predicate=" AND ".join([*on, f"({within})"] if within else on),
        source_alias="source",
        target_alias="target",
        streamed_exec=False,
        commit_properties=commit_properties(table, changes),
        writer_properties=changes.layout.encodings,
    )
    return _clauses(merger, changes, tombstones).execute()


def append(table: DeltaTable, changes: TypedChanges, file_size: int) -> None:
    """Add complete rows with new keys, in one commit. The trap: it does not compare versions."""
    rows = changes.rows.select(changes.layout.arrow.names)
    write_deltalake(
        table,
        rows,
        mode="append",
        target_file_size=file_size,
        commit_properties=commit_properties(table, changes),
        writer_properties=changes.layout.encodings,
    )


def overwrite(
    table: DeltaTable, rows: pa.Table, condition: str, layout: TableLayout, *, file_size: int, own: CommitProperties
) -> None:
    """Replace the rows that meet the condition (all, if it is empty) in one commit. Every new row must meet it too."""
    write_deltalake(
        table,
        rows.cast(layout.arrow),
        mode="overwrite",
        predicate=condition or None,
        target_file_size=file_size,
        commit_properties=own,
        writer_properties=layout.encodings,
    )


def last_truncate(table: DeltaTable) -> int:
    """The version of the newest truncate of the table; 0: none."""
    return table.transaction_version(TRUNCATED) or 0


def commit_properties(table: DeltaTable, changes: TypedChanges) -> CommitProperties:
    """The LSN and the truncate that a commit records; neither number ever decreases."""
    lsn = max(changes.lsn, table.transaction_version(WRITER) or 0)
    ids = [Transaction(WRITER, lsn)]
    if changes.truncated:
        ids.append(Transaction(TRUNCATED, changes.truncated))
    return CommitProperties(custom_metadata={WRITER: str(lsn)}, app_transactions=ids)


def end_truncated(table: DeltaTable, changes: TypedChanges, end: str) -> None:
    """Type 2: end every live row that is older than the truncate, in one commit."""
    result = table.update(
        predicate=f"NOT {DELETED} AND {VERSION} < {changes.truncated}",
        updates={VERSION: str(changes.truncated), DELETED: "true", quoted(END_AT): end},
        commit_properties=commit_properties(table, changes),
        writer_properties=changes.layout.encodings,
    )
    if not result["num_updated_rows"]:
        record_truncate(table, changes)


def record_truncate(table: DeltaTable, changes: TypedChanges) -> None:
    """A commit without rows, for a truncate that removes none: older changes must be ignored from now on."""
    append(table, replace(changes, rows=changes.rows.slice(0, 0)), 1)


def fence(table: DeltaTable) -> CommitProperties:
    """For commits without changes: a writer that read the table before must read it again."""
    return CommitProperties(app_transactions=[Transaction(WRITER, table.transaction_version(WRITER) or 0)])


def _clauses(merger: TableMerger, changes: TypedChanges, tombstones: bool) -> TableMerger:
    newer = f"source.{VERSION} > target.{VERSION}"
    whole = f"NOT source.{PARTIAL}"
    if changes.partial:
        live = f"NOT target.{DELETED} AND target.{VERSION} >= {changes.truncated}"
        newer += f" AND ({whole} OR ({live}))"
    merger = merger.when_matched_update(_updates(changes), predicate=newer)
    merger = merger.when_not_matched_insert(_inserts(changes), predicate=whole if changes.partial else None)
    if changes.truncated:
        older = f"target.{VERSION} < {changes.truncated}"
        if not tombstones:
            return merger.when_matched_delete(predicate=older).when_not_matched_by_source_delete(predicate=older)
        gone = _tombstone(changes.layout, changes.truncated)
        merger = merger.when_matched_update(gone, predicate=older)
        merger = merger.when_not_matched_by_source_update(gone, predicate=older)
    return merger


def _updates(changes: TypedChanges) -> dict[str, str]:
    updates = _inserts(changes)
    for number, name in enumerate(changes.kept):
        column = quoted(name)
        flag = f"source.{keep_flag(number)}"
        updates[column] = f"CASE WHEN {flag} THEN target.{column} ELSE source.{column} END"
    return updates


def _inserts(changes: TypedChanges) -> dict[str, str]:
    return {quoted(name): f"source.{quoted(name)}" for name in changes.layout.arrow.names}


def _tombstone(layout: TableLayout, version: int) -> dict[str, str]:
    """A truncated row keeps its key; its other columns become null."""
    gone = {quoted(name): "NULL" for name in _columns_to_clear(layout)}
    return {**gone, quoted(VERSION): str(version), quoted(DELETED): "true"}


def _columns_to_clear(layout: TableLayout) -> Iterable[str]:
    kept = {*layout.key, KEY_TEXT, VERSION, DELETED}
    return (name for name in layout.arrow.names if name not in kept)
