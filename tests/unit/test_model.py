"""Names and positions read back as they were written."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.model import Lsn, TableId, format_lsn, parse_lsn

names = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=63)


@given(st.integers(0, 2**64 - 1))
def test_an_lsn_reads_back_as_it_was_written(value: int) -> None:
    assert parse_lsn(format_lsn(Lsn(value))) == value


@pytest.mark.parametrize("text", ["", "16", "16/", "/16", "123456789/0", "x/y", "1/2/3"])
def test_what_is_not_an_lsn_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_lsn(text)


@given(names, names)
def test_a_table_with_any_name_reads_back_as_it_was_written(schema: str, name: str) -> None:
    assert TableId.parse(str(TableId(schema, name))) == TableId(schema, name)


def test_ordinary_names_are_not_quoted_and_dotted_ones_are() -> None:
    assert str(TableId("public", "orders")) == "public.orders"
    assert str(TableId("public", "a.b")) == 'public."a.b"'


@pytest.mark.parametrize("text", ["orders", "a.b.c", ".orders", "public.", '"public.orders', 'public."a"b'])
def test_a_name_that_is_not_a_table_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError):
        TableId.parse(text)
