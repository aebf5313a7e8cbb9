"""Text and everything that is shown as its Postgres text: JSON strings, escaped only where a byte asks for it."""

import numpy as np

from cdc.capture.spans import Octets, Places, Spans, gather
from cdc.capture.types.rendering import Rendered, Renderer, register, register_fallback, unchanged

_SHORT = {0x22: b'\\"', 0x5C: b"\\\\", 0x08: b"\\b", 0x0C: b"\\f", 0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t"}


def _escapes() -> tuple[Places, Octets]:
    """Per byte: the length of its escape (0: none), and the escape itself."""
    lengths, texts = np.zeros(256, np.int64), np.zeros((256, 6), np.uint8)
    for octet in [*range(0x20), 0x22, 0x5C]:
        text = _SHORT.get(octet, b"\\u%04x" % octet)
        lengths[octet] = len(text)
        texts[octet, : len(text)] = np.frombuffer(text, np.uint8)
    return lengths, texts


_LENGTH, _TEXT = _escapes()


def render(spans: Spans) -> Rendered:
    """The usual column has nothing to escape: it is looked through once and stays where it lies."""
    column = gather(spans)
    special = needing_escape(column.data)
    return Rendered(spans, spans.valid) if len(special) == 0 else Rendered(escaped(column, special), spans.valid)


def needing_escape(data: Octets) -> Places:
    """Where the bytes that JSON forbids in a string stand."""
    return np.flatnonzero((data < 0x20) | (data == 0x22) | (data == 0x5C))


def escaped(column: Spans, special: Places) -> Spans:
    """The contiguous column with each special byte replaced by its escape; everything else moves as one."""
    lengths = _LENGTH[column.data[special]]
    grown = np.concatenate(([0], np.cumsum(lengths - 1)))
    out = np.empty(len(column.data) + int(grown[-1]), np.uint8)
    places = special + grown[:-1]
    plain = np.ones(len(out), np.bool_)
    for at in range(6):
        these = lengths > at
        out[places[these] + at] = _TEXT[column.data[special[these]], at]
        plain[places[these] + at] = False
    keep = np.ones(len(column.data), np.bool_)
    keep[special] = False
    out[plain] = column.data[keep]
    start = column.start + grown[np.searchsorted(special, column.start)]
    stop = column.stop + grown[np.searchsorted(special, column.stop)]
    return Spans(out, start, stop, column.valid)


TEXT = Renderer(render, quoted=True)
register_fallback(TEXT)
register("uuid", "bit", "varbit", "inet", "cidr", "macaddr", "macaddr8", renderer=Renderer(unchanged, quoted=True))
