"""`bytea` as base64, from the hex format that the session is set to."""

import numpy as np

from cdc.arrays import Bools, Bytes
from cdc.capture.rows.byte_spans import Spans, gather
from cdc.capture.rows.types.rendering import Rendered, Renderer, register
from cdc.errors import DecodeError

_ALPHABET = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", np.uint8)
_NIBBLE = np.zeros(256, np.uint8)
_NIBBLE[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def render(spans: Spans) -> Rendered:
    """All values at once: hex to bytes, padded to groups of three bytes, to groups of four characters."""
    column = gather(spans)
    digits = column.stop - column.start - 2
    valid = np.ones(len(spans), np.bool_) if spans.valid is None else spans.valid
    first = column.data[column.start[valid]] if len(column.data) else np.zeros(0, np.uint8)
    if (digits[valid] < 0).any() or (digits[valid] % 2).any() or (first != ord("\\")).any():
        raise DecodeError("A bytea value is not in hex format", 0, "Set bytea_output=hex in the session.")
    sizes = np.where(valid, digits // 2, 0)
    padded = -(-sizes // 3) * 3
    raw = _octets(column, valid)
    out = np.zeros(int(padded.sum()), np.uint8)
    begins = np.cumsum(padded) - padded
    out[np.arange(len(raw)) + np.repeat(begins - (np.cumsum(sizes) - sizes), sizes)] = raw
    text = _base64(out)
    stop = np.cumsum(padded // 3 * 4)
    for missing in (1, 2):
        text[stop[padded - sizes >= missing] - missing] = ord("=")
    return Rendered(Spans(text, stop - padded // 3 * 4, stop), spans.valid)


def _octets(column: Spans, valid: Bools) -> Bytes:
    """The bytes of all values, concatenated: pairs of hex digits without each value's leading `\\x`."""
    keep = np.ones(len(column.data), np.bool_)
    keep[column.start[valid]] = False
    keep[column.start[valid] + 1] = False
    nibbles = _NIBBLE[column.data[keep]]
    octets: Bytes = np.left_shift(nibbles[0::2], 4, dtype=np.uint8)
    return octets | nibbles[1::2]


def _base64(octets: Bytes) -> Bytes:
    a, b, c = octets.reshape(-1, 3).T
    four = np.empty((len(a), 4), np.uint8)
    four[:, 0] = a >> 2
    four[:, 1] = (a & 0x03) << 4 | b >> 4
    four[:, 2] = (b & 0x0F) << 2 | c >> 6
    four[:, 3] = c & 0x3F
    return _ALPHABET[four.ravel()]


register("bytea", renderer=Renderer(render, quoted=True))
