"""What a fold leaves for the sinks, gathered by table: pure Arrow, no Spark.

The one loop over rows is for keys whose newest change is partial, which are few; their values are copied as raw JSON,
because parsing and printing would damage them.
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
from cdc.ports import Batch, Offset, Schemas
from sinks.fold.arrow import ranked
from sinks.fold.spark import FOLDED

Row = dict[str, Any]
SchemaOf = Callable[[TableId, int], TableSchema]


@dataclass(frozen=True, slots=True)
class Folded:
    """A folded batch: how far it brings a sink, and one batch per table and schema, schemas in order.

    `offset` is the same as `reached`, told exactly: entries of the log may share an LSN.
    """

    reached: Lsn
    newest: datetime | None
    batches: Sequence[Batch]
    offset: Offset | None = None

    def only(self, tables: Sequence[TableId]) -> "Folded":
        """Without the tables that are not wanted; empty means all."""
        if not tables:
            return self
        return replace(self, batches=[batch for batch in self.batches if batch.schema.table in tables])


def joined(several: Sequence[Folded]) -> Folded:
    """Batches that follow each other as one: what folding their changes together would have given."""
    if len(several) == 1:
        return several[0]
    batches = [batch for folded in several for batch in folded.batches]
    schemas = {(batch.schema.table, batch.schema.id): batch.schema for batch in batches}
    cuts: dict[str, Row] = {}
    for batch in batches:
        if batch.truncated > cuts.get(str(batch.schema.table), {"version": 0})["version"]:
            # Rows of the truncate's own transaction were told apart from it when their batch was folded.
            cut = {"version": batch.truncated, "commit_lsn": 0, "ordinal": 0, "schema_id": batch.schema.id}
            cuts[str(batch.schema.table)] = cut
    rows = pa.concat_tables([FOLDED.empty_table(), *(batch.rows for batch in batches)])
    below = _after_truncates(ranked(rows.append_column("ordinal", pa.array(np.arange(rows.num_rows)))), cuts)
    removals = _Removals.of(batches)
    return Folded(
        max(folded.reached for folded in several),
        max((folded.newest for folded in several if folded.newest), default=None),
        list(_batches(removals.applied(below), cuts, removals, lambda table, number: schemas[table, number])),
        next((folded.offset for folded in reversed(several) if folded.offset), None),
    )


def gather(rows: pa.Table, schemas: Schemas) -> Folded:
    """Take the rows of `sinks.fold.spark.fold` apart."""
    marker = pc.equal(rows.column("table"), pa.scalar(PROGRESS_TABLE))
    markers, changes = rows.filter(marker), rows.filter(pc.invert(marker))
    reached = pc.max(markers.column("version")).as_py() or ZERO_LSN
    offset = next((Offset(text) for text in markers.column("after").to_pylist() if text), None)
    truncates = pc.equal(changes.column("op"), pa.scalar("t"))
    cuts = {row["table"]: row for row in changes.filter(truncates).to_pylist()}
    ranges = pc.equal(changes.column("op"), pa.scalar("p"))
    removals = _Removals.read(changes.filter(ranges))
    below = _after_truncates(changes.filter(pc.invert(pc.or_(truncates, ranges))), cuts)
    newest = pc.max(changes.column("commit_ts")).as_py()
    batches = list(_batches(removals.applied(below), _below_own_rows(cuts), removals, schemas.get))
    return Folded(Lsn(reached), newest, batches, offset)


def merged(rows: pa.Table) -> pa.Table:
    """One row per key: partial ones filled from the older changes below them. Has the columns of FOLDED."""
    place = rows.column("place")
    older = rows.filter(pc.greater(place, pa.scalar(1)))
    newest = rows.filter(pc.equal(place, pa.scalar(1))).select(FOLDED.names).cast(FOLDED)
    if older.num_rows == 0:
        return newest
    history: dict[tuple[str, str], list[Row]] = {}
    for row in older.sort_by("place").to_pylist():
        history.setdefault((row["table"], row["key"]), []).append(row)
    filled = [_filled(row, history.get((row["table"], row["key"]), [])) for row in _partial(newest).to_pylist()]
    return pa.concat_tables([_partial(newest, False), pa.Table.from_pylist(filled, schema=FOLDED)])


def _deaths(below: pa.Table, rows: pa.Table) -> pa.Table:
    """The deletes under those of `rows` that are still partial: of a key that another row took over.

    They must reach the store before them. Folded away, they would leave the row that is gone, and its large columns
    would be kept for the one that has its key now. Their version is below the row's, also where one transaction gave
    both the same: the store would ignore the second. Every earlier transaction's version is still smaller.
    """
    deletes = below.filter(pc.equal(below.column("op"), pa.scalar("d")))
    partial = _partial(rows).to_pylist() if deletes.num_rows else []
    taken_over = {(row["table"], row["key"]): row for row in partial}
    found: dict[tuple[str, str], Row] = {}
    for row in deletes.sort_by([("place", "descending")]).select(FOLDED.names).to_pylist() if partial else ():
        key = (row["table"], row["key"])
        if (new := taken_over.get(key)) is not None:
            version = min(row["version"], new["version"] - 1)
            found[key] = {**row, "version": version, "schema_id": new["schema_id"]}
    return pa.Table.from_pylist(list(found.values()), schema=FOLDED)


def _partial(rows: pa.Table, wanted: bool = True) -> pa.Table:
    lengths = pc.list_value_length(rows.column("unchanged").combine_chunks())
    return rows.filter(pc.equal(pc.fill_null(pc.greater(lengths, pa.scalar(0)), pa.scalar(False)), pa.scalar(wanted)))


def _filled(row: Row, older: Sequence[Row]) -> Row:
    """Fill the gaps from the nearest older change first; a delete ends the search, as nothing survives it."""
    for earlier in older:
        if earlier["op"] == "d" or not row["unchanged"]:
            break
        after, missing = splice(row["after"], earlier["after"], row["unchanged"])
        row = {**row, "after": after, "unchanged": list(missing)}
    return row


def _after_truncates(rows: pa.Table, cuts: Mapping[str, Row]) -> pa.Table:
    """Without what a truncate removed: older versions, and of equal ones the earlier rows of its own transaction."""
    for table, cut in cuts.items():
        tied = (pc.field("version") == cut["version"]) & (pc.field("commit_lsn") == cut["commit_lsn"])
        earlier = (pc.field("version") < cut["version"]) | (tied & (pc.field("ordinal") < cut["ordinal"]))
        rows = rows.filter(~((pc.field("table") == table) & earlier))
    return rows


def _below_own_rows(cuts: Mapping[str, Row]) -> dict[str, Row]:
    """The truncates with the version below: rows that their own transaction wrote after them may have the same one.

    A store that leaves tombstones of the truncate's version would ignore these rows. The versions of every earlier
    transaction are still smaller: a commit record, longer than one byte, lies between.
    """
    return {table: {**cut, "version": cut["version"] - 1} for table, cut in cuts.items()}


@dataclass(frozen=True, slots=True)
class _Removals:
    """The ranges removed in a batch, by table and the schema that it had then: the names of their columns are its."""

    of_schema: Mapping[tuple[str, int], tuple[Removal, ...]]

    @classmethod
    def read(cls, rows: pa.Table) -> "_Removals":
        """From changes of a removed range; the newest of each range."""
        found: dict[tuple[str, int], list[Removal]] = {}
        for row in rows.to_pylist():
            removal = Removal(KeyRange.parse(row["key"]), row["version"], row["commit_lsn"], row["commit_ts"])
            found.setdefault((row["table"], row["schema_id"]), []).append(removal)
        return cls({pair: tuple(removals) for pair, removals in found.items()})

    @classmethod
    def of(cls, batches: Sequence[Batch]) -> "_Removals":
        """From batches that were folded apart."""
        found: dict[tuple[str, int], dict[KeyRange, Removal]] = {}
        for batch in batches:
            for removal in batch.removed:
                known = found.setdefault((str(batch.schema.table), batch.schema.id), {})
                if (older := known.get(removal.range)) is None or older.version < removal.version:
                    known[removal.range] = removal
        return cls({pair: tuple(removals.values()) for pair, removals in found.items()})

    def applied(self, rows: pa.Table) -> pa.Table:
        """Without the rows that they take."""
        for (table, _), removals in self.of_schema.items():
            mine = pc.equal(rows["table"], pa.scalar(table)).to_numpy()
            for removal in removals:
                taken = mine.copy()
                own = rows.filter(pa.array(mine))
                taken[mine] = removal.takes(own["key"], own["version"])
                rows, mine = rows.filter(pa.array(~taken)), mine[~taken]
        return rows


def _batches(below: pa.Table, cuts: Mapping[str, Row], removals: _Removals, schema_of: SchemaOf) -> Iterator[Batch]:
    rows = merged(below)
    deaths = _deaths(below, rows)
    pairs = {(table, cut["schema_id"]) for table, cut in cuts.items()} | set(removals.of_schema)
    groups = rows.group_by(["table", "schema_id"]).aggregate([])
    pairs |= {(group["table"], group["schema_id"]) for group in groups.to_pylist()}
    cut_done: set[str] = set()
    for table, schema_id in sorted(pairs):
        schema = schema_of(TableId.parse(table), schema_id)
        truncated = cuts[table]["version"] if table in cuts and table not in cut_done else 0
        removed = removals.of_schema.get((table, schema_id), ())
        cut_done.add(table)
        if deaths.num_rows and (gone := _of(deaths, table, schema_id)).num_rows:
            yield Batch(schema, gone, truncated, removed)
            truncated, removed = 0, ()
        yield Batch(schema, _of(rows, table, schema_id) if len(pairs) > 1 else rows, truncated, removed)


def _of(rows: pa.Table, table: str, schema_id: int) -> pa.Table:
    return rows.filter(
        pc.and_(
            pc.equal(rows.column("table"), pa.scalar(table)),
            pc.equal(rows.column("schema_id"), pa.scalar(schema_id)),
        )
    )
