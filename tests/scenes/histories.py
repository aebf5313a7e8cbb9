"""Random histories that a Postgres could have written, and what a plain reader makes of them.

Nothing here uses the code under test: the fold and the final state are written down again, slowly and simply.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from cdc.key_range import KeyRange, Level, Removal
from cdc.model import LOG_SCHEMA, Column, PgType, TableId, TableSchema
from cdc.ports import Batch
from sinks.fold.spark import FOLDED

INT4, INT8, TEXT, NUMERIC = PgType(23, "int4"), PgType(20, "int8"), PgType(25, "text"), PgType(1700, "numeric")
JSONB, STAMP, BOOL, FLOAT8 = (
    PgType(3802, "jsonb"),
    PgType(1184, "timestamptz"),
    PgType(16, "bool"),
    PgType(701, "float8"),
)
WHEN = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)

Row = dict[str, Any]
"""A change: the columns of LOG_SCHEMA."""


def table(name: str = "items", key: Sequence[tuple[str, PgType]] = (("id", INT4),), schema_id: int = 1) -> TableSchema:
    """A table with one column of each troublesome kind; `big` is the one that the server leaves out."""
    columns = [Column(column, kind, key=True) for column, kind in key]
    columns += [Column("label", TEXT), Column("amount", NUMERIC), Column("doc", JSONB)]
    columns += [Column("at", STAMP), Column("good", BOOL), Column("ratio", FLOAT8), Column("big", TEXT)]
    return TableSchema(TableId("public", name), tuple(columns), id=schema_id, oid=16384)


LABELS = ['"plain"', '"zwölf ☃ 🦀"', r'"quo\"te \\ back"', r'"line\nbreak\ttab"', '""', "null", '"{\\"index\\":{}}"']
AMOUNTS = ["0", "1.10", "-12345678901234567890.1234567890123456789", "1234567890123456789012345678901234567890", "null"]
DOCS = ['{"a":[1,{"b":"}]"}],"n":12345678901234567890.10}', "[1,2]", '"text"', "7", "null", '{"é":null}']
STAMPS = ['"2024-01-31T10:00:00.5Z"', '"0044-03-15T00:00:00Z BC"', '"infinity"', "null"]
RATIOS = ["1.5", "-0", "1e-300", '"NaN"', '"Infinity"', "null"]


def image(key: Row, rng: random.Random) -> dict[str, str]:
    """A full row as raw JSON values."""
    values = {
        "label": rng.choice(LABELS),
        "amount": rng.choice(AMOUNTS),
        "doc": rng.choice(DOCS),
        "at": rng.choice(STAMPS),
        "good": rng.choice(["true", "false", "null"]),
        "ratio": rng.choice(RATIOS),
        "big": f'"{rng.choice("abc") * rng.randint(1, 50)}{rng.randint(0, 99999)}"',
    }
    return {**key, **values}


def text(values: dict[str, str]) -> str:
    """Raw values as the log writes an object."""
    return "{" + ",".join(f"{json.dumps(name, ensure_ascii=False)}:{value}" for name, value in values.items()) + "}"


@dataclass
class History:
    """Writes changes the way row locks allow, and knows the state after each."""

    schema: TableSchema
    keys: list[dict[str, str]]
    rng: random.Random
    rows: list[Row] = field(default_factory=list)
    live: dict[str, dict[str, str]] = field(default_factory=dict)
    version: int = 1 << 60  # where doubles are 256 apart

    def write(self, count: int) -> "History":
        """Append so many statements."""
        for _ in range(count):
            self._statement(self.rng.choice(self.keys))
        return self

    def state(self) -> dict[str, str]:
        """Key to image, as a select would give it now."""
        return {key: text(values) for key, values in self.live.items()}

    def _statement(self, key: dict[str, str]) -> None:
        self.version += self.rng.randint(25, 60)  # a commit record lies between two transactions
        name, chance = text(key), self.rng.random()
        if chance < 0.02:
            self._add("t", None)
            self.live.clear()
        elif chance < 0.05:
            self._remove(key)
        elif name not in self.live:
            self.live[name] = image(key, self.rng)
            self._add("c", name, self.live[name])
        elif chance < 0.25:
            del self.live[name]
            self._add("d", name)
        elif chance < 0.40:
            self._move(name, self.rng.choice(self.keys))
        else:
            self._update(name, key, partial=chance < 0.75)

    def _remove(self, key: dict[str, str]) -> None:
        """A partition goes with its rows: some values of the key's first column."""
        column, low = next(iter(key.items()))
        if low.startswith('"'):
            level = Level((column,), ("word",), listed=(json.loads(low),))
        else:
            level = Level((column,), ("number",), (low,), (str(int(low) + 3),))
        gone = KeyRange((level,)).text()
        self._add("p", gone)
        self.live = {name: values for name, values in self.live.items() if not _in_range(name, gone)}

    def _update(self, name: str, key: dict[str, str], partial: bool) -> None:
        values = image(key, self.rng)
        if partial:
            values["big"] = self.live[name]["big"]
        self.live[name] = values
        sent = {column: value for column, value in values.items() if not (partial and column == "big")}
        self._add("u", name, sent, ["big"] if partial else None)

    def _move(self, old: str, key: dict[str, str]) -> None:
        if text(key) in self.live:
            return
        values = {**self.live.pop(old), **key}
        self.live[text(key)] = values
        self._add("d", old)
        self._add("c", text(key), values)

    def _add(
        self, op: str, key: str | None, after: dict[str, str] | None = None, gone: list[str] | None = None
    ) -> None:
        self.rows.append(
            change(
                op, key, self.version, text(after) if after is not None else None, gone,
                table=str(self.schema.table), ordinal=len(self.rows), schema_id=self.schema.id,
            )
        )  # fmt: skip


