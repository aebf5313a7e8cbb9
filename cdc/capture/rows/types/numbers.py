"""Numbers with the digits of Postgres. NaN and the infinities are no JSON numbers and become strings."""

import numpy as np

from cdc.arrays import Bools
from cdc.capture.rows.byte_spans import Spans, gather
from cdc.capture.rows.types.rendering import Rendered, Renderer, register, unchanged

_NINE = ord("9")


def render(spans: Spans) -> Rendered:
    """`NaN`, `Infinity` and `-Infinity` are found by their last byte: every other number ends in a digit."""
    odd = spans.last_octet() > _NINE
    if not odd.any():
        return Rendered(spans, spans.valid)
    return Rendered(_quote(spans, odd), spans.valid)


def _quote(spans: Spans, odd: Bools) -> Spans:
    """The column in a new buffer, with quotation marks around the odd values."""
    column = gather(spans)
    shift = np.concatenate(([0], np.cumsum(2 * odd)))
    start, stop = column.start + shift[:-1], column.stop + shift[1:]
    out = np.full(len(column.data) + int(shift[-1]), ord('"'), np.uint8)
    marks = np.zeros(len(out), np.bool_)
    marks[start[odd]] = True
    marks[stop[odd] - 1] = True
    out[~marks] = column.data
    return Spans(out, start, stop, spans.valid)


register("int2", "int4", "int8", "oid", renderer=Renderer(unchanged, quoted=False))
register("float4", "float8", "numeric", renderer=Renderer(render, quoted=False))
