"""Text, and every type that keeps its Postgres text: JSON strings, escaped only if necessary."""

import re
from collections.abc import Mapping

import numpy as np

from cdc.arrays import Bytes, Ints
from cdc.capture.rows.byte_spans import Spans, few, gather
from cdc.capture.rows.types.rendering import Rendered, Renderer, register, register_fallback, unchanged

_SPECIAL = re.compile(rb'[\x00-\x1f"\\]')
_BLOCK = 1 << 20
_SHORT = {0x22: b'\\"', 0x5C: b"\\\\", 0x08: b"\\b", 0x0C: b"\\f", 0x0A: b"\\n", 0x0D: b"\\r", 0x09: b"\\t"}


class Replacements:
    """Bytes and the texts that replace them."""

    def __init__(self, texts: Mapping[int, bytes]) -> None:
        longest = max(map(len, texts.values()))
        self._lengths, self._texts = np.ones(256, np.int64), np.zeros((256, longest), np.uint8)
        for octet, text in texts.items():
            self._lengths[octet] = len(text)
            self._texts[octet, : len(text)] = np.frombuffer(text, np.uint8)

    def apply(self, column: Spans, special: Ints) -> Spans:
        """The contiguous column with each special byte replaced."""
        octets = column.data[special]
        lengths = self._lengths[octets]
        grown = np.concatenate(([0], np.cumsum(lengths - 1)))
        out = np.empty(len(column.data) + int(grown[-1]), np.uint8)
        targets = special + grown[:-1]
        plain, keep = np.ones(len(out), np.bool_), np.ones(len(column.data), np.bool_)
        for at in range(self._texts.shape[1]):
            these = lengths > at
            out[targets[these] + at] = self._texts[octets[these], at]
            plain[targets[these] + at] = False
        keep[special] = False
        out[plain] = column.data[keep]
        start = column.start + grown[np.searchsorted(special, column.start)]
        return Spans(out, start, column.stop + grown[np.searchsorted(special, column.stop)], column.valid)


_ESCAPES = Replacements({octet: _SHORT.get(octet, b"\\u%04x" % octet) for octet in [*range(0x20), 0x22, 0x5C]})


def render(spans: Spans) -> Rendered:
    """A usual column has nothing to escape: it is scanned once and not copied."""
    if few(len(spans)) and not any(map(_SPECIAL.search, spans.values())):
        return Rendered(spans, spans.valid)
    column = gather(spans)
    special = needing_escape(column.data)
    return Rendered(spans if len(special) == 0 else _ESCAPES.apply(column, special), spans.valid)


def needing_escape(data: Bytes) -> Ints:
    """The offsets of the bytes that JSON forbids in a string."""
    if len(data) > _BLOCK:  # in blocks: the flags of a 1 GB value would take 3 GB more
        blocks = range(0, len(data), _BLOCK)
        return np.concatenate([needing_escape(data[at : at + _BLOCK]) + at for at in blocks])
    return np.flatnonzero((data < 0x20) | (data == 0x22) | (data == 0x5C))


TEXT = Renderer(render, quoted=True)
register_fallback(TEXT)
register("uuid", "bit", "varbit", "inet", "cidr", "macaddr", "macaddr8", renderer=Renderer(unchanged, quoted=True))
