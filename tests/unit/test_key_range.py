"""Ranges of keys: the same rows as in Postgres, whichever form the values have."""

import datetime
import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.capture.source.partition_bounds import bounds_of, unfit, values
from cdc.key_range import MAXVALUE, MINVALUE, Bound, KeyRange, Level, Removal, key_texts
from cdc.model import Column, PgType, TableId, TableSchema
from sinks.redis.keys import Names

numbers = st.integers(-3, 3)
bounds = st.one_of(numbers, st.sampled_from([float("-inf"), float("inf")]))


def bound(value: float) -> Bound:
    return {float("-inf"): MINVALUE, float("inf"): MAXVALUE}.get(value, str(value))


def after_edge(values: list[float]) -> list[float]:
    """As Postgres demands: what follows MINVALUE or MAXVALUE is the same."""
    edge = next((at for at, value in enumerate(values) if abs(value) == float("inf")), len(values))
    return [*values[:edge], *[values[edge]] * (len(values) - edge)] if edge < len(values) else values


@given(st.lists(bounds, min_size=2, max_size=2), st.lists(bounds, min_size=2, max_size=2), st.data())
def test_columns_are_compared_one_after_the_other(low: list[float], high: list[float], data: st.DataObject) -> None:
    low, high = after_edge(low), after_edge(high)
    rows = data.draw(st.lists(st.tuples(numbers, st.one_of(st.none(), numbers)), min_size=1, max_size=20))
    level = Level(("a", "b"), ("number", "number"), tuple(map(bound, low)), tuple(map(bound, high)))
    wanted = [b is not None and tuple(low) <= (a, b) < tuple(high) for a, b in rows]
    keys = pa.array([json.dumps({"a": a, "x": '","b":1', "b": b}, separators=(",", ":")) for a, b in rows])
    one = KeyRange((level,))
    assert KeyRange.parse(one.text()) == one
    assert one.contains_keys(keys).tolist() == wanted
    typed: dict[str, Any] = {"a": pa.array([a for a, _ in rows], pa.int32())}
    typed["b"] = pa.array([None if b is None else Decimal(b) for _, b in rows], pa.decimal128(10, 2))
    assert one.contains(typed).tolist() == wanted


TIMES = {
    "-infinity": False,
    "0044-03-15T00:00:00Z BC": False,
    "2025-12-31T23:59:59.999999Z": False,
    "2026-01-01T00:00:00Z": True,
    "2026-01-01T00:00:00.5Z": True,
    "2026-01-31T23:59:59.999999Z": True,
    "2026-02-01T00:00:00Z": False,
    "12026-01-15T00:00:00Z": False,
    "infinity": False,
}


def test_times_are_in_their_order_as_texts_and_as_typed_values() -> None:
    january = KeyRange((Level(("at",), ("time",), ("2026-01-01T00:00:00",), ("2026-02-01T00:00:00",)),))
    keys = pa.array([json.dumps({"id": 1, "at": text}, separators=(",", ":")) for text in TIMES])
    assert january.contains_keys(keys).tolist() == list(TIMES.values())
    until = KeyRange((Level(("at",), ("time",), (MINVALUE,), ("2026-02-01T00:00:00",)),))
    assert until.contains_keys(keys).tolist() == [True] * 6 + [False] * 3
    moments = [datetime.datetime(2026, 1, day, tzinfo=datetime.UTC) for day in (1, 31)]
    for zone in ("UTC", None):
        column = pa.array(moments, pa.timestamp("us", "UTC")).cast(pa.timestamp("us", zone))
        assert january.contains({"at": column}).tolist() == [True, True]


def test_a_list_has_its_values_and_null_only_if_it_says_so() -> None:
    some = KeyRange((Level(("kind",), ("word",), listed=('quo"te\\', "null", "a")),))
    keys = pa.array([json.dumps({"kind": kind}, separators=(",", ":")) for kind in ('quo"te\\', None, "null", "A")])
    assert some.contains_keys(keys).tolist() == [True, False, True, False]
    none = KeyRange((Level(("kind",), ("word",), listed=(None,)),))
    assert none.contains_keys(keys).tolist() == [False, True, False, False]
    assert none.condition() == '("kind" is null)'


