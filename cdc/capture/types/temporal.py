"""Dates and times as ISO-8601 strings: `T` for the blank, `Z` for `+00`; the session is pinned to UTC and ISO.

The usual column is changed as a whole. `infinity`, BC, five-digit years keep their Postgres text with the same two
changes where they apply; `time`, `timetz`, `date` and `interval` (IntervalStyle iso_8601) need none.
"""

import numpy as np

from cdc.capture.spans import Flags, Spans, distinct, gather
from cdc.capture.types.rendering import Rendered, Renderer, register, unchanged

_BLANK, _T, _Z, _PLUS, _DASH = (ord(sign) for sign in " TZ+-")
_SHORTEST = len("2024-01-01 00:00:00")


def _usual(spans: Spans) -> Flags:
    """Four-digit years after Christ with a time: the blank stands at byte 10 and the value ends in a digit."""
    usual = spans.stop - spans.start >= _SHORTEST
    at = np.where(usual, spans.start, 0)
    usual &= spans.data[at + 10] == _BLANK
    usual &= spans.data[at + 4] == _DASH
    usual &= spans.last_octet() <= ord("9")
    return usual


def render_timestamp(spans: Spans) -> Rendered:
    """`timestamp`: the blank becomes `T`."""
    return _render(spans, zone=False)


def render_timestamptz(spans: Spans) -> Rendered:
    """`timestamptz`: also `+00` becomes `Z`."""
    return _render(spans, zone=True)


def _render(spans: Spans, zone: bool) -> Rendered:
    column = gather(spans)
    if len(column.data) < _SHORTEST:
        return _odd(spans, zone)
    usual = _usual(column)
    if zone:
        usual &= column.data[np.where(usual, column.stop - 3, 0)] == _PLUS
    if not (usual.all() if spans.valid is None else (usual | ~spans.valid).all()):
        return _odd(spans, zone)
    start, stop = (column.start, column.stop) if spans.valid is None else (column.start[usual], column.stop[usual])
    column.data[start + 10] = _T
    if not zone:
        return Rendered(column, spans.valid)
    column.data[stop - 3] = _Z
    return Rendered(Spans(column.data, column.start, np.where(usual, column.stop - 2, column.stop)), spans.valid)


def _odd(spans: Spans, zone: bool) -> Rendered:
    """A column with at least one odd value goes by distinct value in Python: rare, and read once each."""
    values, codes = distinct(spans)
    texts = [_iso(value, zone) for value in values] or [b""]
    return Rendered(Spans.pack(texts), spans.valid, codes)


def _iso(value: bytes, zone: bool) -> bytes:
    body, mark, era = value.partition(b" BC")
    body = body.replace(b" ", b"T")
    if zone and body.endswith(b"+00"):
        body = body[:-3] + b"Z"
    return body + mark + era


register("timestamp", renderer=Renderer(render_timestamp, quoted=True))
register("timestamptz", renderer=Renderer(render_timestamptz, quoted=True))
register("date", "time", "timetz", "interval", renderer=Renderer(unchanged, quoted=True))
