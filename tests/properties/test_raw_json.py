"""Raw JSON: taken apart and put together, every byte of a value stays."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.json_text.members import build, elements, members, quote, splice, unquote

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
objects = st.dictionaries(st.text(), values, max_size=6)


@given(objects, st.sampled_from([None, 1]))
def test_members_are_the_values_by_name(value: dict[str, object], indent: int | None) -> None:
    raw = members(json.dumps(value, indent=indent))
    assert {name: json.loads(text) for name, text in raw.items()} == value
    assert list(raw) == list(value)


@given(objects)
def test_building_what_was_taken_apart_gives_the_same_text(value: dict[str, object]) -> None:
    text = build({name: json.dumps(item) for name, item in value.items()})
    assert build(members(text)) == text


@given(st.lists(values, max_size=6))
def test_elements_are_the_items_in_order(value: list[object]) -> None:
    assert [json.loads(text) for text in elements(json.dumps(value))] == value


@given(st.text())
def test_quoting_and_unquoting_are_opposites(text: str) -> None:
    assert unquote(quote(text)) == text
    assert json.loads(quote(text)) == text


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(), min_size=1), st.sets(st.sampled_from("abcdef")))
def test_a_spliced_row_is_the_newer_one_with_the_missing_columns_kept(row: dict[str, int], missing: set[str]) -> None:
    newer = {name: value + 1 for name, value in row.items() if name not in missing}
    whole, lacking = splice(json.dumps(newer), json.dumps(row), sorted(missing))
    assert json.loads(whole) == {name: newer.get(name, row[name]) for name in row}
    assert lacking == tuple(sorted(missing - set(row)))


@given(objects, st.integers(0, 200))
def test_a_text_cut_short_is_refused(value: dict[str, object], cut: int) -> None:
    text = json.dumps(value)
    if cut < len(text):
        with pytest.raises(ValueError, match="malformed JSON"):
            members(text[:cut])


def test_digits_are_never_touched() -> None:
    image = '{"n":123456789012345678901234567890.10,"e":1e400,"t":"a\\"b}"}'
    assert members(image) == {"n": "123456789012345678901234567890.10", "e": "1e400", "t": '"a\\"b}"'}


def test_a_number_may_have_as_many_digits_as_postgres_gives_it() -> None:
    digits = "9" * 131_072
    assert members(f'{{"n":{digits},"m":[-{digits}.5]}}') == {"n": digits, "m": f"[-{digits}.5]"}


@pytest.mark.parametrize("value", ["tru", "1x", "01.", "[1,]", '{"a"}', "[tru]", "'a'", ""])
def test_a_value_that_is_not_json_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="malformed JSON"):
        members(f'{{"a":{value}}}')


def test_nesting_deeper_than_the_stack_is_no_trouble() -> None:
    deep = "[" * 100_000 + "]" * 100_000
    assert members(f'{{"a":{deep},"b":1}}') == {"a": deep, "b": "1"}
