"""JSON images of rows, assembled column by column in one pass over the bytes; docs/architecture.md has the formats.

An image is a sequence of pieces: literal, value, literal, value, …, literal. All pieces of all rows are entries of one
Arrow array over one buffer, and a single `take` copies them; every row has the same number of pieces. No Python code
runs per row. Stream and snapshot both use this module, so their images are byte-equal.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from cdc.arrays import Bools, Bytes, Ints
from cdc.capture.rows.arrow_buffers import binary, bounds_of, octets_of, regrouped, take
from cdc.capture.rows.byte_spans import Spans, few, require_room
from cdc.capture.rows.types.rendering import Rendered
from cdc.errors import DecodeError

_PLAIN, _QUOTED, _START = 0, 1, 2  # what precedes a literal: a bare value, a string to close, nothing yet
_VALUE, _NULL, _ABSENT = 0, 1, 2  # what follows the literal
_VARIANTS = 9


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of an image: its rendered values, and the rows that lack it."""

    rendered: Rendered
    absent: Bools | None = None


@dataclass(frozen=True)
class Template:
    """The literal text of an image of these columns. Made once per table schema."""

    names: tuple[str, ...]
    quoted: tuple[bool, ...]

    def images(self, cells: Sequence[Cell], shared: Bytes, count: int) -> "pa.StringArray":
        """`count` images as JSON text; `shared` is the buffer of the columns that were not converted.

        Raises DecodeError if a text is not UTF-8.
        """
        if not self.names:
            return pa.array(["{}"] * count, pa.string())
        if few(count):
            return _checked([self._one(cells, row) for row in range(count)])
        literals = self._literals
        columns, shared = _compacted([cell.rendered for cell in cells], shared, count)
        source, entries = _source(literals, columns, shared, count)
        empty = len(literals) - 1
        index = np.empty((count, 2 * len(cells) + 1), np.int32)
        before: int | Ints = _START
        for at, (cell, entry) in enumerate(zip(cells, entries, strict=True)):
            state = _state(cell, count)
            index[:, 2 * at] = _VARIANTS * at + 3 * before + state
            index[:, 2 * at + 1] = entry if isinstance(state, int) else np.where(state == _VALUE, entry, empty)
            before = self._after[at][before, state]
        index[:, -1] = _VARIANTS * len(cells) + before
        return _join_pieces(source, index)

    def _one(self, cells: Sequence[Cell], row: int) -> bytes:
        """One image without Arrow, for small batches."""
        members = []
        for label, cell in zip(self._labels, cells, strict=True):
            rendered = cell.rendered
            if cell.absent is not None and cell.absent[row]:
                continue
            if rendered.valid is not None and not rendered.valid[row]:
                members.append(label[0] + b"null")
            else:
                members.append(label[1] + rendered.value(row) + label[2])
        return b"{" + b",".join(members) + b"}"

    @cached_property
    def _labels(self) -> list[tuple[bytes, bytes, bytes]]:
        """Per column the text before NULL, before a value and after a value."""
        labels = [json.dumps(name, ensure_ascii=False).encode() + b":" for name in self.names]
        marks = [b'"' if quoted else b"" for quoted in self.quoted]
        return [(label, label + mark, mark) for label, mark in zip(labels, marks, strict=True)]

    @cached_property
    def _literals(self) -> Spans:
        """Per column the nine variants, then the three endings, then the empty text."""
        literals = []
        for at, (label, opened, _) in enumerate(self._labels):
            for close, comma in ((b"", b","), (b'"', b","), (b"", b"")):
                head = b"{" if at == 0 else close
                lead = head if at == 0 else head + comma
                literals += [lead + opened, lead + label + b"null", head]
        return Spans.pack([*literals, b"}", b'"}', b"}", b""])

    @cached_property
    def _after(self) -> list[Ints]:
        """Per column: from (what precedes it, what it is) to what precedes the next column."""
        tables = []
        for quoted in self.quoted:
            value = _QUOTED if quoted else _PLAIN
            rows = [[value, _PLAIN, _PLAIN], [value, _PLAIN, _PLAIN], [value, _PLAIN, _START]]
            tables.append(np.array(rows, np.int64))
        return tables


