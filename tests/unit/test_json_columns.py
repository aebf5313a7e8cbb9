"""The column-wise reader of JSON objects, against a plain one that goes byte by byte."""

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.json_text import members as raw_json
from cdc.json_text.columns import Malformed, members

NAMES = st.text(min_size=1, max_size=6)
NUMBERS = st.sampled_from(
    ["0", "-0", "1.10", "12345678901234567890.1234567890123456789", "1e-300", "9223372036854775807"]
)
TEXTS = st.text(alphabet=st.sampled_from('ab"\\{}[],:\n\té☃🦀 /'), max_size=12)
VALUES = st.recursive(
    st.one_of(NUMBERS, st.sampled_from(["null", "true", "false"]), TEXTS.map(json.dumps)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda parts: "[" + ",".join(parts) + "]"),
        st.dictionaries(NAMES, inner, max_size=3).map(raw_json.build),
    ),
    max_leaves=6,
)
OBJECTS = st.one_of(st.none(), st.dictionaries(NAMES, VALUES, max_size=5).map(raw_json.build))


@settings(deadline=None)
@given(st.lists(OBJECTS, max_size=8))
def test_every_member_is_found_with_the_bytes_it_was_written_with(objects: list[str | None]) -> None:
    found = members(pa.array(objects, pa.string()))
    plain = [raw_json.members(text) if text is not None else {} for text in objects]
    assert set(found) == {name for row in plain for name in row}
    for name, column in found.items():
        raw = [row.get(name) for row in plain]
        assert column.json().to_pylist() == [None if text == "null" else text for text in raw]
        assert column.text().to_pylist() == [None if text in (None, "null") else raw_json.unquote(text) for text in raw]
        assert column.present.tolist() == [text is not None for text in raw]


@settings(deadline=None)
@given(st.lists(st.dictionaries(NAMES, VALUES, max_size=4), min_size=1, max_size=4))
def test_blanks_between_tokens_do_not_matter(objects: list[dict[str, str]]) -> None:
    spaced = [
        "{ " + " , ".join(f" {json.dumps(name)} :\t{value} " for name, value in row.items()) + "\n}" for row in objects
    ]
    found = members(pa.array(spaced))
    for name in {name for row in objects for name in row}:
        expected = [None if row.get(name) == "null" else row.get(name) for row in objects]
        assert found[name].json().to_pylist() == expected


@pytest.mark.parametrize(
    "text", ["", "[1]", "1", '"x"', "{", "}", '{"a":1', '{"a":1}}', '{"a":1}{"b":2}', '{"a":}', "{:1}", "{a:1}"]
)
def test_what_is_not_one_object_is_refused_and_not_guessed(text: str) -> None:
    with pytest.raises(ValueError):
        members(pa.array(['{"ok":1}', text]))


def test_a_slice_of_a_larger_array_is_read_alone() -> None:
    texts: Any = pa.array(['{"a":1}', '{"a":2}', None, '{"b":3}'])
    found = members(texts.slice(1, 3))
    assert found["a"].json().to_pylist() == ["2", None, None]
    assert found["b"].json().to_pylist() == [None, None, "3"]


def test_malformed_is_a_value_error() -> None:
    assert issubclass(Malformed, ValueError)
