"""Programs over Arrow tables: types, conditions, rows that fail, rows that pass unchanged."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pytest

from cdc.expressions.column_types import column_of, columns_of, type_of
from cdc.expressions.expression import parse
from cdc.expressions.program import ExpressionFailed, Program, compile_program
from cdc.expressions.values import json_cells, typed, typed_or_misfits
from cdc.model import Column, PgType, TableId, TableSchema, TypeKind

INT4, NUMERIC, TEXT = PgType(23, "int4"), PgType(1700, "numeric"), PgType(25, "text")
MONEY = (12 << 16 | 2) + 4
SCHEMA = TableSchema(
    TableId("public", "orders"),
    (Column("id", INT4, key=True), Column("price", NUMERIC, MONEY), Column("quantity", INT4), Column("note", TEXT)),
)
IMAGES = pa.array(
    [
        '{"id":1,"price":1.10,"quantity":3,"note":"a"}',
        '{"id":2,"price":2.00,"quantity":0,"note":null}',
        '{"id":3,"price":null,"quantity":null,"note":"c"}',
    ]
)


def program(where: str = "", **select: str) -> Program:
    expressions = {name: parse(text, f"compute.{name}") for name, text in select.items()}
    return compile_program(expressions, parse(where, "where") if where else None, columns_of(SCHEMA))


def rows(given: Program) -> pa.Table:
    columns = columns_of(SCHEMA)
    return typed(IMAGES, {name: columns[name] for name in given.columns})


def test_values_have_types_and_the_rows_keep_their_order() -> None:
    total = program(total="price * quantity")
    assert total.types == {"total": "DECIMAL(22,2)"}
    cells = json_cells(total.run(rows(total))["total"], total.types["total"])
    assert cells.to_pylist() == ["3.30", "0.00", None]


def test_a_condition_that_is_null_does_not_hold() -> None:
    many = program("quantity >= 0", id="id")
    assert many.run(rows(many))["id"].to_pylist() == [1, 2]


def test_columns_that_the_program_does_not_know_pass() -> None:
    some = program("quantity > 0", total="price * quantity")
    given = rows(some).append_column("version", pa.array([7, 8, 9]))
    assert some.run(given).select(["version"]).to_pylist() == [{"version": 7}]


def test_a_row_without_a_value_fails_alone_and_the_reason_names_the_expression() -> None:
    share = program(share="100 / quantity", twice="quantity * 2")
    found = share.run_each(rows(share))
    assert found.failed == {1: "compute.share: division by zero"}
    assert found.rows["share"].to_pylist() == [33, None, None]
    assert found.rows["twice"].to_pylist() == [6, 0, None]
    with pytest.raises(ExpressionFailed, match=r"compute\.share: division by zero"):
        share.run(rows(share))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("note::int", "a value cannot be converted"),
        ("quantity * 2000000000", "a number is out of range"),
        ("quantity % 0", "division by zero"),
        ("price::double precision / 0", "division by zero"),
    ],
)
def test_a_reason_never_has_a_value_of_the_row(text: str, reason: str) -> None:
    failing = program(x=text)
    assert set(failing.run_each(rows(failing)).failed.values()) == {f"compute.x: {reason}"}


def test_an_expression_without_columns_has_a_value_for_every_row() -> None:
    constant = program(kind="'order'")
    assert constant.run(pa.table({"version": [1, 2]})).to_pylist() == [
        {"kind": "order", "version": 1},
        {"kind": "order", "version": 2},
    ]


def test_no_rows_have_no_values() -> None:
    total = program(total="price * quantity")
    assert total.run(rows(total).slice(0, 0)).num_rows == 0


def test_a_program_is_used_by_several_threads() -> None:
    total = program(total="price * quantity")
    given = rows(total)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: total.run(given).num_rows, range(40)))
    assert results == [3] * 40


def test_an_expression_can_be_sent_to_another_process() -> None:
    sent = pickle.loads(pickle.dumps(parse("price * quantity", "x")))
    assert sent == parse("price * quantity", "x")
    assert compile_program({"x": sent}, None, columns_of(SCHEMA)).types == {"x": "DECIMAL(22,2)"}


def test_a_value_that_does_not_fit_its_column_is_reported() -> None:
    images = pa.array(['{"quantity":1}', '{"quantity":99999999999}', "no object"])
    assert typed_or_misfits(images, {"quantity": "INTEGER"}).misfits == {1: "quantity", 2: ""}
    with pytest.raises(ValueError, match="quantity"):
        typed(images.slice(1, 1), {"quantity": "INTEGER"})


@pytest.mark.parametrize(
    ("pg", "modifier", "type_"),
    [
        (PgType(1700, "numeric"), MONEY, "DECIMAL(12,2)"),
        (PgType(1700, "numeric"), -1, "NUMERIC"),
        (PgType(1700, "numeric"), (39 << 16 | 2) + 4, "NUMERIC"),
        (PgType(1042, "bpchar"), 9, "BPCHAR"),
        (PgType(0, "mood", TypeKind.ENUM), -1, "VARCHAR"),
        (PgType(0, "positive", TypeKind.DOMAIN, INT4), -1, "INTEGER"),
        (PgType(1007, "_int4", TypeKind.ARRAY, INT4), -1, "INTEGER[]"),
        (PgType(1231, "_numeric", TypeKind.ARRAY, NUMERIC), -1, "TEXT OF _numeric"),
        (PgType(869, "inet"), -1, "TEXT OF inet"),
        (PgType(0, "pair", TypeKind.COMPOSITE), -1, "TEXT OF pair"),
    ],
)
def test_a_postgres_type_has_its_type_in_expressions(pg: PgType, modifier: int, type_: str) -> None:
    assert type_of(pg, modifier) == type_


@pytest.mark.parametrize(
    "type_", ["SMALLINT", "INTEGER", "BIGINT", "DECIMAL(12,2)", "VARCHAR", "DATE", "TIMESTAMPTZ", "INTEGER[]", "JSON"]
)
def test_a_computed_column_has_a_postgres_type_that_reads_the_same(type_: str) -> None:
    column = column_of("x", type_)
    assert type_of(column.type, column.modifier) == type_
