"""Random transactions on some tables as rows of the log, and a view that follows them, compared after each batch."""

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from cdc.model import LOG_SCHEMA, Column, PgType, TableId, TableSchema
from views.dataflow.graph import Graph
from views.dataflow.output import Moment, changes
from views.plan import ViewPlan
from views.state import checkpoint

INT8, INT4, TEXT = PgType(20, "int8"), PgType(23, "int4"), PgType(25, "text")
NUMERIC, FLOAT8, BOOL = PgType(1700, "numeric"), PgType(701, "float8"), PgType(16, "bool")
MONEY = ((12 << 16) | 2) + 4
"""The modifier of numeric(12,2)."""
NOW = datetime(2026, 3, 1, tzinfo=UTC)
VIEW = TableId("view", "followed")
ODD_TEXTS = ['"x"', '"y"', '"\\u001f"', '"Ü\\"q\\\\"', '"a,b}"', '""', '"null"', None]
KEYS = 5

Row = dict[str, str | None]
"""The cells of a row: JSON texts, None for null."""
Tables = dict[TableId, dict[str, Row]]
Value = Callable[[random.Random, Column], str | None]


def table_id(name: str) -> TableId:
    """A table of schema public."""
    return TableId("public", name)


def table(name: str, key: Mapping[str, PgType], /, **columns: PgType) -> TableSchema:
    """A table; numerics are numeric(12,2)."""
    every = {**key, **columns}
    made = [Column(each, type_, MONEY if type_ is NUMERIC else -1, each in key) for each, type_ in every.items()]
    return TableSchema(table_id(name), tuple(made))


def image(row: Row) -> str:
    """Cells as a JSON object."""
    return "{" + ",".join(f"{json.dumps(name)}:{cell or 'null'}" for name, cell in row.items()) + "}"


@dataclass(slots=True)
class History:
    """Transactions so far: the rows of the log, and the tables after each commit."""

    rng: random.Random
    schemas: Sequence[TableSchema]
    value: Value
    changes: list[dict[str, object]] = field(default_factory=list)
    at: dict[int, Tables] = field(default_factory=dict)
    lsn: int = 0
    tables: Tables = field(default_factory=dict)
    _ordinal: int = 0

    def transaction(self) -> None:
        """Some random statements."""
        self.lsn += 10
        self._ordinal = 0
        for _ in range(self.rng.randint(1, 8)):
            self._statement(self.rng.choice(self.schemas))
        self.at[self.lsn] = {each.table: dict(self.tables.get(each.table, {})) for each in self.schemas}

    def _statement(self, schema: TableSchema) -> None:
        rows = self.tables.setdefault(schema.table, {})
        chance = self.rng.random()
        known = self.rng.choice(sorted(rows)) if rows else ""
        if chance < 0.01:
            rows.clear()
            self.say(schema, "t", None, None)
        elif chance < 0.14 and known:
            del rows[known]
            self.say(schema, "d", known, None)
        elif chance < 0.27 and known:
            self._move(schema, rows, known)
        elif chance < 0.32 and known:
            self.say(schema, "u", known, rows[known])
        else:
            self._write(schema, rows)

    def _write(self, schema: TableSchema, rows: dict[str, Row]) -> None:
        """An insert, or an update if the row is there."""
        new = self._row(schema)
        key = image({column.name: new[column.name] for column in schema.key})
        if key in rows:
            self._update(schema, rows, key, key, new, "u")
        else:
            rows[key] = new
            self.say(schema, self.rng.choice("ccr"), key, new)

    def _move(self, schema: TableSchema, rows: dict[str, Row], former: str) -> None:
        """An update of the key, unless another row has it."""
        new = self._row(schema)
        key = image({column.name: new[column.name] for column in schema.key})
        if key not in rows:
            self.say(schema, "d", former, None)
            self._update(schema, rows, former, key, new, "c")

    def _update(self, schema: TableSchema, rows: dict[str, Row], former: str, key: str, new: Row, op: str) -> None:
        """With some columns that the server does not send, because they are as they were."""
        others = [column.name for column in schema.columns if not column.key]
        unsent = [name for name in others if self.rng.random() < 0.25]
        old = rows.pop(former)
        rows[key] = {**new, **{name: old[name] for name in unsent}}
        self.say(schema, op, key, {name: cell for name, cell in new.items() if name not in unsent}, unsent)

    def _row(self, schema: TableSchema) -> Row:
        found: Row = {}
        for column in schema.columns:
            found[column.name] = str(self.rng.randint(1, KEYS)) if column.key else self.value(self.rng, column)
        return found

    def say(self, schema: TableSchema, op: str, key: str | None, after: Row | None, unsent: Sequence[str] = ()) -> None:
        """One row of the log, in the transaction that ends at `lsn`."""
        facts: dict[str, object] = {"table": str(schema.table), "op": op, "key": key, "unchanged": list(unsent) or None}
        facts |= {"after": image(after) if after is not None else None, "before": None, "ordinal": self._ordinal}
        facts |= {"version": self.lsn, "commit_lsn": self.lsn, "xid": 1, "commit_ts": NOW, "schema_id": 1}
        self.changes.append(facts)
        self._ordinal += 1

    def batches(self, rng: random.Random) -> Iterator[tuple[int, pa.Table]]:
        """Whole transactions in random portions, each with the LSN of its end."""
        lsns, start = sorted(self.at), 0
        while start < len(lsns):
            end = min(len(lsns), start + rng.randint(1, 5))
            found = [row for row in self.changes if lsns[start] <= int(str(row["commit_lsn"])) <= lsns[end - 1]]
            yield lsns[end - 1], pa.Table.from_pylist(found, LOG_SCHEMA)
            start = end


