"""Dates and times as ISO-8601 strings: `T` for the blank, `Z` for `+00`; the session is set to UTC and ISO.

A usual column is converted as a whole. `infinity`, BC and five-digit years keep their Postgres text with the same two
replacements; `time`, `timetz`, `date` and `interval` (IntervalStyle iso_8601) need none.
"""

import numpy as np

from cdc.arrays import Bools
from cdc.capture.rows.byte_spans import Spans, distinct, few, gather
from cdc.capture.rows.types.rendering import Rendered, Renderer, overlaid, register, unchanged

_BLANK, _T, _Z, _PLUS, _DASH = (ord(sign) for sign in " TZ+-")
_SHORTEST = len("2024-01-01 00:00:00")


def _usual(column: Spans, zone: bool) -> Bools:
    """Four-digit AD years with a time: byte 10 is the blank, and the value ends in a digit."""
    usual: Bools = column.stop - column.start >= _SHORTEST
    at = np.where(usual, column.start, 0)
    usual &= column.data[at + 10] == _BLANK
    usual &= column.data[at + 4] == _DASH
    usual &= column.last_octet() <= ord("9")
    if zone:
        usual &= column.data[np.where(usual, column.stop - 3, 0)] == _PLUS
    return usual


def render_timestamp(spans: Spans) -> Rendered:
    """`timestamp`: the blank becomes `T`."""
    return _render(spans, zone=False)


def render_timestamptz(spans: Spans) -> Rendered:
    """`timestamptz`: also `+00` becomes `Z`."""
    return _render(spans, zone=True)


def _render(spans: Spans, zone: bool) -> Rendered:
    if few(len(spans)):
        return Rendered(Spans.pack([_iso(value, zone) for value in spans.values()]), spans.valid)
    column = gather(spans)
    column = Spans(column.data.copy(), column.start, column.stop)
    usual = _usual(column, zone) if len(column.data) >= _SHORTEST else np.zeros(len(spans), np.bool_)
    start, stop = column.start[usual], column.stop[usual]
    column.data[start + 10] = _T
    if zone:
        column.data[stop - 3] = _Z
        column = Spans(column.data, column.start, np.where(usual, column.stop - 2, column.stop))
    odd = ~usual if spans.valid is None else spans.valid & ~usual
    if not odd.any():
        return Rendered(column, spans.valid)
    values, codes = distinct(column.pick(odd))
    return overlaid(column, odd, Spans.pack([_iso(value, zone) for value in values]), codes, spans.valid)


def _iso(value: bytes, zone: bool) -> bytes:
    body, mark, era = value.partition(b" BC")
    body = body.replace(b" ", b"T")
    if zone and body.endswith(b"+00"):
        body = body[:-3] + b"Z"
    return body + mark + era


register("timestamp", renderer=Renderer(render_timestamp, quoted=True))
register("timestamptz", renderer=Renderer(render_timestamptz, quoted=True))
register("date", "time", "timetz", "interval", renderer=Renderer(unchanged, quoted=True))
