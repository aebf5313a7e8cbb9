"""JSON images of rows, assembled column-wise in one pass over the bytes: the forms are in docs/architecture.md.

An image is a row of pieces: literal, value, literal, value, …, literal. All pieces of all rows are entries of one
Arrow array over one buffer, and a single `take` copies them together; every so many pieces are one row. Nothing is
done per row in Python. Stream and snapshot both come here, so that their images are byte-equal.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pyarrow as pa

from cdc.capture.rows.arrow_buffers import binary, bounds_of, octets_of, regrouped, take
from cdc.capture.rows.byte_spans import Flags, Octets, Places, Spans, few, require_room
from cdc.capture.rows.types.rendering import Rendered
from cdc.errors import DecodeError

_PLAIN, _QUOTED, _START = 0, 1, 2  # what stands before a literal: a bare value, a string to close, nothing yet
_VALUE, _NULL, _ABSENT = 0, 1, 2  # what follows the literal
_VARIANTS = 9


@dataclass(frozen=True, slots=True)
class Cell:
    """One column of an image: its rendered values, and the rows in which it is left out."""

    rendered: Rendered
    absent: Flags | None = None


@dataclass(frozen=True)
class Template:
    """The literal text of an image of these columns. Made once per table schema, used for every batch."""

    names: tuple[str, ...]
    quoted: tuple[bool, ...]

    def images(self, cells: Sequence[Cell], shared: Octets, count: int) -> "pa.StringArray":
        """`count` images as JSON text; `shared` is the buffer that unconverted columns still lie in.

        Raises DecodeError where a text is not UTF-8.
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
        before: int | Places = _START
        for at, (cell, entry) in enumerate(zip(cells, entries, strict=True)):
            state = _state(cell, count)
            index[:, 2 * at] = _VARIANTS * at + 3 * before + state
            index[:, 2 * at + 1] = entry if isinstance(state, int) else np.where(state == _VALUE, entry, empty)
            before = self._after[at][before, state]
        index[:, -1] = _VARIANTS * len(cells) + before
        return _cut(source, index)

    def _one(self, cells: Sequence[Cell], row: int) -> bytes:
        """One image, by hand."""
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
        """Per column what stands before NULL, before a value and after a value."""
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
    def _after(self) -> list[Places]:
        """Per column: from (what stood before, what it was) to what stands before the next one."""
        tables = []
        for quoted in self.quoted:
            value = _QUOTED if quoted else _PLAIN
            rows = [[value, _PLAIN, _PLAIN], [value, _PLAIN, _PLAIN], [value, _PLAIN, _START]]
            tables.append(np.array(rows, np.int64))
        return tables


def _state(cell: Cell, count: int) -> "int | Places":
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
"""Bytes that are copied in the time that taking one piece costs."""


def _compacted(columns: Sequence[Rendered], shared: Octets, count: int) -> tuple[Sequence[Rendered], Octets]:
    """Move the columns together where they are a small part of the shared buffer, which would be copied as a whole:
    a key, or one of many tables in a feed."""
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
    literals: Spans, columns: Sequence[Rendered], shared: Octets, count: int
) -> "tuple[pa.BinaryArray, list[Places]]":
    """One array that holds every piece, and each column's entry per row.

    Order: literals, then the columns of the shared buffer row by row (every other entry is the gap between two
    values), then columns with a buffer of their own. So offsets ascend, as Arrow wants them, and no value is moved.
    """
    own = [column for column in columns if column.spans.data is not shared]
    buffers = [literals.data, *([shared] if len(own) < len(columns) else []), *(column.spans.data for column in own)]
    total = sum(map(len, buffers))
    require_room(total, "A batch of row images")
    bounds: list[Places] = [literals.start, literals.stop[-1:]]
    base, first = len(literals.data), len(literals) + 1
    entries: dict[int, Places] = {}
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


def _interleaved(columns: Sequence[Spans], base: int, count: int) -> Places:
    pairs = np.empty((count, 2 * len(columns)), np.int64)
    for at, spans in enumerate(columns):
        pairs[:, 2 * at] = spans.start
        pairs[:, 2 * at + 1] = spans.stop
    pairs += base
    return pairs.ravel()


def _cut(source: "pa.BinaryArray", index: "np.ndarray[tuple[int, int], np.dtype[np.int32]]") -> "pa.StringArray":
    """Take all pieces at once, then let every row of `index` be one text."""
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
        "Read the source with client_encoding UTF8; a database in SQL_ASCII must hold valid UTF-8.",
    )
