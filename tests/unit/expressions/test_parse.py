"""Expressions are refused with their place, the position in the text and a remedy."""

import pytest

from cdc.errors import ConfigError
from cdc.expressions.expression import parse
from cdc.expressions.program import compile_program

COLUMNS = {
    "id": "BIGINT",
    "price": "DECIMAL(12,2)",
    "quantity": "INTEGER",
    "amount": "NUMERIC",
    "name": "VARCHAR",
    "Name": "VARCHAR",
    "ip": "TEXT OF inet",
    "ratio": "DOUBLE",
    "payload": "JSON",
}


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        compile_program({"x": parse(text, "compute.x")}, None, COLUMNS)
    return str(caught.value)


def test_the_columns_of_an_expression_are_folded_as_postgres_folds_them() -> None:
    assert parse('Price * QUANTITY + length("Name")', "x").columns == ("price", "quantity", "Name")


def test_columns_that_differ_by_case_are_two() -> None:
    assert compile_program({"x": parse('"Name" || name', "x")}, None, COLUMNS).columns == ("name", "Name")


def test_an_expression_that_is_a_column_says_so() -> None:
    assert parse("price", "x").column == "price"
    assert parse("price + 1", "x").column is None


def test_an_unknown_column_is_named_with_its_place_and_near_matches() -> None:
    message = refused("price *\n  quantiti")
    assert message.startswith("compute.x, line 2, column 3: unknown column 'quantiti'. Did you mean quantity?")
    assert "Columns: id, price" in message


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the expression is empty"),
        ("price *", "line 1, column 7: this is no SQL expression"),
        ("price quantity", "'price AS quantity' is not available"),
        ("price; quantity", "not available"),
        ("drop table orders", "not available"),
        ("(select 1)", "a subquery"),
        ("exists (select 1)", "a subquery"),
        ("price in (select 1)", "a subquery"),
        ("count(*) over ()", "a window function"),
        ("sum(price)", "sum needs several rows"),
        ("now()", "line 1, column 1: now does not give the same value"),
        ("random() < 0.1", "random does not give the same value"),
        ("clock_timestamp()", "clock_timestamp does not give the same value"),
        ("current_date", "current_date does not give the same value"),
        ("gen_random_uuid()", "gen_random_uuid does not give the same value"),
        ("id + lwer(name)", "the function lwer is not available. Did you mean lower"),
        ("to_char(price, '9')", "the function to_char is not available"),
        ("amount + 1", "column amount is numeric without precision"),
        ("amount + 1", "amount::numeric(18,4)"),
        ("coalesce(amount, 0)", "column amount is numeric without precision"),
        ("ip = '10.0.0.1'", "column ip is inet, which expressions have as text only. Cast it: ip::text"),
        ("price / 2", "a division of numerics"),
        ("ratio::text", "a double as text"),
        ("name || ratio", "a double in a text"),
        ("round(ratio, 2)", "round of a double"),
        ("name::numeric", "not available"),
        ("quantity = name", "text is compared with integer"),
        ("quantity = 'three'", "'three' is no integer"),
        ("not name", "boolean is needed here"),
        ("name and true", "boolean is needed here"),
        ("upper(quantity)", "the types do not fit together"),
        ("quantity <> any(name)", "ANY"),
        ("name ->> 'a'", "json is needed here"),
        ("payload -> 'a'", "a part of a JSON value"),
        ("name::json", "a cast to json is not available"),
        (r"name ~ '\bx'", "the pattern must be written here, and without"),
        ("name ~ '('", "the pattern: "),
        ("name ~ name", "the pattern must be written here"),
        ("split_part(name, '', 1)", "split_part needs a separator"),
        ("split_part(name, ',', 0)", "split_part needs a separator"),
        ("substring(name, 1, quantity)", "the length must be written as a number"),
        ("orders.price", "unknown column 'orders.price'"),
    ],
)
def test_what_has_no_value_of_postgres_is_refused(text: str, part: str) -> None:
    assert part in refused(text)


def test_a_condition_is_boolean() -> None:
    with pytest.raises(ConfigError, match="the condition is integer, not boolean"):
        compile_program({}, parse("quantity", "where"), COLUMNS)


def test_aggregates_are_accepted_where_the_caller_groups_rows() -> None:
    total = parse("sum(price * quantity)", "view.total", aggregates=True)
    assert compile_program({"total": total}, None, COLUMNS).types == {"total": "DECIMAL(38,2)"}


def test_a_message_has_the_literals_of_the_expression_only() -> None:
    assert len(refused(f"quantity = '{'x' * 500}'")) < 300
