"""How a batch is written, by what it touches. Each way is one commit, or none if nothing changes.

| the batch | how it is written |
|---|---|
| into an empty table, or only new keys | append, sorted by key |
| at least LOAD_ROWS, all over the table, and reading the stored keys shows only new ones | append |
| touches many more rows than it has | deletion vectors and a new file (`deletion_vectors.writer`) |
| the same, and its partial rows keep more than PARTIAL_BYTES of stored columns | the same in pieces: several commits |
| touches at most REGION_LIMIT of files (INFLATED_LIMIT in memory) | rewrite these files in memory, sorted by key |
| touches more than SPARK_LIMIT, and Spark is available | Spark's MERGE |
| touches more, in files that do not overlap | each half of its keys by these rules: several commits |
| touches more, in files that overlap, or truncates, or has keys without bounds | `deltalake`'s merge |
| any, with `engine: spark` | Spark's MERGE |
| truncates a table whose key was replaced, so that stored rows have equal keys | a delete, then by these rules |

The numbers are measured: docs/adr/0004-delta-writes.md.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from deltalake import DeltaTable

from cdc.arrays import AnyArray
from sinks.delta.deletion_vectors.writer import VectorWriter
from sinks.delta.files.storage import source_of
from sinks.delta.rows.changes import PARTIAL, TypedChanges, sorted_by
from sinks.delta.rows.rewrite import matching_rows, rewrite, values_at
from sinks.delta.schema.layout import DELETED, VERSION, TableLayout
from sinks.delta.write.merge import append, commit_properties, last_truncate, merge, overwrite, record_truncate
from sinks.delta.write.region import Files, Region
from sinks.delta.write.region import region as key_region
from sinks.delta.write.row_sizes import uncompressed_bytes, widest_row
from sinks.rows.images import STORED_ROW_MISSING

MEGABYTE = 1024 * 1024

REGION_LIMIT = 32 * MEGABYTE
"""Compressed bytes rewritten in memory at once: about a million rows of 100 bytes, which take 350 to 600 MB."""

SPARK_LIMIT = 1024 * MEGABYTE
"""Compressed bytes that `deltalake` may merge in this process. Spark's MERGE takes ten times its CPU (10 s against
0.7 s into a million rows), but spills to disk and runs on a cluster."""

INFLATED_LIMIT = 256 * MEGABYTE
"""Uncompressed bytes of the same: 32 MB of large repetitive texts became gigabytes in memory."""

PARTIAL_BYTES = 32 * MEGABYTE
"""Bytes of stored columns that are copied into partial rows in one commit with deletion vectors. Partial rows are small
themselves, so the size of the batch is no bound; where files are rewritten instead, the region is the bound."""

LEAST_FILE, LARGEST_FILE, FILES = MEGABYTE, 64 * MEGABYTE, 512
"""Files grow with the table, so that it has some hundreds of them: a changed key costs one file, and a table of a
billion rows still lists quickly."""

LOAD_ROWS = 10_000
"""Changes from which reading the stored keys first is cheaper: new keys in random order (a snapshot by UUID) would
otherwise rewrite the table once per batch."""

MergeBySpark = Callable[[DeltaTable, TypedChanges], None]


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """What a table has besides `deltalake`: Spark, and deletion vectors."""

    by_spark: MergeBySpark | None = None
    vectors: VectorWriter | None = None
    only_spark: bool = False
    """Whether Spark writes every batch of rows; truncates are written by `deltalake`."""


def write(table: DeltaTable, given: TypedChanges, options: WriteOptions = WriteOptions()) -> TypedChanges:  # noqa: B008 - frozen
    """Write these changes; returns them with what was rejected."""
    given = given.after_truncate(last_truncate(table))
    if given.truncated:
        if not _equal_keys(table, given.layout):
            return _truncate(table, given)
        given = _remove_truncated(table, given)
    if not given.rows.num_rows:
        return given
    stored = files(table, given.layout)
    target = target_size(int(stored.bytes.sum()))
    region = touched(given, stored, target)
    if options.only_spark and options.by_spark is not None:
        return _merge_by_spark(table, given, region, options.by_spark)
    if not len(stored.bytes) or _clearly_new(region):
        return _append(table, given, target)
    written = None
    if options.vectors is not None and options.vectors.is_cheaper(given, region):
        if pieces := _partial_pieces(table, given, stored, region):
            return given.with_rejected(*(write(table, piece, options) for piece in pieces))
        written = options.vectors.write(table, given, stored, target // 2)
    return written or _write_copy(table, given, stored, region, options.by_spark)


def _partial_pieces(
    table: DeltaTable, given: TypedChanges, stored: Files, region: Region | None
) -> tuple[TypedChanges, ...]:
    """The batch in pieces by the size of the columns that its partial rows keep; empty if no split is needed."""
    if not given.partial:
        return ()
    partial = given.rows[PARTIAL].to_numpy()
    width = widest_row(source_of(table), _paths(stored, region), given.kept)
    return given.pieces(partial, max(1, PARTIAL_BYTES // max(width, 1)))


def _paths(stored: Files, region: Region | None) -> list[str]:
    """The files that a batch may touch."""
    return [stored.paths[number] for number in region.overlapped] if region is not None else list(stored.paths)


def fits(table: DeltaTable, stored: Files, region: Region) -> bool:
    """Whether the files that a batch touches fit in memory."""
    return (
        region.bytes <= REGION_LIMIT and uncompressed_bytes(source_of(table), _paths(stored, region)) <= INFLATED_LIMIT
    )


def _write_copy(
    table: DeltaTable, given: TypedChanges, stored: Files, region: Region | None, by_spark: MergeBySpark | None
) -> TypedChanges:
    """Without deletion vectors: the files with the old rows are rewritten."""
    target = target_size(int(stored.bytes.sum()))
    if _new_by_reading(table, given, region):
        return _append(table, given, target)
    if region is not None and fits(table, stored, region):
        return _rewrite(table, given, region, target)
    if by_spark is None or region is None or region.bytes <= SPARK_LIMIT:
        halves = _halves(given, stored, region, target)
        if halves:
            return given.with_rejected(*(write(table, half) for half in halves))
    return _merge(table, given, region, by_spark)


def _halves(given: TypedChanges, stored: Files, region: Region | None, target: int) -> tuple[TypedChanges, ...]:
    """The batch in two, if that halves what it touches; empty where files overlap and every key touches all of them."""
    if region is None or given.rows.num_rows < 2:
        return ()
    halves = given.halves()
    parts = [touched(half, stored, target) for half in halves]
    size = sum(part.bytes for part in parts if part is not None)
    return halves if size <= region.bytes * 5 // 4 else ()


def _clearly_new(region: Region | None) -> bool:
    """Whether the bounds of the files show that no key is stored."""
    return region is not None and region.new and not region.files


def _new_by_reading(table: DeltaTable, given: TypedChanges, region: Region | None) -> bool:
    """Whether reading the stored keys shows that none is stored; done only for many keys all over the table."""
    if given.rows.num_rows < LOAD_ROWS or (region is not None and region.rows <= given.rows.num_rows):
        return False
    return not _stored_state(table, given, region).found.any()


def _append(table: DeltaTable, given: TypedChanges, target: int) -> TypedChanges:
    """No key is stored, so every partial row is an orphan."""
    given = given.without(given.rows[PARTIAL].to_numpy(), STORED_ROW_MISSING)
    if given.rows.num_rows:
        append(table, replace(given, rows=sorted_by(given.rows, given.layout.key)), target)
    return given


def _rewrite(table: DeltaTable, given: TypedChanges, region: Region, target: int) -> TypedChanges:
    stored = scanned(table, given.layout, given.layout.arrow.names, region.condition())
    result = rewrite(stored, given)
    if result.changed:
        own = commit_properties(table, given)
        overwrite(table, result.rows, region.condition(), given.layout, file_size=target, own=own)
    return given.without(result.orphans, STORED_ROW_MISSING)


def _merge(
    table: DeltaTable, given: TypedChanges, region: Region | None, by_spark: MergeBySpark | None
) -> TypedChanges:
    state = _stored_state(table, given, region)
    given = given.without(state.orphans, STORED_ROW_MISSING)
    if not state.newer.any():
        return given
    size = region.bytes if region else int(files(table, given.layout).bytes.sum())
    if by_spark is not None and size > SPARK_LIMIT:
        by_spark(table, given)
    else:
        merge(table, given, region.condition("target.") if region else "")
    return given


def _merge_by_spark(
    table: DeltaTable, given: TypedChanges, region: Region | None, by_spark: MergeBySpark
) -> TypedChanges:
    """Stored keys are read here only to find orphans; Spark compares the versions."""
    if given.partial:
        given = given.without(_stored_state(table, given, region).orphans, STORED_ROW_MISSING)
    if given.rows.num_rows:
        by_spark(table, given)
    return given


def _truncate(table: DeltaTable, given: TypedChanges) -> TypedChanges:
    """Truncated rows become tombstones, in one commit with the rows of the batch."""
    given = given.without(_stored_state(table, given, None).orphans, STORED_ROW_MISSING)
    if not merge(table, given)["num_output_rows"]:
        record_truncate(table, given)  # every stored row is newer, also than those of the batch
    return given


def _equal_keys(table: DeltaTable, layout: TableLayout) -> bool:
    """Whether stored rows, tombstones included, have equal keys: only where the key was replaced by a shorter one."""
    key = list(layout.key)
    stored = scanned(table, layout, key)
    return bool(stored.group_by(key).aggregate([]).num_rows < stored.num_rows)


def _remove_truncated(table: DeltaTable, given: TypedChanges) -> TypedChanges:
    """Delete what the truncate removes, without tombstones and in a commit of its own; returns the rest of the batch.

    A row of the batch would match every stored row with its key, and a merge would write it once for each of them.
    After a crash in between, the batch is applied again, and its truncate is known.
    """
    truncate = replace(given, rows=given.rows.slice(0, 0), keys=given.keys.slice(0, 0), lsn=given.truncated)
    if not merge(table, truncate, tombstones=False)["num_target_rows_deleted"]:
        record_truncate(table, truncate)
    return replace(given, truncated=0)


@dataclass(frozen=True, slots=True)
class _StoredState:
    """For each change: whether its key is stored, whether it is newer, and whether it is an orphan."""

    found: npt.NDArray[np.bool_]
    newer: npt.NDArray[np.bool_]
    orphans: npt.NDArray[np.bool_]


def _stored_state(table: DeltaTable, given: TypedChanges, region: Region | None) -> _StoredState:
    """Reads only keys, versions and deletes, of the region or of the whole table."""
    columns = [*given.layout.key, VERSION, DELETED]
    stored = scanned(table, given.layout, columns, region.condition() if region else "")
    matches = matching_rows(stored, given.rows, given.layout.key)
    version, deleted = values_at(stored[VERSION], matches, -1), values_at(stored[DELETED], matches, True)
    newer = given.rows[VERSION].to_numpy() > version
    gone = deleted | (version < given.truncated)
    return _StoredState(matches >= 0, newer, given.rows[PARTIAL].to_numpy() & newer & gone)


def scanned(table: DeltaTable, layout: TableLayout, columns: list[str], condition: str = "") -> pa.Table:
    """Rows of one version of the table, in the layout's types, in no particular order."""
    return _cast(_stream(table, columns, condition).read_all(), layout, columns)