def change(
    op: str,
    key: str | None,
    version: int,
    after: str | None = None,
    unchanged: list[str] | None = None,
    table: str = "public.items",
    ordinal: int = 0,
    schema_id: int = 1,
) -> Row:
    """One row of the log."""
    return {
        "table": table, "op": op, "key": key, "after": after, "before": None, "unchanged": unchanged,
        "version": version, "commit_lsn": version + 1, "ordinal": ordinal, "xid": 7, "commit_ts": WHEN,
        "schema_id": schema_id,
    }  # fmt: skip


def log_table(rows: Sequence[Row]) -> pa.Table:
    """Rows as the log holds them."""
    return pa.Table.from_pylist(list(rows), schema=LOG_SCHEMA)


def folded(rows: Sequence[Row]) -> tuple[dict[str, Row], int]:
    """The fold of one table, by the book: newest change per key, gaps filled from older ones; newest truncate.

    The truncate has a version below that of the rows behind it, which may be its own.
    """
    cut = max((row for row in rows if row["op"] == "t"), key=_order, default=None)
    ranges = removed(rows)
    newest: dict[str, Row] = {}
    for row in sorted((row for row in rows if row["key"] is not None and row["op"] != "p"), key=_order):
        if any(row["version"] < version and _in_range(row["key"], one) for one, version in ranges.items()):
            continue
        if cut is None or row["version"] > cut["version"] or _order(row) > _order(cut):
            newest[row["key"]] = _onto(newest.get(row["key"]), row)
    return newest, cut["version"] - 1 if cut else 0


def removed(rows: Sequence[Row]) -> dict[str, int]:
    """The ranges that went, each with its newest version."""
    return {row["key"]: row["version"] for row in sorted(rows, key=_order) if row["op"] == "p"}


def _in_range(key: str, text: str) -> bool:
    """Of the ranges that histories write: one column each."""
    (level,) = json.loads(text)
    value = json.loads(key)[level["columns"][0]]
    return value in level["in"] if "in" in level else int(level["from"][0]) <= value < int(level["to"][0])


def _order(row: Row) -> tuple[int, int, int]:
    return row["version"], row["commit_lsn"], row["ordinal"] + (row["op"] == "r") * 2**62


def _onto(older: Row | None, row: Row) -> Row:
    op = "d" if row["op"] == "d" else "u"
    missing = list(row["unchanged"] or [])
    if op == "d" or not missing or older is None or older["op"] == "d":
        return {**row, "op": op, "unchanged": missing}
    base, own = raw(older["after"]), raw(row["after"])
    names = [*base, *(name for name in own if name not in base)]
    merged = {name: own.get(name, base.get(name, "")) for name in names if name in own or name in missing}
    return {**row, "op": op, "after": text(merged), "unchanged": [name for name in missing if name not in merged]}


class _Raw(float):
    """A number that remembers how it was written."""

    def __new__(cls, written: str) -> "_Raw":
        self = super().__new__(cls, "0")
        self.written = written
        return self

    written: str


def raw(after: str) -> dict[str, str]:
    """Name to raw value by Python's own parser: slow, and independent of cdc.json_text.members."""
    parsed = json.loads(after, parse_int=_Raw, parse_float=_Raw)
    return {name: _write(value) for name, value in parsed.items()}


def _write(value: Any) -> str:
    if isinstance(value, _Raw):
        return value.written
    if isinstance(value, dict):
        return text({name: _write(item) for name, item in value.items()})
    if isinstance(value, list):
        return "[" + ",".join(_write(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def batch(schema: TableSchema, rows: Sequence[Row]) -> Batch:
    """The folded batch of these changes of one table."""
    newest, truncated = folded(rows)
    columns = [{name: row[name] for name in FOLDED.names} for row in newest.values()]
    gone = [Removal(KeyRange.parse(text), version, version + 1, WHEN) for text, version in removed(rows).items()]
    return Batch(schema, pa.Table.from_pylist(columns, schema=FOLDED), truncated, tuple(gone))


def labelled(count: int, version: int, label: str = "x") -> list[Row]:
    """Updates of the rows 0 to `count`, all to one label."""
    return [change("u", f'{{"id":{key}}}', version, f'{{"id":{key},"label":"{label}"}}') for key in range(count)]


def state_of(rows: Sequence[Row]) -> dict[str, str]:
    """Whole rows as a reader finds them later."""
    return {row["key"]: row["after"] for row in rows}


def cut(rows: Sequence[Row], rng: random.Random, size: int = 12) -> Iterator[list[Row]]:
    """Slices of random length; a statement's own rows stay together."""
    start = 0
    while start < len(rows):
        end = min(len(rows), start + rng.randint(1, size))
        while end < len(rows) and rows[end]["version"] == rows[end - 1]["version"]:
            end += 1
        yield list(rows[start:end])
        start = end


def images(state: dict[str, str]) -> pa.Table:
    """A state as `Sink.expected` takes it."""
    return pa.table(
        {"key": list(state), "after": list(state.values())},
        schema=pa.schema([("key", pa.string()), ("after", pa.string())]),
    )


INTEGERS = [{"id": str(number)} for number in range(1, 9)]
_ODD = [
    "a",
    "A",
    "a:b",
    "a%3Ab",
    "{tag}",
    "new\nline",
    'quo"te',
    "back\\slash",
    "☃",
    " ",
    "*",
    "?[x]",
    "_all",
    "x" * 700,
]
ODD_TEXTS = [{"id": json.dumps(key, ensure_ascii=False)} for key in _ODD]
PAIRS = [{"id": str(number), "part": json.dumps(part)} for number in (1, 2) for part in ("a", "a:b", "", '"]')]
