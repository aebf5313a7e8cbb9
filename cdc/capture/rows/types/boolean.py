"""`t` and `f` to true and false."""

import numpy as np

from cdc.capture.rows.byte_spans import Spans
from cdc.capture.rows.types.rendering import Rendered, Renderer, register

_WORDS = Spans.pack([b"false", b"true"])


def render(spans: Spans) -> Rendered:
    """Two words, and a code per row."""
    return Rendered(_WORDS, spans.valid, (spans.last_octet() == ord("t")).astype(np.int64))


register("bool", renderer=Renderer(render, quoted=False))
