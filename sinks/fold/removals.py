"""The truncates and removed key ranges of a batch whose rows other processes have applied. Pure Arrow.

A task that does not see a truncate applies rows that it should have removed. Rows with a smaller version are removed
when the truncate is applied afterwards. Rows of the truncate's own transaction may have its version: those written
before it are deleted here, one version later. That is below every later transaction: a commit record lies between.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from cdc.model import LOG_SCHEMA
from cdc.ports import Batch, Schemas
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from sinks.fold.spark import FOLDED

Read = Callable[[], Iterable[pa.Table]]
"""Reads the rows of the batch, any number of times."""


def removal_batches(read: Read, tables: Collection[str], schemas: Schemas) -> Sequence[Batch]:
    """A batch per table and schema with its truncate and its removed ranges, and deletes of rows that share the
    truncate's version but were written before it."""
    wanted = pa.array(sorted(tables), pa.string())
    of_tables = pc.field("table").isin(wanted)
    found = [rows.filter(of_tables & pc.field("op").isin(["t", "p"])) for rows in read()]
    removals = pa.concat_tables([LOG_SCHEMA.empty_table(), *found])
    truncates = _newest(removals.filter(pc.field("op") == "t"))
    for rows in read() if truncates else ():
        for truncate in truncates.values():
            truncate.look_at(rows)
    batches = gather(ranked(removals), schemas).batches
    return [_with_deletes(batch, truncates) for batch in batches]


@dataclass(slots=True)
class _Truncate:
    """A table's newest truncate, and the keys of rows that have its version."""

    table: str
    version: int
    commit_lsn: int
    ordinal: int
    before: dict[str, tuple[int, object]] = field(default_factory=dict)
    """Keys written before it: schema id and commit time of the row."""
    after: set[str] = field(default_factory=set)

    def look_at(self, rows: pa.Table) -> None:
        """Note the rows of the truncate's transaction with its version."""
        tied = rows.filter(
            (pc.field("table") == self.table)
            & (pc.field("version") == self.version)
            & (pc.field("commit_lsn") == self.commit_lsn)
            & ~pc.field("op").isin(["t", "p", "m"])
        )
        for row in tied.select(["key", "op", "ordinal", "schema_id", "commit_ts"]).to_pylist():
            if row["op"] == "r" or row["ordinal"] > self.ordinal:
                self.after.add(row["key"])
            else:
                self.before[row["key"]] = (row["schema_id"], row["commit_ts"])

    def deletes(self) -> pa.Table:
        """Deletes of the keys that the truncate removed."""
        gone = {key: facts for key, facts in self.before.items() if key not in self.after}
        rows = [
            {
                "table": self.table,
                "key": key,
                "op": "d",
                "version": self.version + 1,
                "commit_lsn": self.commit_lsn,
                "commit_ts": commit_ts,
                "schema_id": schema_id,
            }
            for key, (schema_id, commit_ts) in gone.items()
        ]
        return pa.Table.from_pylist(rows, schema=FOLDED)


def _newest(rows: pa.Table) -> dict[str, _Truncate]:
    """The newest truncate of each table. An older one removes nothing that the newest would not."""
    order = [("version", "ascending"), ("commit_lsn", "ascending"), ("ordinal", "ascending")]
    names = ["table", "version", "commit_lsn", "ordinal"]
    return {row["table"]: _Truncate(**row) for row in rows.sort_by(order).select(names).to_pylist()}  # type: ignore[arg-type]


def _with_deletes(batch: Batch, truncates: dict[str, _Truncate]) -> Batch:
    truncate = truncates.get(str(batch.schema.table))
    if not batch.truncated or truncate is None:
        return batch
    return replace(batch, rows=pa.concat_tables([batch.rows, truncate.deletes()]))
