"""`json` and `jsonb` are embedded unchanged."""

import numpy as np

from cdc.capture.rows.byte_spans import Spans, gather
from cdc.capture.rows.types.rendering import Rendered, Renderer, register, unchanged

_BLANK = ord(" ")


def render(spans: Spans) -> Rendered:
    """A raw control byte occurs only between tokens (Postgres rejects it in a string) and becomes a blank."""
    column = gather(spans)
    breaks = np.flatnonzero(column.data < _BLANK)
    if len(breaks) == 0:
        return Rendered(spans, spans.valid)
    data = column.data.copy()
    data[breaks] = _BLANK
    return Rendered(Spans(data, column.start, column.stop), spans.valid)


register("json", renderer=Renderer(render, quoted=False))
register("jsonb", renderer=Renderer(unchanged, quoted=False))