def random_history(rng: random.Random, schemas: Sequence[TableSchema], value: Value, length: int) -> History:
    """A history with so many transactions."""
    found = History(rng, schemas, value)
    for _ in range(length):
        found.transaction()
    return found


@dataclass(slots=True)
class Followed:
    """A view's content as its changes say, and each row as of each version that was emitted."""

    rows: dict[str, str] = field(default_factory=dict)
    versions: dict[tuple[str, int], str | None] = field(default_factory=dict)

    def take(self, emitted: pa.Table) -> None:
        """Apply changes, which must be legal: an update and a delete of a row that is there, an insert of one that is
        not, with the image before it."""
        for row in emitted.to_pylist():
            assert row["before"] == self.rows.get(row["key"]), row
            if row["op"] == "d":
                del self.rows[row["key"]]
            else:
                assert row["op"] == ("u" if row["before"] else "c"), row
                assert row["before"] != row["after"], f"nothing has changed: {row}"
                self.rows[row["key"]] = row["after"]
            self.versions[row["key"], row["version"]] = row["after"]


def whole_view(plan: ViewPlan, tables: Tables) -> dict[str, str]:
    """What the referee computes."""
    assert plan.referee is not None
    found = plan.referee({each: _cells(tables.get(each, {}), names) for each, names in plan.columns.items()})
    rows = list(zip(*(found.column(name).to_pylist() for name in ("_id", "_json")), strict=True))
    assert len(dict(rows)) == len(rows), "two rows with one key"
    return dict(rows)


def _cells(rows: Mapping[str, Row], names: Sequence[str]) -> pa.Table:
    columns: dict[str, list[str | None]] = {"_id": list(rows)}
    columns |= {name: [row[name] for row in rows.values()] for name in names}
    return pa.Table.from_pydict(columns, pa.schema([(name, pa.string()) for name in columns]))


def follow(plan: ViewPlan, history: History, rng: random.Random, folder: Path | None = None) -> Followed:
    """Run a view over a history, cut at random; with a folder, it is restarted from checkpoints. After each batch its
    content is what the referee computes."""
    graph, found = plan.graph(), Followed()
    for lsn, rows in history.batches(rng):
        found.take(changes(VIEW, graph.step(rows), Moment(lsn, NOW)))
        assert found.rows == whole_view(plan, history.at[lsn]), f"at {lsn}"
        if folder is not None and rng.random() < 0.3:
            graph = restarted(plan, graph, folder)
    return found


def restarted(plan: ViewPlan, graph: Graph, folder: Path) -> Graph:
    """The graph of another process, from a checkpoint of this one."""
    checkpoint.save(folder, graph.tables, {"offset": "1"})
    again = plan.graph()
    checkpoint.load(folder, again.tables)
    return again


def assert_agree(one: Followed, other: Followed) -> None:
    """Two runs say the same of each row at each version at which both say something."""
    both = one.versions.keys() & other.versions.keys()
    assert {at: one.versions[at] for at in both} == {at: other.versions[at] for at in both}
