"""Arrays as JSON arrays whose elements are rendered by their own type.

Plain numbers and plain words are translated byte by byte, the whole column at once. Everything else is parsed once per
distinct value, and its elements are rendered together. An array with shifted bounds (`[2:3]={7,8}`) stays a string of
its Postgres text: a JSON array has no bounds, and dropping them would change the value.
"""

import json
import re
from collections.abc import Callable, Sequence

import numpy as np

from cdc.arrays import Bools, Ints
from cdc.capture.rows.byte_spans import Spans, distinct, few, gather
from cdc.capture.rows.types.rendering import Rendered, Renderer, overlaid, register_arrays, unchanged
from cdc.capture.rows.types.text import Replacements
from cdc.capture.rows.types.text import render as render_text
from cdc.errors import DecodeError
from cdc.model import PgType

_NUMBERS = frozenset({"int2", "int4", "int8", "oid", "float4", "float8", "numeric"})
_TRANSLATED = np.arange(256, dtype=np.uint8)
_TRANSLATED[np.frombuffer(b"{}NUL", np.uint8)] = np.frombuffer(b"[]nul", np.uint8)
_NO_NUMBER = np.ones(256, np.bool_)
_NO_NUMBER[np.frombuffer(b"{}NUL0123456789,.+-e", np.uint8)] = False
_WORDS = Replacements({ord("{"): b'["', ord("}"): b'"]', ord(","): b'","'})
_OPEN, _COMMA, _CLOSE = ord("{"), ord(","), ord("}")
_Convert = Callable[[list[bytes]], list[bytes]]


def array_of(element: PgType, renderer: Renderer) -> Renderer:
    """Arrays of one element type, split at that type's delimiter: a comma, or a semicolon for `box`."""
    convert = _by_value(_tokens(element.delimiter.encode()), renderer)
    if element.name in _NUMBERS:
        return Renderer(lambda spans: _numbers(spans, convert), quoted=False)
    if renderer.render in (render_text, unchanged) and renderer.quoted and element.delimiter == ",":
        return Renderer(lambda spans: _words(spans, convert), quoted=False)
    return Renderer(lambda spans: _values(spans, convert), quoted=False)


def _values(spans: Spans, convert: _Convert) -> Rendered:
    values, codes = distinct(spans)
    return Rendered(Spans.pack(convert(values) or [b""]), spans.valid, codes)


def _numbers(spans: Spans, convert: _Convert) -> Rendered:
    """`{1,NULL}` to `[1,null]`, byte for byte; rows with NaN, an infinity or bounds are converted one by one."""
    if few(len(spans)):
        return _values(spans, convert)
    column = gather(spans)
    odd = _rows_with(column, _NO_NUMBER[column.data].nonzero()[0])
    made = Spans(_TRANSLATED[column.data], column.start, column.stop)
    return Rendered(made, spans.valid) if odd is None else _mixed(column, made, odd, convert, spans)


def _words(spans: Spans, convert: _Convert) -> Rendered:
    """`{a,b}` to `["a","b"]`: one dimension, nothing quoted, no NULL; other rows are converted one by one."""
    if few(len(spans)):
        return _values(spans, convert)
    column = gather(spans)
    data = column.data
    ends = (data == _OPEN) | (data == _COMMA) | (data == _CLOSE)
    strange = (data < 0x20) | (data == 0x22) | (data == 0x5C)
    inner = data == _OPEN
    inner[column.start[column.start < column.stop]] ^= True  # an opening brace after the start, or a start without one
    strange |= inner
    strange[3:] |= (data[:-3] == 0x4E) & (data[1:-2] == 0x55) & (data[2:-1] == 0x4C) & (data[3:] == 0x4C)
    empty = column.stop - column.start == 2
    strange[column.start[empty]] = True
    odd = _rows_with(column, strange.nonzero()[0])
    made = _WORDS.apply(column, ends.nonzero()[0])
    return Rendered(made, spans.valid) if odd is None else _mixed(column, made, odd, convert, spans)


def _rows_with(column: Spans, offsets: Ints) -> Bools | None:
    """The rows of a contiguous column that contain these offsets; None if there are none."""
    if len(offsets) == 0:
        return None
    odd = np.zeros(len(column), np.bool_)
    odd[np.searchsorted(column.stop, offsets, side="right")] = True
    return odd


def _mixed(column: Spans, made: Spans, odd: Bools, convert: _Convert, spans: Spans) -> Rendered:
    """Convert the odd rows from their Postgres text; the others are in `made` already."""
    values, codes = distinct(column.pick(odd))
    return overlaid(made, odd, Spans.pack(convert(values)), codes, spans.valid)


def _by_value(tokens: "re.Pattern[bytes]", renderer: Renderer) -> _Convert:
    def convert(values: list[bytes]) -> list[bytes]:
        elements: list[bytes] = []
        shapes = [_shape(value, tokens, elements) for value in values]
        texts = iter(_rendered(elements, renderer))
        return [b"".join(next(texts) if part is None else part for part in shape) for shape in shapes]

    return convert


def _tokens(delimiter: bytes) -> "re.Pattern[bytes]":
    between = re.escape(delimiter)
    plain = b'[^{}"' + between + rb"\\]+"
    return re.compile(rb'("(?:[^"\\]|\\.)*")|([{}]|' + between + b")|(" + plain + b")", re.DOTALL)


_BRACKETS = {b"{": b"[", b"}": b"]"}
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)


def _shape(value: bytes, tokens: "re.Pattern[bytes]", elements: list[bytes]) -> list[bytes | None]:
    """The array as JSON pieces with None for each element, which is added to `elements`."""
    if not value.startswith(b"{"):
        return [json.dumps(value.decode(errors="replace"), ensure_ascii=False).encode()]
    shape: list[bytes | None] = []
    at = depth = 0
    for token in tokens.finditer(value):
        if token.start() != at:
            break
        at = token.end()
        quoted, sign, plain = token.groups()
        if sign:
            shape.append(_BRACKETS.get(sign, b","))
            depth += (sign == b"{") - (sign == b"}")
        elif plain == b"NULL":
            shape.append(b"null")
        else:
            elements.append(plain or _ESCAPE.sub(rb"\1", quoted[1:-1]))
            shape.append(None)
    if at != len(value) or depth != 0:
        raise DecodeError("An array's text is malformed", at)
    return shape


def _rendered(elements: Sequence[bytes], renderer: Renderer) -> list[bytes]:
    """Each element's JSON text, all rendered at once by their own type."""
    if not elements:
        return []
    result = renderer.render(Spans.pack(elements))
    rows = range(len(elements)) if result.codes is None else result.codes.tolist()
    mark = b'"' if renderer.quoted else b""
    return [mark + result.spans.value(row) + mark for row in rows]


register_arrays(array_of)
