"""What a task reports to the driver after a share: counts, and the few rows that the driver must treat itself.

Outcomes travel as rows of OUTCOME. Nothing in them is unpickled or evaluated.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cdc import errors
from cdc.errors import Busy, LogCorrupt, MillraceError, TableRefused
from cdc.model import TableId, TableSchema
from cdc.ports import Share
from sinks.apply.timings import Histogram, ages
from sinks.fold.spark import FOLDED

_FIELDS: dict[str, pa.DataType] = {
    "kind": pa.string(),
    "table": pa.string(),
    "schema_id": pa.int32(),
    "content": pa.binary(),
}
OUTCOME = pa.schema(_FIELDS)
"""One row of kind `facts` per share; a row per piece of kind `rows` (an Arrow stream of FOLDED) or `staged`."""
_FAILURES = {kind.__name__: kind for kind in (errors.Lost, errors.LogLost, errors.StoreRefused, errors.LogCorrupt)}


class Piece(NamedTuple):
    """Rows, or staged content, of one table and schema."""

    table: str
    schema_id: int
    content: bytes

    def rows(self) -> pa.Table:
        """The rows of FOLDED in it."""
        with pa.ipc.open_stream(self.content) as stream:
            return stream.read_all()


@dataclass(slots=True)
class Outcome:
    """The outcome of one share, or of several together."""

    shares: list[Share] = field(default_factory=list)
    progress: str | None = None
    """Where the batch ends; one of its tasks knows."""
    changes: dict[str, int] = field(default_factory=dict)
    visible: Histogram = field(default_factory=Histogram)
    newest: datetime | None = None
    set_apart: list[Piece] = field(default_factory=list)
    """Rows that the driver applies, in this order: rejected ones, those whose stored row is missing, those whose key
    has a dead letter, and all rows of a table that several tasks cannot write."""
    staged: list[Piece] = field(default_factory=list)
    """What tasks have written for a commit of the driver (`cdc.ports.StagingSink`)."""
    removals: set[str] = field(default_factory=set)
    """Tables with a truncate or a removed key range in the batch: the driver applies it after the tasks."""
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)
    """Tables that the store cannot take, with message and remedy."""
    failure: tuple[str, str, str, float] | None = None
    """Why a task could not finish: the kind of error, its message and remedy, and after how many seconds to retry."""

    # -- in the task

    def count(self, schema: TableSchema, rows: pa.Table) -> None:
        """Count rows that were applied."""
        table = str(schema.table)
        self.changes[table] = self.changes.get(table, 0) + rows.num_rows
        self.visible.add(ages(rows, datetime.now(UTC)))

    def set_rows_apart(self, schema: TableSchema, rows: pa.Table) -> None:
        """Leave rows to the driver."""
        if rows.num_rows:
            self.set_apart.append(Piece(str(schema.table), schema.id, _stream(rows)))

    def fail(self, error: MillraceError) -> None:
        """Record why the share is not finished."""
        after = error.retry_after if isinstance(error, Busy) else 0.0
        self.failure = (type(error).__name__, error.message, error.remedy, after)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """As rows of OUTCOME."""
        facts = {
            "shares": self.shares,
            "progress": self.progress,
            "changes": self.changes,
            "ages": self.visible.counts,
            "total": self.visible.total,
            "newest": None if self.newest is None else self.newest.isoformat(),
            "removals": sorted(self.removals),
            "refused": self.refused,
            "failure": self.failure,
        }
        rows = [("facts", "", 0, json.dumps(facts).encode())]
        rows += [("rows", *piece) for piece in self.set_apart]
        rows += [("staged", *piece) for piece in self.staged]
        for row in rows:  # each in a batch of its own: a piece may have many megabytes
            yield pa.RecordBatch.from_arrays(
                [pa.array([value], kind.type) for value, kind in zip(row, OUTCOME, strict=True)], schema=OUTCOME
            )

    # -- in the driver

    @classmethod
    def read(cls, rows: pa.Table) -> "Outcome":
        """The outcomes of all tasks together."""
        found = cls()
        pieces = {"rows": found.set_apart, "staged": found.staged}
        for kind, table, schema_id, content in zip(*(rows[name].to_pylist() for name in OUTCOME.names), strict=True):
            if kind == "facts":
                found._add(json.loads(content))
            else:
                pieces[kind].append(Piece(table, schema_id, content))
        return found

    def _add(self, facts: dict[str, Any]) -> None:
        self.shares += facts["shares"]
        self.progress = facts["progress"] or self.progress
        for table, count in facts["changes"].items():
            self.changes[table] = self.changes.get(table, 0) + count
        self.visible.merge(facts["ages"], facts["total"])
        newest = facts["newest"] and datetime.fromisoformat(facts["newest"])
        self.newest = max(filter(None, (self.newest, newest)), default=None)
        self.removals |= set(facts["removals"])
        self.refused |= {table: (message, remedy) for table, (message, remedy) in facts["refused"].items()}
        self.failure = self.failure or (facts["failure"] and tuple(facts["failure"]))

    def error(self) -> MillraceError | None:
        """The failure as the error that the task met."""
        if self.failure is None:
            return None
        kind, message, remedy, after = self.failure
        return Busy(message, remedy, after) if kind == "Busy" else _FAILURES.get(kind, MillraceError)(message, remedy)

    def refusals(self) -> Iterator[tuple[TableId, TableRefused]]:
        """The tables that the store cannot take, with the error."""
        for table, why in sorted(self.refused.items()):
            yield TableId.parse(table), TableRefused(table, MillraceError(*why))


def only_keys(rows: pa.Table, keys: Iterable[str]) -> tuple[pa.Table, pa.Table]:
    """The rows with these keys, and the others."""
    chosen = list(keys)
    if not chosen:
        return rows.slice(0, 0), rows
    wanted = pc.is_in(rows.column("key"), value_set=pa.array(chosen, pa.string()))
    return rows.filter(wanted), rows.filter(pc.invert(wanted))


def _stream(rows: pa.Table) -> bytes:
    if not rows.schema.equals(FOLDED):
        raise LogCorrupt("Rows set apart by a task do not have the columns of a folded batch.", "Report this.")
    with pa.BufferOutputStream() as sink:
        with pa.ipc.new_stream(sink, FOLDED) as stream:
            stream.write_table(rows)
        return sink.getvalue().to_pybytes()
