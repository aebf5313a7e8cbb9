"""Comparison of what a store holds with what it should: every kind of difference is found, and only those."""

import math

import pyarrow as pa
import pytest

from cdc.model import Column, PgType, TableId, TableSchema
from snapshots.verify.row_comparison import NO_DIFFERENCE, Comparison, compare

SCHEMA = TableSchema(
    TableId("public", "t"),
    (
        Column("a", PgType(23, "int4"), key=True),
        Column("b", PgType(25, "text"), key=True),
        Column("v", PgType(701, "float8")),
    ),
)


def images(rows: dict[str, str]) -> pa.Table:
    return pa.table({"key": pa.array(rows.keys(), pa.string()), "after": pa.array(rows.values(), pa.string())})


def typed(rows: list[tuple[object, ...]]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    kinds = (pa.int32(), pa.string(), pa.list_(pa.float64()))
    return pa.table(
        [pa.array(list(values), kind) for values, kind in zip(columns, kinds, strict=True)], ["a", "b", "v"]
    )


def test_equal_stores_have_no_difference() -> None:
    assert compare(SCHEMA, images({"1": "x"}), images({"1": "x"})) == NO_DIFFERENCE


def test_missing_extra_and_different_rows_are_told_apart() -> None:
    found = compare(SCHEMA, images({"1": "x", "2": "y", "3": "z"}), images({"2": "other", "3": "z", "4": "w"}))
    assert found == Comparison(frozenset({"1"}), frozenset({"4"}), frozenset({"2"}))


def test_a_row_stored_twice_is_extra() -> None:
    twice = pa.concat_tables([images({"1": "x"}), images({"1": "x"})])
    assert compare(SCHEMA, images({"1": "x"}), twice).extra == {"1"}


def test_an_empty_store_misses_everything() -> None:
    assert compare(SCHEMA, images({"1": "x"}), images({})).missing == {"1"}


@pytest.mark.parametrize("value", [[math.nan], [], None, [1.0, None]])
def test_typed_rows_are_compared_by_their_key_columns(value: object) -> None:
    expected = typed([(1, "x", value), (1, "y", [2.0])])
    found = compare(SCHEMA, expected, typed([(1, "x", value), (1, "y", [2.5]), (2, "x", None)]))
    assert found == Comparison(frozenset(), frozenset({"2\x1fx"}), frozenset({"1\x1fy"}))


def test_a_nan_equals_itself_in_a_plain_column() -> None:
    one = pa.table({"a": [1, 2], "b": ["x", "y"], "v": [math.nan, 1.0]})
    other = pa.table({"a": [1, 2], "b": ["x", "y"], "v": [math.nan, 2.0]})
    assert compare(SCHEMA, one, other).keys == {"2\x1fy"}


def test_a_column_that_the_store_lacks_is_a_difference() -> None:
    one = pa.table({"a": [1], "b": ["x"], "v": [1.0]})
    assert compare(SCHEMA, one, one.drop_columns(["v"])).different == {"1\x1fx"}
