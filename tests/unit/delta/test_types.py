"""Postgres types in Delta, and values that they hold exactly or not at all."""

from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from cdc.model import Column, PgType, TypeKind
from sinks.delta.rows.images import NOT_AN_OBJECT, typed
from sinks.delta.schema.types import arrow_type, can_store, widens

INT4 = PgType(23, "int4")
NUMERIC = PgType(1700, "numeric")


def modifier(precision: int, scale: int) -> int:
    return ((precision << 16) | (scale & 0x7FF)) + 4


def column(name: str, modifier: int = -1, kind: TypeKind = TypeKind.BASE, element: PgType | None = None) -> Column:
    return Column("c", PgType(0, name, kind, element), modifier)


def read(one: Column, *values: str) -> tuple[list[Any], dict[int, str]]:
    result = typed({one: arrow_type(one)}, pa.array([f'{{"c":{value}}}' for value in values]))
    return result.columns["c"].to_pylist(), result.misfits


@pytest.mark.parametrize(
    ("pg", "type_"),
    [
        ("int2", pa.int16()),
        ("int4", pa.int32()),
        ("int8", pa.int64()),
        ("oid", pa.int64()),
        ("float4", pa.float32()),
        ("float8", pa.float64()),
        ("bool", pa.bool_()),
        ("date", pa.date32()),
        ("timestamp", pa.timestamp("us")),
        ("timestamptz", pa.timestamp("us", tz="UTC")),
        ("bytea", pa.binary()),
        ("text", pa.string()),
        ("varchar", pa.string()),
        ("uuid", pa.string()),
        ("time", pa.string()),
        ("interval", pa.string()),
        ("jsonb", pa.string()),
        ("money", pa.string()),
        ("numeric", pa.string()),
    ],
)
def test_a_base_type_has_its_delta_type(pg: str, type_: pa.DataType) -> None:
    assert arrow_type(column(pg)) == type_


@pytest.mark.parametrize(
    ("precision", "scale", "type_"),
    [
        (10, 2, pa.decimal128(10, 2)),
        (38, 38, pa.decimal128(38, 38)),
        (39, 2, pa.string()),
        (5, -2, pa.string()),
        (2, 5, pa.string()),
        (1000, 0, pa.string()),
    ],
)
def test_a_numeric_is_a_decimal_only_where_every_digit_fits(precision: int, scale: int, type_: pa.DataType) -> None:
    assert arrow_type(column("numeric", modifier(precision, scale))) == type_


def test_domains_are_their_base_and_other_kinds_are_text() -> None:
    positive = PgType(1, "positive", TypeKind.DOMAIN, PgType(2, "small", TypeKind.DOMAIN, INT4))
    assert arrow_type(Column("c", positive)) == pa.int32()
    for kind in (TypeKind.ARRAY, TypeKind.ENUM, TypeKind.COMPOSITE, TypeKind.RANGE, TypeKind.MULTIRANGE):
        assert arrow_type(column("int4", kind=kind)) == pa.string()


def test_values_keep_every_digit() -> None:
    digits = "-12345678901234567890.0123456789"
    assert read(column("numeric", modifier(38, 10)), digits, "1.5", "null")[0] == [
        Decimal(digits),
        Decimal("1.5"),
        None,
    ]
    assert read(column("numeric"), digits, "1.10", '"NaN"')[0] == [digits, "1.10", "NaN"]
    assert read(column("int8"), "9223372036854775807", "-9223372036854775808")[0] == [2**63 - 1, -(2**63)]
    assert read(column("float8"), "0.1", "1e-320", '"-Infinity"')[0] == [0.1, 1e-320, float("-inf")]


def test_times_are_exact_to_the_microsecond() -> None:
    assert read(column("timestamp"), '"2024-01-31T10:00:00.000001"')[0] == [datetime(2024, 1, 31, 10, 0, 0, 1)]
    assert read(column("timestamptz"), '"1901-12-31T23:59:59.9Z"')[0] == [
        datetime(1901, 12, 31, 23, 59, 59, 900000, tzinfo=UTC)
    ]
    assert read(column("date"), '"0001-01-01"', '"9999-12-31"')[0] == [date(1, 1, 1), date(9999, 12, 31)]


def test_documents_and_arrays_are_their_json_text_and_bytes_are_bytes() -> None:
    assert read(column("jsonb"), '{"n":1.10,"a":[null]}', '"x"', "7")[0] == ['{"n":1.10,"a":[null]}', '"x"', "7"]
    assert read(column("_int4", kind=TypeKind.ARRAY, element=INT4), "[[1,2],[3,null]]")[0] == ["[[1,2],[3,null]]"]
    assert read(column("bytea"), '"aGk="', '""')[0] == [b"hi", b""]


@pytest.mark.parametrize(
    ("one", "value", "name"),
    [
        (column("timestamptz"), '"infinity"', "timestamp"),
        (column("timestamp"), '"0044-03-15T00:00:00 BC"', "timestamp_ntz"),
        (column("timestamp"), '"294276-12-31T23:59:59"', "timestamp_ntz"),
        (column("date"), '"-infinity"', "date"),
        (column("date"), '"10000-01-01"', "date"),
        (column("numeric", modifier(10, 2)), '"NaN"', "decimal(10,2)"),
        (column("numeric", modifier(10, 2)), "123456789.5", "decimal(10,2)"),
        (column("numeric", modifier(10, 2)), "1.005", "decimal(10,2)"),
        (column("int2"), "40000", "short"),
        (column("int4"), '"text"', "integer"),
        (column("float4"), "1e40", "float"),
        (column("bytea"), '"not base64!"', "binary"),
    ],
)
def test_a_value_that_does_not_fit_is_named_and_its_neighbours_flow(one: Column, value: str, name: str) -> None:
    fine = "null"
    values, misfits = read(one, fine, value, fine, value)
    assert misfits == dict.fromkeys((1, 3), f"column c: value does not fit {name}")
    assert values == [None] * 4


def test_a_broken_image_is_set_aside_alone() -> None:
    result = typed({column("int4"): pa.int32()}, pa.array(['{"c":1}', '{"c":', None, '{"c":3}']))
    assert result.misfits == {1: NOT_AN_OBJECT}
    assert result.columns["c"].to_pylist() == [1, None, None, 3]


def test_one_odd_value_among_many_is_found_without_a_loop_over_all() -> None:
    values = [str(number) for number in range(5000)]
    values[4321] = '"infinity"'
    read_values, misfits = read(column("int4"), *values)
    assert list(misfits) == [4321]
    assert read_values[4320:4323] == [4320, None, 4322]


def test_only_what_loses_nothing_counts_as_wider() -> None:
    assert widens(pa.int32(), pa.int64()) and not widens(pa.int64(), pa.int32())
    assert widens(pa.decimal128(10, 2), pa.decimal128(12, 2)) and widens(pa.decimal128(10, 2), pa.decimal128(12, 4))
    assert not widens(pa.decimal128(10, 2), pa.decimal128(12, 6))
    assert not widens(pa.int32(), pa.string()) and not widens(pa.int64(), pa.float64())
    assert can_store(pa.int64(), pa.int16()) and not can_store(pa.int16(), pa.int64())
