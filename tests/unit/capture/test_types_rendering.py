"""A value's JSON is its own: it does not depend on the values beside it, on NULLs, or on the size of the batch."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.capture.rows.byte_spans import Spans
from cdc.capture.rows.images import Cell, Template
from cdc.capture.rows.types import BUILT_IN, renderer_of
from cdc.errors import DecodeError
from cdc.model import PgType, TypeKind

BY_NAME = {kind.name: kind for kind in BUILT_IN.values()}

POOLS: dict[str, Sequence[str]] = {
    "text": ["", "a", 'q"', "\\", "\n", "\x01", "ü😀", "x" * 300],
    "int4": ["0", "-1", "123456"],
    "numeric": ["1", "-0.50", "NaN", "Infinity", "-Infinity", "9" * 80],
    "bool": ["t", "f"],
    "bytea": ["\\x", "\\x00", "\\x0001", "\\x000102", "\\xff" * 1 + "ee" * 50],
    "json": ["1", "[1,\n2]", '{"a":\t"b"}'],
    "timestamp": ["2024-01-01 00:00:00", "infinity", "0044-03-15 12:00:00 BC", "12345-01-01 00:00:00.5"],
    "timestamptz": ["2024-01-01 00:00:00.5+00", "-infinity", "0044-03-15 12:00:00+00 BC", "12345-01-01 00:00:00+00"],
    "_int4": ["{}", "{1}", "{1,NULL,-3}", "{{1,2},{3,4}}", "[2:3]={7,8}"],
    "_float8": ["{1e+300,NULL}", "{NaN}", "{-Infinity,0.5}"],
    "_text": [
        "{}", "{a}", "{a,b}", "{NULL}", "{a,NULL}", '{"a b","q\\"","NULL"}', "{{a,b},{c,d}}", "[2:2]={x}", "{ü,\x01}"],
    "_uuid": ["{}", "{a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11}"],
    "_timestamptz": ['{"2024-01-01 00:00:00+00",NULL,infinity}'],
    "_bytea": ['{"\\\\xff00",NULL}'],
    "_box": ["{(3,4),(1,2);(7,8),(5,6)}"],
}  # fmt: skip


def rendered(name: str, values: Sequence[str | None]) -> list[str]:
    """The values as they stand in images of one column."""
    renderer = renderer_of(BY_NAME[name])
    spans = Spans.pack([(value or "").encode() for value in values])
    if None in values:
        valid = np.array([value is not None for value in values])
        spans = Spans(spans.data, spans.start, spans.stop, valid)
    template = Template(("v",), (renderer.quoted,))
    images = template.images([Cell(renderer.render(spans))], spans.data, len(values))
    return [str(text)[5:-1] for text in images.to_pylist()]


@pytest.mark.parametrize("name", POOLS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_neighbours_do_not_matter(name: str, data: st.DataObject) -> None:
    values = data.draw(st.lists(st.none() | st.sampled_from(POOLS[name]), min_size=1, max_size=30))
    alone = {value: rendered(name, [value])[0] for value in set(values)}
    assert rendered(name, values) == [alone[value] for value in values]
    assert rendered(name, values * 50) == [alone[value] for value in values] * 50


@pytest.mark.parametrize("name", POOLS)
def test_every_image_is_json(name: str) -> None:
    for text in rendered(name, [*POOLS[name], None]):
        json.loads(text)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(st.characters(exclude_characters="\0", codec="utf-8")), min_size=1))
def test_text_is_escaped_as_json_demands(values: list[str]) -> None:
    assert [json.loads(text) for text in rendered("text", values)] == values


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=40), min_size=1))
def test_bytes_are_base64(values: list[bytes]) -> None:
    import base64

    texts = rendered("bytea", ["\\x" + value.hex() for value in values])
    assert [base64.b64decode(json.loads(text)) for text in texts] == values


def _quoted(element: str) -> str:
    """An element as array_out writes it."""
    special = set('{}",\\ \t\n\r\v\f')
    if element == "" or element.upper() == "NULL" or special & set(element):
        return '"' + element.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return element


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.lists(st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=8), max_size=5),
        min_size=1,
    )
)
def test_arrays_of_text_come_back(values: list[list[str | None]]) -> None:
    texts = ["{" + ",".join("NULL" if e is None else _quoted(e) for e in value) + "}" for value in values]
    assert [json.loads(text) for text in rendered("_text", texts)] == values


def test_domains_and_foreign_types_find_their_renderer() -> None:
    domain = PgType(1, "d", TypeKind.DOMAIN, PgType(2, "dd", TypeKind.DOMAIN, BY_NAME["int4"]))
    assert renderer_of(domain) == renderer_of(BY_NAME["int4"])
    array = PgType(3, "_d", TypeKind.ARRAY, domain)
    assert not renderer_of(array).quoted
    assert renderer_of(PgType(4, "geometry")).quoted
    assert renderer_of(PgType(5, "numeric", TypeKind.COMPOSITE)).quoted


def test_bytea_that_is_not_hex_is_refused() -> None:
    with pytest.raises(DecodeError, match="bytea_output"):
        rendered("bytea", ["\\001abc"])
    with pytest.raises(DecodeError, match="bytea_output"):
        rendered("bytea", ["plain"])


def test_a_torn_array_is_refused() -> None:
    with pytest.raises(DecodeError, match="array"):
        rendered("_text", ['{"a'])
