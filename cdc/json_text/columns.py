"""JSON objects to columns of raw values, all rows at once. Pure: numpy and Arrow, no parser object per row.

A general JSON reader would turn numbers into doubles and lose digits; here every value stays the bytes that were
written. The method: find quotes, brackets, commas and colons of the joined texts, drop those inside strings by the
parity of quotes, take those at depth one; what lies between them are names and values.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools, Bytes, Ints

_QUOTE, _OPEN, _CLOSE, _COMMA, _COLON = 1, 2, 3, 4, 5
_CLASS = bytes(
    {
        ord('"'): _QUOTE,
        **dict.fromkeys(b"{[", _OPEN),
        **dict.fromkeys(b"}]", _CLOSE),
        ord(","): _COMMA,
        ord(":"): _COLON,
    }.get(byte, 0)
    for byte in range(256)
)
_BLANK = np.zeros(256, np.bool_)
_BLANK[list(b" \t\r\n")] = True
_BACKSLASH = 0x5C
_LETTER_N = 0x6E
_DOUBLE_QUOTE = 0x22


class Malformed(ValueError):
    """Some text is not a JSON object."""


@dataclass(frozen=True, slots=True)
class RawColumn:
    """One member of every object: where its bytes lie; `present` is False where the object lacks it."""

    data: Bytes
    starts: Ints
    ends: Ints
    present: Bools
    escapes: Ints

    def take(self, rows: Ints) -> "RawColumn":
        """The member of some of the objects."""
        return RawColumn(self.data, self.starts[rows], self.ends[rows], self.present[rows], self.escapes)

    def nulls(self) -> Bools:
        """Absent, or JSON null."""
        found: Bools = ~self.present
        at = np.flatnonzero(self.present)
        found[at] = self.data[self.starts[at]] == _LETTER_N
        return found

    def json(self) -> AnyArray:
        """The JSON text of each value; null for absent values and for JSON's null."""
        return slices(self.data, self.starts, self.ends, self.nulls())

    def text(self) -> AnyArray:
        """Strings without quotes and escapes, other values as they are written; null as in `json`."""
        nulls = self.nulls()
        strings = np.zeros(len(nulls), np.int64)
        at = np.flatnonzero(~nulls)
        strings[at] = self.data[self.starts[at]] == _DOUBLE_QUOTE
        texts = slices(self.data, self.starts + strings, self.ends - strings, nulls)
        if not len(self.escapes):
            return texts
        escaped = np.searchsorted(self.escapes, self.ends) > np.searchsorted(self.escapes, self.starts)
        return self._unescaped(texts, escaped & (strings == 1))

    def _unescaped(self, texts: AnyArray, rows: Bools) -> AnyArray:
        at = np.flatnonzero(rows)
        if not len(at):
            return texts
        spans = zip(self.starts[at].tolist(), self.ends[at].tolist(), strict=True)
        plain = pa.array([orjson.loads(self.data[start:end].tobytes()) for start, end in spans], texts.type)
        return pc.replace_with_mask(texts, pa.array(rows), plain)


def members(texts: AnyArray) -> dict[str, RawColumn]:
    """Every member of these JSON objects by name, in order of first appearance. A null text has no members.

    Raises Malformed if any text is not one JSON object.
    """
    data, bounds = _joined(texts)
    escapes = np.flatnonzero(data == _BACKSLASH)
    places, kinds = _top_level(data, escapes, bounds, texts.null_count)
    colons = np.flatnonzero(kinds == _COLON)
    if (kinds[colons - 1] == _COLON).any():
        raise Malformed("a member has two values")
    names = _trimmed(data, places[colons - 1] + 1, places[colons])
    values = _trimmed(data, places[colons] + 1, places[colons + 1])
    rows = np.flatnonzero(np.diff(bounds))[np.cumsum(kinds == _OPEN)[colons] - 1]
    coded = slices(data, names[0], names[1], None).dictionary_encode()
    codes = coded.indices.to_numpy(zero_copy_only=False)
    found: dict[str, RawColumn] = {}
    for code, name in enumerate(coded.dictionary.to_pylist()):
        mine = codes == code
        column = _spread(len(texts), rows[mine], values[0][mine], values[1][mine])
        found[_name(name)] = RawColumn(data, *column, escapes)
    return found


def raw_column(cells: AnyArray) -> RawColumn:
    """JSON texts of values as a column; a null text is an absent value."""
    array: AnyArray = cells.combine_chunks() if isinstance(cells, pa.ChunkedArray) else cells
    data, bounds = _joined(array)
    present = array.is_valid().to_numpy(zero_copy_only=False)
    return RawColumn(data, bounds[:-1], bounds[1:], present, np.flatnonzero(data == _BACKSLASH))


