"""Arrays as JSON arrays of their element's form.

A column of plain numbers is translated byte by byte as a whole. Anything else goes by distinct value through a small
parser, its elements rendered together by their own type. An array with shifted bounds (`[2:3]={7,8}`) stays a string
of its Postgres text: JSON has no place for the bounds, and dropping them would change the value.
"""

import json
import re
from collections.abc import Callable, Sequence

import numpy as np

from cdc.capture.spans import Spans, distinct, gather
from cdc.capture.types.rendering import Rendered, Renderer, register_arrays
from cdc.errors import DecodeError
from cdc.model import PgType

_NUMBERS = frozenset({"int2", "int4", "int8", "oid", "float4", "float8", "numeric"})
_TRANSLATED = np.arange(256, dtype=np.uint8)
_TRANSLATED[np.frombuffer(b"{}NUL", np.uint8)] = np.frombuffer(b"[]nul", np.uint8)
_ODD = np.ones(256, np.bool_)
_ODD[np.frombuffer(b"{}NUL0123456789,.+-e", np.uint8)] = False


def array_of(element: PgType, renderer: Renderer) -> Renderer:
    """Arrays of one element type; only `box` separates its elements by a semicolon."""
    tokens = _tokens(b";" if element.name == "box" else b",")
    by_value = _by_value(tokens, renderer)
    return Renderer(_numbers(by_value) if element.name in _NUMBERS else by_value, quoted=False)


def _numbers(by_value: Callable[[Spans], Rendered]) -> Callable[[Spans], Rendered]:
    def render(spans: Spans) -> Rendered:
        column = gather(spans)
        if _ODD[column.data].any():  # NaN, an infinity or bounds
            return by_value(spans)
        return Rendered(Spans(_TRANSLATED[column.data], column.start, column.stop), spans.valid)

    return render


def _by_value(tokens: "re.Pattern[bytes]", renderer: Renderer) -> Callable[[Spans], Rendered]:
    def render(spans: Spans) -> Rendered:
        values, codes = distinct(spans)
        elements: list[bytes] = []
        shapes = [_shape(value, tokens, elements) for value in values]
        texts = iter(_rendered(elements, renderer))
        filled = [b"".join(next(texts) if part is None else part for part in shape) for shape in shapes]
        return Rendered(Spans.pack(filled or [b""]), spans.valid, codes)

    return render


def _tokens(delimiter: bytes) -> "re.Pattern[bytes]":
    plain = b'[^{}"' + delimiter + rb"\\]+"
    return re.compile(rb'("(?:[^"\\]|\\.)*")|([{}]|' + delimiter + b")|(" + plain + b")", re.DOTALL)


_PUNCTUATION = {b"{": b"[", b"}": b"]", b",": b",", b";": b","}
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)


def _shape(value: bytes, tokens: "re.Pattern[bytes]", elements: list[bytes]) -> list[bytes | None]:
    """The array as JSON pieces with None for each element, which is added to `elements`."""
    if not value.startswith(b"{"):
        return [json.dumps(value.decode(errors="replace"), ensure_ascii=False).encode()]
    shape: list[bytes | None] = []
    at = 0
    for token in tokens.finditer(value):
        if token.start() != at:
            break
        at = token.end()
        quoted, sign, plain = token.groups()
        if sign:
            shape.append(_PUNCTUATION[sign])
        elif plain == b"NULL":
            shape.append(b"null")
        else:
            elements.append(plain or _ESCAPE.sub(rb"\1", quoted[1:-1]))
            shape.append(None)
    if at != len(value) or value.count(b"{") > value.count(b"}") + value.count(b'"'):
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