def _state(cell: Cell, count: int) -> "int | Ints":
    valid, absent = cell.rendered.valid, cell.absent
    if valid is None and absent is None:
        return _VALUE
    state = np.zeros(count, np.int64)
    if valid is not None:
        state[~valid] = _NULL
    if absent is not None:
        state[absent] = _ABSENT
    return state


_PIECE = 100
"""Bytes that can be copied in the time that taking one piece costs."""


def _compacted(columns: Sequence[Rendered], shared: Bytes, count: int) -> tuple[Sequence[Rendered], Bytes]:
    """Copy the columns into a smaller buffer if they are a small part of the shared one, which would be copied as a
    whole: a key, or one of many tables in a feed."""
    mine = [column.spans for column in columns if column.spans.data is shared]
    used = sum(int((spans.stop - spans.start).sum()) for spans in mine)
    if not mine or used + _PIECE * len(mine) * count > len(shared):
        return columns, shared
    bounds = np.append(_interleaved(mine, 0, count), len(shared)).astype(np.int32)
    pieces = take(binary(bounds, shared), np.arange(0, len(bounds) - 1, 2, dtype=np.int32))
    ends, data = bounds_of(pieces).astype(np.int64), octets_of(pieces)
    parts = iter([Spans(data, ends[at : -1 : len(mine)], ends[at + 1 :: len(mine)]) for at in range(len(mine))])
    moved = [replace(column, spans=next(parts)) if column.spans.data is shared else column for column in columns]
    return moved, data


def _source(
    literals: Spans, columns: Sequence[Rendered], shared: Bytes, count: int
) -> "tuple[pa.BinaryArray, list[Ints]]":
    """One array of all pieces, and each column's entry per row.

    Order: literals, then the columns of the shared buffer row by row (every other entry is the gap between two
    values), then columns with their own buffer. So offsets ascend, as Arrow requires, and no value is moved.
    """
    own = [column for column in columns if column.spans.data is not shared]
    buffers = [literals.data, *([shared] if len(own) < len(columns) else []), *(column.spans.data for column in own)]
    total = sum(map(len, buffers))
    require_room(total, "A batch of row images")
    bounds: list[Ints] = [literals.start, literals.stop[-1:]]
    base, first = len(literals.data), len(literals) + 1
    entries: dict[int, Ints] = {}
    mine = [column for column in columns if column.spans.data is shared]
    if mine:
        bounds.append(_interleaved([column.spans for column in mine], base, count))
        rows = np.arange(count, dtype=np.int64) * (2 * len(mine)) + first
        entries = {id(column): rows + 2 * at for at, column in enumerate(mine)}
        base, first = base + len(shared), first + 2 * len(mine) * count
    for column in own:
        bounds.append(_interleaved([column.spans], base, len(column.spans)))
        rows = np.arange(count, dtype=np.int64) if column.codes is None else column.codes
        entries[id(column)] = rows * 2 + first
        base, first = base + len(column.spans.data), first + 2 * len(column.spans)
    bounds.append(np.array([total], np.int64))
    array = binary(np.concatenate(bounds).astype(np.int32), np.concatenate(buffers))
    return array, [entries[id(column)] for column in columns]


def _interleaved(columns: Sequence[Spans], base: int, count: int) -> Ints:
    pairs = np.empty((count, 2 * len(columns)), np.int64)
    for at, spans in enumerate(columns):
        pairs[:, 2 * at] = spans.start
        pairs[:, 2 * at + 1] = spans.stop
    pairs += base
    return pairs.ravel()


def _join_pieces(
    source: "pa.BinaryArray", index: "np.ndarray[tuple[int, int], np.dtype[np.int32]]"
) -> "pa.StringArray":
    """Take all pieces at once and join each row of `index` into one text."""
    try:
        return regrouped(take(source, index.ravel()), index.shape[1])
    except pa.ArrowInvalid:
        raise _not_utf8() from None


def _checked(images: list[bytes]) -> "pa.StringArray":
    require_room(sum(map(len, images)), "A row image")
    try:
        return pa.array([image.decode() for image in images], pa.string())
    except UnicodeDecodeError:
        raise _not_utf8() from None


def _not_utf8() -> DecodeError:
    return DecodeError(
        "A text value is not valid UTF-8, or the batch of images is larger than 2 GiB",
        0,
        "Read the source with client_encoding UTF8; a database in SQL_ASCII must contain valid UTF-8.",
    )