def _name(quoted: str) -> str:
    name = orjson.loads(quoted)
    if not isinstance(name, str):
        raise Malformed("a member's name is not a string")
    return name


def _joined(texts: AnyArray) -> tuple[Bytes, Ints]:
    """The bytes of all texts, and the bounds of each: n + 1 numbers."""
    array: AnyArray = texts.cast(pa.large_string()).fill_null("")  # a null may have bytes below it
    buffers: list[Any] = array.buffers()
    bounds = np.frombuffer(buffers[1], np.int64, len(array) + 1, array.offset * 8)
    if buffers[2] is None:
        return np.zeros(0, np.uint8), bounds - bounds[0]
    data = np.frombuffer(buffers[2], np.uint8)[bounds[0] : bounds[-1]]
    return data, bounds - bounds[0]


def _top_level(data: Bytes, escapes: Ints, bounds: Ints, missing: int) -> tuple[Ints, Bytes]:
    """Places and kinds of the braces, commas and colons of each object, in order; none inside its values."""
    classes = np.frombuffer(data.tobytes().translate(_CLASS), np.uint8)
    if len(escapes):
        classes = classes.copy()
        classes[_escaped(escapes, len(data))] = 0
    places = np.flatnonzero(classes)
    kinds = classes[places]
    quoted = np.cumsum(kinds == _QUOTE, dtype=np.uint8) & 1  # parity survives the overflow
    outside = np.flatnonzero((quoted == 0) & (kinds != _QUOTE))
    places, kinds = places[outside], kinds[outside]
    depth = np.cumsum((kinds == _OPEN).astype(np.int8) - (kinds == _CLOSE), dtype=np.int32)
    if len(depth) and (depth.min() < 0 or depth[-1] != 0):
        raise Malformed("a text is not one JSON object")
    opening, closing = (kinds == _OPEN) & (depth == 1), (kinds == _CLOSE) & (depth == 0)
    _check(data, bounds, missing, places[opening], places[closing])
    own = np.flatnonzero(opening | closing | ((kinds >= _COMMA) & (depth == 1)))
    return places[own], kinds[own]


def _check(data: Bytes, bounds: Ints, missing: int, opens: Ints, closes: Ints) -> None:
    """One object in each text, and nothing left open at its end."""
    rows = len(bounds) - 1 - missing
    if not len(opens) == len(closes) == rows:
        raise Malformed("a text is not one JSON object")
    starts, ends = bounds[:-1][np.diff(bounds) > 0], bounds[1:][np.diff(bounds) > 0]
    if len(starts) != rows or (opens < starts).any() or (closes >= ends).any():
        raise Malformed("a text is not one JSON object")
    if (data[opens] != 0x7B).any():
        raise Malformed("a text is JSON, but not an object")


def _escaped(escapes: Ints, length: int) -> Ints:
    """Places of characters behind an odd run of backslashes."""
    ends_run = np.append(np.diff(escapes) != 1, True)
    begins_run = np.insert(ends_run[:-1], 0, True)
    lengths = escapes[ends_run] - escapes[begins_run] + 1
    after: Ints = escapes[ends_run][lengths % 2 == 1] + 1
    inside: Ints = after[after < length]
    return inside


def _trimmed(data: Bytes, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Spans without the blanks around them. Our own images have none."""
    if (starts >= ends).any():
        raise Malformed("a member has no name or no value")
    while (blank := _BLANK[data[starts]]).any():
        starts = starts + blank
        if (starts >= ends).any():
            raise Malformed("a member has no name or no value")
    while (blank := _BLANK[data[ends - 1]]).any():
        ends = ends - blank
    return starts, ends


def _spread(length: int, rows: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints, Bools]:
    """Spans of some rows among all rows."""
    if len(rows) == length:
        return starts, ends, np.ones(length, np.bool_)
    all_starts, all_ends = np.zeros(length, np.int64), np.zeros(length, np.int64)
    present = np.zeros(length, np.bool_)
    all_starts[rows], all_ends[rows], present[rows] = starts, ends, True
    return all_starts, all_ends, present


def slices(data: Bytes, starts: Ints, ends: Ints, nulls: Bools | None) -> AnyArray:
    """A string array of these spans: gathered by Arrow from interleaved offsets, never by a Python loop."""
    count = len(starts)
    offsets = np.empty(2 * count + 1, np.int64)
    offsets[0:-1:2], offsets[1::2] = starts, ends
    offsets[-1] = len(data)
    buffers = [None, pa.py_buffer(offsets.data), pa.py_buffer(data.data)]
    spans: AnyArray = pa.Array.from_buffers(pa.large_string(), 2 * count, buffers)
    places: AnyArray = pa.array(np.arange(0, 2 * count, 2), mask=nulls)
    return spans.take(places)