def scanned_pieces(
    table: DeltaTable, layout: TableLayout, columns: list[str], condition: str = ""
) -> Iterator[pa.Table]:
    """`scanned`, a few thousand rows at a time."""
    for batch in _stream(table, columns, condition):
        yield _cast(pa.Table.from_batches([batch]), layout, columns)


def _stream(table: DeltaTable, columns: list[str], condition: str) -> pa.RecordBatchReader:
    """Rows as they are read, in Delta's types."""
    return pa.RecordBatchReader.from_stream(table.scan(columns=columns, predicate=condition or None))


def _cast(rows: pa.Table, layout: TableLayout, columns: list[str]) -> pa.Table:
    return rows.cast(pa.schema([layout.arrow.field(name).with_nullable(True) for name in columns]))


def touched(given: TypedChanges, stored: Files, target: int) -> Region | None:
    """The part of the table that the changes touch; None if it cannot be bounded."""
    names = given.layout.compared
    return key_region(names, given.rows.select(names), stored, target // 2) if names else None


def files(table: DeltaTable, layout: TableLayout) -> Files:
    """The table's files as the log describes them."""
    return files_of(pa.table(table.get_add_actions(flatten=True)), layout.compared)


def files_of(actions: pa.Table, names: Sequence[str]) -> Files:
    """`files`, from flattened `add` actions and the names of the compared columns."""
    rows: AnyArray = actions["num_records"]
    return Files(
        actions["size_bytes"].to_numpy(),
        rows.fill_null(0).to_numpy(),
        tuple(statistic(actions, f"min.{name}") for name in names),
        tuple(statistic(actions, f"max.{name}") for name in names),
        [str(path) for path in actions["path"].to_pylist()],
    )


def statistic(actions: pa.Table, name: str) -> list[Any]:
    """A statistic of every file, null where the table has none; `actions` are flattened `add` actions."""
    return actions[name].to_pylist() if name in actions.column_names else [None] * actions.num_rows


def target_size(size: int) -> int:
    """Bytes of a new file in a table of this size."""
    return min(LARGEST_FILE, max(LEAST_FILE, size // FILES))
