"""COPY's text format parsed into columns, all rows at once: for snapshots what `tuples` is for the stream.

Tabs and line ends are searched in the whole chunk; `\\N` is NULL; escapes are undone only if there are backslashes. The
result goes through the same images as the stream (`cdc.capture.rows.layout.images`), so both are byte-equal.
"""

import numpy as np

from cdc.arrays import Bools, Bytes, Ints
from cdc.capture.rows.byte_spans import Block, Spans, require_room
from cdc.errors import DecodeError

_TAB, _LINE, _BACKSLASH = ord("\t"), ord("\n"), ord("\\")
_MEANING = np.arange(256, dtype=np.uint8)
_MEANING[np.frombuffer(b"bfnrtv", np.uint8)] = np.frombuffer(b"\b\f\n\r\t\v", np.uint8)


def parse(chunk: bytes | bytearray | memoryview, width: int) -> Block:
    """Parse complete lines of COPY TEXT with `width` columns. The trap: a chunk must end at the end of a line.

    Raises DecodeError if the number of values is wrong, before anything is allocated by it.
    """
    require_room(len(chunk), "One chunk of COPY")
    data = np.frombuffer(bytearray(chunk), np.uint8)
    if len(data) and data[-1] != _LINE:
        raise DecodeError("A chunk of COPY ends inside a line", len(data))
    lines = int(np.count_nonzero(data == _LINE))
    if width == 0 or lines == 0:
        return Block(data, [Spans(data, _NOTHING, _NOTHING) for _ in range(width)], lines)
    stop = np.flatnonzero((data == _LINE) | (data == _TAB))
    if len(stop) != lines * width or (data[stop[width - 1 :: width]] != _LINE).any():
        raise DecodeError(f"A chunk of COPY does not have {width} columns in every line", 0)
    start = np.concatenate(([0], stop[:-1] + 1))
    null = (stop - start == 2) & (data[start] == _BACKSLASH) & (data[stop - 1] == ord("N"))
    data, start, stop = _unescaped(data, start, stop)
    columns = [_column(data, start, stop, null, slice(at, None, width)) for at in range(width)]
    return Block(data, columns, lines)


_NOTHING: Ints = np.zeros(0, np.int64)


def _column(data: Bytes, start: Ints, stop: Ints, null: Bools, rows: slice) -> Spans:
    valid = ~null[rows]
    return Spans(data, start[rows], stop[rows], None if valid.all() else valid)


def _unescaped(data: Bytes, start: Ints, stop: Ints) -> tuple[Bytes, Ints, Ints]:
    """Replace the escapes of the whole chunk; the rest of the data moves up."""
    marks = np.flatnonzero(data == _BACKSLASH)
    if len(marks) == 0:
        return data, start, stop
    run = np.concatenate(([True], np.diff(marks) > 1))
    first = np.maximum.accumulate(np.where(run, np.arange(len(marks)), 0))
    marks = marks[(marks - marks[first]) % 2 == 0]  # in a run of backslashes every other one escapes its neighbour
    data[marks + 1] = _MEANING[data[marks + 1]]
    keep = np.ones(len(data), np.bool_)
    keep[marks] = False
    return data[keep], start - np.searchsorted(marks, start), stop - np.searchsorted(marks, stop)
