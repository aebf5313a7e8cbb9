"""The guarded merge by `deltalake`: newer versions win, older ones change nothing, partial rows keep what they lack."""

from collections.abc import Iterable
from dataclasses import replace

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake
from deltalake.table import TableMerger

from sinks.delta.rows.changes import PARTIAL, TypedChanges, keep_flag
from sinks.delta.schema.layout import DELETED, END_AT, KEY_TEXT, VERSION, TableLayout

WRITER = "millrace.lsn"
"""The application id of every commit by Millrace; its number is the LSN that the commit brings the table to.

It never decides what is skipped: versions do, row by row, so a reset checkpoint loses nothing. It fences: Delta
refuses a commit if another with the same application id came between read and commit, so two writers can never
both append a key that neither of them saw."""

TRUNCATED = "millrace.truncated"
"""The application id that remembers the newest truncate: changes below it are gone, also those of keys never seen."""


def merge(table: DeltaTable, changes: TypedChanges, within: str = "", *, tombstones: bool = True) -> dict[str, int]:
    """Merge in one commit, or in none if nothing changes. `within` narrows which target files are looked at.

    Rows that a truncate removes leave tombstones, or nothing: its version alone keeps out what is older, too.
    Partial rows without a live stored row are neither written nor reported: find them first.
    """
    on = [f"target.{quoted(name)} = source.{quoted(name)}" for name in changes.layout.key]
    merger = table.merge(
        changes.rows,
        predicate=" AND ".join([*on, f"({within})"] if within else on),
        source_alias="source",
        target_alias="target",
        streamed_exec=False,
        commit_properties=marks(table, changes),
        writer_properties=changes.layout.encodings,
    )
    return _clauses(merger, changes, tombstones).execute()


def append(table: DeltaTable, changes: TypedChanges, file_size: int) -> None:
    """Add rows whose keys are known to be new, in one commit; without rows, the commit only marks. Never partial."""
    rows = changes.rows.select(changes.layout.arrow.names)
    write_deltalake(
        table,
        rows,
        mode="append",
        target_file_size=file_size,
        commit_properties=marks(table, changes),
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


def floor(table: DeltaTable) -> int:
    """The newest truncate that the table has seen."""
    return table.transaction_version(TRUNCATED) or 0


def marks(table: DeltaTable, changes: TypedChanges) -> CommitProperties:
    """What each commit says of itself; neither number ever goes back."""
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
        commit_properties=marks(table, changes),
        writer_properties=changes.layout.encodings,
    )
    if not result["num_updated_rows"]:
        append(table, replace(changes, rows=changes.rows.slice(0, 0)), 1)


def fence(table: DeltaTable) -> CommitProperties:
    """For commits that bring no changes: whoever read the table before them must read it again."""
    return CommitProperties(app_transactions=[Transaction(WRITER, table.transaction_version(WRITER) or 0)])


def quoted(name: str) -> str:
    """A column's name in an expression."""
    return '"' + name.replace('"', '""') + '"'


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
    """A truncated row keeps its key and forgets the rest."""
    gone = {quoted(name): "NULL" for name in _forgotten(layout)}
    return {**gone, quoted(VERSION): str(version), quoted(DELETED): "true"}


def _forgotten(layout: TableLayout) -> Iterable[str]:
    spared = {*layout.key, KEY_TEXT, VERSION, DELETED}
    return (name for name in layout.arrow.names if name not in spared)
