"""The tuples in insert, update and delete messages: read column by column, for all messages of a table at once.

A length in a message is compared with the bytes left in it before it is used, and nothing is allocated by such a
length.
"""

from dataclasses import dataclass

import numpy as np

from cdc.arrays import Bools, Bytes, Ints
from cdc.capture.pgoutput.frames import Frames
from cdc.capture.rows.byte_spans import Spans
from cdc.errors import DecodeError

_TEXT, _NULL, _UNCHANGED = ord("t"), ord("n"), ord("u")


@dataclass(frozen=True, slots=True)
class Tuples:
    """One tuple per message: the spans of each column, and which rows lack it (`unchanged`, None: none)."""

    columns: list[Spans]
    unchanged: list[Bools | None]

    def pick(self, rows: Bools) -> "Tuples":
        """The tuples of these messages only."""
        columns = [spans.pick(rows) for spans in self.columns]
        return Tuples(columns, [None if flags is None else flags[rows] for flags in self.unchanged])


def read_tuples(frames: Frames, message: Ints, at: Ints, width: int) -> tuple[Tuples, Ints]:
    """Read the tuple that begins at each offset `at` (its column count); returns the tuples and where each ended."""
    stop = frames.stop[message]
    _inside(frames, message, at + 2, stop)
    counts = frames.u16(at)
    if (counts != width).any():
        row = int(np.argmax(counts != width))
        offset = frames.offset(int(message[row]), int(at[row]))
        raise DecodeError(f"A tuple has {counts[row]} columns where its relation has {width}", offset)
    at = at + 2
    columns: list[Spans] = []
    unchanged: list[Bools | None] = []
    for _ in range(width):
        spans, absent, at = _column(frames, message, at, stop)
        columns.append(spans)
        unchanged.append(absent)
    return Tuples(columns, unchanged), at


def _column(frames: Frames, message: Ints, at: Ints, stop: Ints) -> tuple[Spans, Bools | None, Ints]:
    kind = frames.data[at]
    text = kind == _TEXT
    if text.all():
        start = at + 5
        end = start + frames.u32(at + 1)
        _inside(frames, message, end, stop)
        return Spans(frames.data, start, end), None, end
    _known(frames, message, at, kind)
    start = at + np.where(text, 5, 1)
    end = start + np.where(text, frames.u32(at + 1), 0)
    _inside(frames, message, end, stop)
    absent = kind == _UNCHANGED
    return Spans(frames.data, start, end, text), absent if absent.any() else None, end


def _inside(frames: Frames, message: Ints, end: Ints, stop: Ints) -> None:
    beyond = end > stop
    if beyond.any():
        row = int(np.argmax(beyond))
        index = int(message[row])
        raise DecodeError("A message ends inside a tuple", frames.offset(index, int(stop[row])))


def _known(frames: Frames, message: Ints, at: Ints, kind: Bytes) -> None:
    known = (kind == _TEXT) | (kind == _NULL) | (kind == _UNCHANGED)
    if not known.all():
        row = int(np.argmin(known))
        raise DecodeError(f"Column kind {kind[row]} is not text", frames.offset(int(message[row]), int(at[row])))