def test_a_removal_takes_older_versions_only() -> None:
    level = Level(("id",), ("number",), ("1",), ("3",))
    removal = Removal(KeyRange((level,)), 20, 21, datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    keys = pa.array(['{"id":1}', '{"id":2}', '{"id":3}'])
    assert removal.removes(keys, pa.array([19, 20, 19])).tolist() == [True, False, False]


def test_the_names_of_rows_in_redis_give_their_keys_back() -> None:
    key = (Column("a", PgType(25, "text"), key=True), Column("b", PgType(23, "int4"), key=True))
    names = Names.of(TableSchema(TableId("public", "pairs"), key, 1), "app:", "{table}:{key}:row")
    texts = ["x", "a:b%3A{c}", "%25", "☃"]
    rows = [names.row(json.dumps({"a": text, "b": 7}, ensure_ascii=False)) for text in texts]
    assert {name: column.to_pylist() for name, column in names.parts(rows).items()} == {"a": texts, "b": ["7"] * 4}


@pytest.mark.parametrize(
    ("strategy", "said", "columns", "wanted"),
    [
        ("r", "FOR VALUES FROM ('2026-01-01') TO (MAXVALUE)", [("at", "date", "b", True)], ["2026-01-01", 1]),
        ("r", "FOR VALUES FROM ('-5') TO (10)", [("n", "int4", "b", True)], ["-5", "10"]),
        (
            "r",
            "FOR VALUES FROM ('2026-01-01 00:00:00+00') TO ('2026-01-01 00:00:00.5+00')",
            [("at", "timestamptz", "b", True)],
            ["2026-01-01T00:00:00", "2026-01-01T00:00:00.5"],
        ),
        ("l", "FOR VALUES IN ('it''s', NULL, 'NULL')", [("k", "text", "b", True)], ["it's", None, "NULL"]),
        ("l", "FOR VALUES IN (E'b\\\\\\\\s')", [("k", "text", "b", True)], ["b\\\\s"]),
        ("l", "FOR VALUES IN (true)", [("k", "bool", "b", True)], ["true"]),
        ("l", "FOR VALUES IN ('sad')", [("k", "mood", "e", True)], ["sad"]),
        ("r", "DEFAULT", [("at", "date", "b", True)], "DEFAULT"),
        ("h", "FOR VALUES WITH (modulus 2, remainder 0)", [("id", "int4", "b", True)], "HASH"),
        ("r", "FOR VALUES FROM ('a') TO ('b')", [("k", "text", "b", True)], "cannot compare"),
        ("l", "FOR VALUES IN ('a')", [("k", "text", "b", False)], "cannot compare"),
        ("r", "FOR VALUES FROM (1) TO (2)", [(None, None, None, True)], "expression"),
        ("r", "FOR VALUES FROM ('infinity') TO (MAXVALUE)", [("at", "date", "b", True)], "cannot|can be compared"),
    ],
)  # fmt: skip
def test_bounds_are_read_as_postgres_prints_them(strategy: str, said: str, columns: Any, wanted: Any) -> None:
    found = bounds_of([(strategy, said, columns)])
    if isinstance(wanted, str):
        assert any(part in found for part in wanted.split("|"))
    else:
        (level,) = json.loads(found)
        assert level.get("in", [*level.get("from", []), *level.get("to", [])]) == wanted


def test_bounds_that_the_key_does_not_show_are_not_used() -> None:
    text = KeyRange((Level(("at",), ("time",), ("2026-01-01",), ("2026-02-01",)),)).text()

    def table(*columns: tuple[str, str]) -> TableSchema:
        made = tuple(Column(name, PgType(0, type_), key=True) for name, type_ in columns)
        return TableSchema(TableId("public", "t"), made, 1)

    assert unfit(text, table(("id", "int4"), ("at", "date"))) == ""
    assert "not part of the key" in unfit(text, table(("id", "int4")))
    assert "masked" in unfit(text, table(("at", "text")))
    assert "JSON" in unfit(text, table(("at", "date"), ("doc", "jsonb")))
    assert "not known" in unfit("", table(("at", "date")))


def test_a_member_is_found_whatever_stands_around_it() -> None:
    keys = pa.array(['{"a":"\\\\\\",\\"b\\":1","b":2}', '{"b":"","a":1}', '{"b":null}', '{"a":[1,"b"],"b":-1.5}'])
    assert key_texts(keys, "b").to_pylist() == ["2", "", None, "-1.5"]
    assert list(values("1, 'x''y', NULL")) == ["1", "x'y", None]
