"""A folded batch for the sinks: one batch per table and schema, from the rows of either fold. Pure Arrow.

Only keys whose newest change is partial, which are few, are treated row by row. Their values are copied as raw JSON:
parsing and printing would change them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.json_text.members import splice
from cdc.key_range import KeyRange, Removal
from cdc.model import PROGRESS_TABLE, ZERO_LSN, Lsn, TableId, TableSchema
from cdc.ports import Batch, Offset, Schemas, Slice
from sinks.fold.arrow import ranked
from sinks.fold.spark import FOLDED
from sinks.rows.images import partial_first

Row = dict[str, Any]
SchemaOf = Callable[[TableId, int], TableSchema]


@dataclass(frozen=True, slots=True)
class Folded:
    """A folded batch: the position that it reaches, and one batch per table and schema, schemas in order.

    `offset` is `reached` as an exact offset of the log: entries of the log may share an LSN.
    """

    reached: Lsn
    newest: datetime | None
    batches: Sequence[Batch]
    offset: Offset | None = None

    def only(self, tables: Sequence[TableId]) -> "Folded":
        """The batch of these tables only; empty means all tables."""
        if not tables:
            return self
        return replace(self, batches=[batch for batch in self.batches if batch.schema.table in tables])


def joined(several: Sequence[Folded]) -> Folded:
    """Consecutive batches as one, equal to folding their changes together."""
    if len(several) == 1:
        return several[0]
    batches = [batch for folded in several for batch in folded.batches]
    schemas = {(batch.schema.table, batch.schema.id): batch.schema for batch in batches}
    truncates: dict[str, Row] = {}
    for batch in batches:
        if batch.truncated > truncates.get(str(batch.schema.table), {"version": 0})["version"]:
            # `gather` has already compared the truncate with the rows of its own transaction.
            truncate = {"version": batch.truncated, "commit_lsn": 0, "ordinal": 0, "schema_id": batch.schema.id}
            truncates[str(batch.schema.table)] = truncate
    rows = pa.concat_tables([FOLDED.empty_table(), *(batch.rows for batch in batches)])
    changes = _after_truncates(ranked(rows.append_column("ordinal", pa.array(np.arange(rows.num_rows)))), truncates)
    removals = _Removals.of(batches)
    return Folded(
        max(folded.reached for folded in several),
        max((folded.newest for folded in several if folded.newest), default=None),
        list(_batches(removals.applied(changes), truncates, removals, lambda table, number: schemas[table, number])),
        next((folded.offset for folded in reversed(several) if folded.offset), None),
    )


def gather(rows: pa.Table, schemas: Schemas) -> Folded:
    """The rows of a fold as a folded batch."""
    marker = pc.equal(rows.column("table"), pa.scalar(PROGRESS_TABLE))
    markers, changes = rows.filter(marker), rows.filter(pc.invert(marker))
    reached = pc.max(markers.column("version")).as_py() or ZERO_LSN
    offset = next((Offset(text) for text in markers.column("after").to_pylist() if text), None)
    is_truncate = pc.equal(changes.column("op"), pa.scalar("t"))
    truncates = {row["table"]: row for row in changes.filter(is_truncate).to_pylist()}
    is_range = pc.equal(changes.column("op"), pa.scalar("p"))
    removals = _Removals.read(changes.filter(is_range))
    remaining = _after_truncates(changes.filter(pc.invert(pc.or_(is_truncate, is_range))), truncates)
    newest = pc.max(changes.column("commit_ts")).as_py()
    batches = list(_batches(removals.applied(remaining), _before_own_rows(truncates), removals, schemas.get))
    return Folded(Lsn(reached), newest, batches, offset)


def of_slices(slices: Sequence[Slice], schemas: Schemas) -> Folded:
    """Consecutive slices of the log, folded."""
    folded = gather(ranked(pa.concat_tables([piece.rows for piece in slices])), schemas)
    return replace(folded, reached=slices[-1].end, offset=slices[-1].offset)


def merged(rows: pa.Table) -> pa.Table:
    """One row per key, in the columns of FOLDED: partial rows are filled from the older changes of their key."""
    rank = rows.column("rank")
    older = rows.filter(pc.greater(rank, pa.scalar(1)))
    newest = rows.filter(pc.equal(rank, pa.scalar(1))).select(FOLDED.names).cast(FOLDED)
    if older.num_rows == 0:
        return newest
    history: dict[tuple[str, str], list[Row]] = {}
    for row in older.sort_by("rank").to_pylist():
        history.setdefault((row["table"], row["key"]), []).append(row)
    partial, complete = partial_first(newest)
    filled = [_filled(row, history.get((row["table"], row["key"]), [])) for row in partial.to_pylist()]
    return pa.concat_tables([complete, pa.Table.from_pylist(filled, schema=FOLDED)])


def _older_deletes(changes: pa.Table, rows: pa.Table) -> pa.Table:
    """The deletes that precede those of `rows` that are still partial: another row has their key now.

    The store must apply these deletes first. Otherwise it would still have the deleted row, and would keep its large
    columns for the new one. They get a version below that of the row, also where one transaction gave both the same
    version: the store would ignore the second. The versions of earlier transactions are still smaller.
    """
    deletes = changes.filter(pc.equal(changes.column("op"), pa.scalar("d")))
    partial = partial_first(rows)[0].to_pylist() if deletes.num_rows else []
    successors = {(row["table"], row["key"]): row for row in partial}
    found: dict[tuple[str, str], Row] = {}
    for row in deletes.sort_by([("rank", "descending")]).select(FOLDED.names).to_pylist() if partial else ():
        key = (row["table"], row["key"])
        if (new := successors.get(key)) is not None:
            version = min(row["version"], new["version"] - 1)
            found[key] = {**row, "version": version, "schema_id": new["schema_id"]}
    return pa.Table.from_pylist(list(found.values()), schema=FOLDED)


def _filled(row: Row, older: Sequence[Row]) -> Row:
    """Fill the missing columns, from the nearest older change first; values from before a delete do not count."""
    for earlier in older:
        if earlier["op"] == "d" or not row["unchanged"]:
            break
        after, missing = splice(row["after"], earlier["after"], row["unchanged"])
        row = {**row, "after": after, "unchanged": list(missing)}
    return row


def _after_truncates(rows: pa.Table, truncates: Mapping[str, Row]) -> pa.Table:
    """Without the rows that a truncate removed: older versions, and the earlier rows of its own transaction."""
    for table, truncate in truncates.items():
        tied = (pc.field("version") == truncate["version"]) & (pc.field("commit_lsn") == truncate["commit_lsn"])
        earlier = (pc.field("version") < truncate["version"]) | (tied & (pc.field("ordinal") < truncate["ordinal"]))
        rows = rows.filter(~((pc.field("table") == table) & earlier))
    return rows


def _before_own_rows(truncates: Mapping[str, Row]) -> dict[str, Row]:
    """The truncates with their version minus one: rows written later in the same transaction may have the same version.

    A store that leaves tombstones of the truncate's version would ignore these rows. The versions of earlier
    transactions are still smaller: a commit record, longer than one byte, lies between.
    """
    return {table: {**truncate, "version": truncate["version"] - 1} for table, truncate in truncates.items()}


@dataclass(frozen=True, slots=True)
class _Removals:
    """The ranges removed in a batch, by table and the schema at that time: ranges use its column names."""

    of_schema: Mapping[tuple[str, int], tuple[Removal, ...]]

    @classmethod
    def read(cls, rows: pa.Table) -> "_Removals":
        """From the changes with op `p`, of which a fold keeps the newest of each range."""
        found: dict[tuple[str, int], list[Removal]] = {}
        for row in rows.to_pylist():
            removal = Removal(KeyRange.parse(row["key"]), row["version"], row["commit_lsn"], row["commit_ts"])
            found.setdefault((row["table"], row["schema_id"]), []).append(removal)
        return cls({pair: tuple(removals) for pair, removals in found.items()})

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "_Removals":
        """From several folded batches."""
        found: dict[tuple[str, int], dict[KeyRange, Removal]] = {}
        for batch in batches:
            for removal in batch.removed:
                known = found.setdefault((str(batch.schema.table), batch.schema.id), {})
                if (older := known.get(removal.range)) is None or older.version < removal.version:
                    known[removal.range] = removal
        return cls({pair: tuple(removals.values()) for pair, removals in found.items()})

    def applied(self, rows: pa.Table) -> pa.Table:
        """The rows without those that the ranges remove."""
        for (table, _), removals in self.of_schema.items():
            mine = pc.equal(rows["table"], pa.scalar(table)).to_numpy()
            for removal in removals:
                taken = mine.copy()
                own = rows.filter(pa.array(mine))
                taken[mine] = removal.removes(own["key"], own["version"])
                rows, mine = rows.filter(pa.array(~taken)), mine[~taken]
        return rows


def _batches(
    changes: pa.Table, truncates: Mapping[str, Row], removals: _Removals, schema_of: SchemaOf
) -> Iterator[Batch]:
    rows = merged(changes)
    deletes = _older_deletes(changes, rows)
    pairs = {(table, truncate["schema_id"]) for table, truncate in truncates.items()} | set(removals.of_schema)
    groups = rows.group_by(["table", "schema_id"]).aggregate([])
    pairs |= {(group["table"], group["schema_id"]) for group in groups.to_pylist()}
    truncate_done: set[str] = set()
    for table, schema_id in sorted(pairs):
        schema = schema_of(TableId.parse(table), schema_id)
        truncated = truncates[table]["version"] if table in truncates and table not in truncate_done else 0
        removed = removals.of_schema.get((table, schema_id), ())
        truncate_done.add(table)
        if deletes.num_rows and (first := _of(deletes, table, schema_id)).num_rows:
            yield Batch(schema, first, truncated, removed)
            truncated, removed = 0, ()
        yield Batch(schema, _of(rows, table, schema_id) if len(pairs) > 1 else rows, truncated, removed)


def _of(rows: pa.Table, table: str, schema_id: int) -> pa.Table:
    return rows.filter(
        pc.and_(
            pc.equal(rows.column("table"), pa.scalar(table)),
            pc.equal(rows.column("schema_id"), pa.scalar(schema_id)),
        )
    )
