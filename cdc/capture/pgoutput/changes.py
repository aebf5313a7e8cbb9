"""Inserts, updates and deletes of one table schema, decoded together.

Old values: under identity FULL an old tuple (`O`) has the whole row; otherwise (`K`) only its key columns are data and
its other columns are `n`, which does not mean NULL. An unchanged TOAST column is taken from a full old tuple if there
is one; otherwise the image leaves it out and `unchanged` names it.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import Bools, Ints
from cdc.capture.pgoutput.frames import Frames
from cdc.capture.pgoutput.tuples import Tuples, read_tuples
from cdc.capture.rows.arrow_buffers import flags_of, letters, lists, spread, take
from cdc.capture.rows.byte_spans import Block, Spans, as_arrow, gather
from cdc.capture.rows.layout import RowLayout
from cdc.errors import DecodeError

INSERT, UPDATE, DELETE = ord("I"), ord("U"), ord("D")
_NEW, _KEY, _OLD = ord("N"), ord("K"), ord("O")
_LETTERS = np.frombuffer(b"cud", np.uint8)
NAMES = pa.list_(pa.string())


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of one layout in stream order, one row each; a key change is two rows: `d`, then `c`."""

    message: Ints
    """Which message each row came from."""
    op: "pa.StringArray"
    key: "pa.StringArray"
    after: "pa.StringArray"
    before: "pa.StringArray"
    unchanged: "pa.ListArray[Any]"

    @property
    def texts(self) -> "list[pa.Array[Any]]":
        """The columns that differ from message to message, in the order of the log's schema."""
        return [self.op, self.key, self.after, self.before, self.unchanged]


@dataclass(frozen=True, slots=True)
class _Read:
    """The tuples of a group's messages. `old` and `new` have entries only for the messages that have such a tuple."""

    old: Tuples | None
    new: Tuples | None
    has_old: Bools
    has_new: Bools
    full: Bools


def decode(frames: Frames, layout: RowLayout, message: Ints, at: Ints) -> Changes:
    """Decode these messages; `at` is the offset of each one's first tuple mark."""
    read = _fill_unchanged(_read(frames, layout, message, at), layout)
    key = layout.key_images(_key_block(read, layout, frames, message))
    return _rows(read, layout, frames, message, (key, *_key_changes(read, layout, frames, key)))


def truncate(message: int) -> Changes:
    """The one row of a truncated table."""
    nothing = pa.nulls(1, pa.string())
    return Changes(np.array([message]), pa.array(["t"]), nothing, nothing, nothing, pa.nulls(1, NAMES))


def _read(frames: Frames, layout: RowLayout, message: Ints, at: Ints) -> _Read:
    kind = frames.kind[message]
    mark = frames.data[at]
    has_new, has_old = kind != DELETE, mark != _NEW
    full = mark == _OLD
    legal = np.where(has_old, (full | (mark == _KEY)) & (kind != INSERT), has_new) & (at < frames.stop[message])
    _require(frames, message, at, legal, "A row begins with an unknown mark")
    at = at + 1
    old = new = None
    if has_old.any():
        old, ends = read_tuples(frames, message[has_old], at[has_old], layout.width)
        at[has_old] = ends
        again = has_old & has_new
        _require(frames, message, at, ~again | ((frames.data[at] == _NEW) & (at < frames.stop[message])), "No new row")
        at[again] += 1
    if has_new.any():
        new, ends = read_tuples(frames, message[has_new], at[has_new], layout.width)
        at[has_new] = ends
    _require(frames, message, at, at == frames.stop[message], "A message continues after its last column")
    return _Read(old, new, has_old, has_new, full)


def _require(frames: Frames, message: Ints, at: Ints, good: Bools, problem: str) -> None:
    if not good.all():
        row = int(np.argmin(good))
        raise DecodeError(problem, frames.offset(int(message[row]), int(at[row])))


def _fill_unchanged(read: _Read, layout: RowLayout) -> _Read:
    """Take columns that were not sent from the old tuple: all columns under FULL, otherwise key columns only."""
    if read.new is None or read.old is None or not any(flags is not None for flags in read.new.unchanged):
        return read
    keys = {field.index for field in layout.keys}
    columns, unchanged = list(read.new.columns), list(read.new.unchanged)
    old_of_new = read.has_old[read.has_new]
    new_of_old = read.has_new[read.has_old]
    full_of_new = read.full[read.has_new]
    for index, missing in enumerate(unchanged):
        if missing is None:
            continue
        fill = missing & (old_of_new if index in keys else full_of_new)
        source = read.old.columns[index].pick(new_of_old)
        columns[index], unchanged[index] = _fill_column(columns[index], missing, fill, source, fill[old_of_new])
    return replace(read, new=Tuples(columns, unchanged))


def _fill_column(column: Spans, missing: Bools, fill: Bools, source: Spans, use: Bools) -> tuple[Spans, Bools | None]:
    """The column with `fill` rows taken from the `use` rows of `source`, in a new buffer: the old tuple comes before
    the new one, and a shared buffer must be read in ascending order."""
    start, stop = column.start.copy(), column.stop.copy()
    valid = np.ones(len(column), np.bool_) if column.valid is None else column.valid.copy()
    start[fill], stop[fill] = source.start[use], source.stop[use]
    valid[fill] = True if source.valid is None else source.valid[use]
    left = missing & ~fill
    return gather(Spans(column.data, start, stop, valid)), left if left.any() else None


def _key_block(read: _Read, layout: RowLayout, frames: Frames, message: Ints) -> Block:
    """The columns that identify each message's row: from the new tuple, or from a delete's old one.

    Only key columns are merged; the others are not read.
    """
    if read.new is not None:
        _require_keys(read, layout, frames, message)
    found = read.new or read.old
    columns = list(found.columns) if found is not None else []
    if read.new is not None and read.old is not None and not read.has_new.all():
        deleted = ~read.has_new[read.has_old]
        for index in (field.index for field in layout.keys):
            columns[index] = _merge_columns(columns[index], read.old.columns[index].pick(deleted), read.has_new)
    return Block(frames.data, columns, len(message))


def _require_keys(read: _Read, layout: RowLayout, frames: Frames, message: Ints) -> None:
    for field in layout.keys:
        missing = None if read.new is None else read.new.unchanged[field.index]
        if missing is not None:
            index = int(message[read.has_new][np.argmax(missing)])
            problem = f"Key column {field.column.name} of {layout.schema.table} was not sent"
            raise DecodeError(problem, frames.offset(index, int(frames.start[index])))


def _merge_columns(new: Spans, old: Spans, is_new: Bools) -> Spans:
    """One column over all messages: `new` where `is_new`, else `old`."""
    if new.data is not old.data:
        index = np.where(is_new, np.cumsum(is_new) - 1, len(new) + np.cumsum(~is_new) - 1)
        return Spans.of(take(pa.concat_arrays([as_arrow(new), as_arrow(old)]), index))
    start, stop = np.empty(len(is_new), np.int64), np.empty(len(is_new), np.int64)
    start[is_new], stop[is_new] = new.start, new.stop
    start[~is_new], stop[~is_new] = old.start, old.stop
    valid = None
    if new.valid is not None or old.valid is not None:
        valid = np.ones(len(is_new), np.bool_)
        valid[is_new] = True if new.valid is None else new.valid
        valid[~is_new] = True if old.valid is None else old.valid
    return Spans(new.data, start, stop, valid)


def _key_changes(
    read: _Read, layout: RowLayout, frames: Frames, key: "pa.StringArray"
) -> "tuple[Bools | None, pa.StringArray | None]":
    """Which messages changed the key of their row, and the old keys. Postgres may send an old key that is the same."""
    both = read.has_old & read.has_new
    if read.old is None or not both.any():
        return None, None
    old = read.old.pick(read.has_new[read.has_old])
    old_key = layout.key_images(Block(frames.data, old.columns, int(both.sum())))
    differs = flags_of(pc.not_equal(old_key, key.filter(pa.array(both))))
    if not differs.any():
        return None, None
    moved = both.copy()
    moved[both] = differs
    return moved, old_key.filter(pa.array(differs))


def _rows(
    read: _Read,
    layout: RowLayout,
    frames: Frames,
    message: Ints,
    keys: "tuple[pa.StringArray, Bools | None, pa.StringArray | None]",
) -> Changes:
    key, moved, old_key = keys
    count = len(message)
    has_new, has_before = read.has_new, read.full
    kind = frames.kind[message]
    op = np.where(kind == INSERT, 0, np.where(kind == UPDATE, 1, 2))
    if moved is not None and old_key is not None:
        source = np.repeat(np.arange(count), 1 + moved)
        deletes = np.zeros(len(source), np.bool_)
        deletes[np.flatnonzero(moved) + np.arange(int(moved.sum()))] = True
        key_index = source.copy()
        key_index[deletes] = count + np.arange(len(old_key))
        key = take(pa.concat_arrays([key, old_key]), key_index)
        inserts = moved[source] & ~deletes
        op = np.where(deletes, 2, np.where(inserts, 0, op[source]))
        has_new, has_before = has_new[source] & ~deletes, has_before[source] & ~inserts
        message = message[source]
    after, unchanged = _after(read, layout, frames, has_new)
    return Changes(message, letters(_LETTERS[op]), key, after, _before(read, layout, frames, has_before), unchanged)


def _after(
    read: _Read, layout: RowLayout, frames: Frames, present: Bools
) -> "tuple[pa.StringArray, pa.ListArray[Any]]":
    if read.new is None:
        return pa.nulls(len(present), pa.string()), pa.nulls(len(present), NAMES)
    block = Block(frames.data, read.new.columns, int(read.has_new.sum()))
    images = layout.rows(block, read.new.unchanged)
    return spread(images, present), _unchanged_names(read.new, layout, present)


def _before(read: _Read, layout: RowLayout, frames: Frames, present: Bools) -> "pa.StringArray":
    if read.old is None or not read.full.any():
        return pa.nulls(len(present), pa.string())
    old = read.old if read.full[read.has_old].all() else read.old.pick(read.full[read.has_old])
    return spread(layout.rows(Block(frames.data, old.columns, int(read.full.sum()))), present)


def _unchanged_names(new: Tuples, layout: RowLayout, present: Bools) -> "pa.ListArray[Any]":
    """The columns that each row lacks; NULL if it has all of them."""
    absent = [(field.column.name, new.unchanged[field.index]) for field in layout.fields]
    named = [(name, flags) for name, flags in absent if flags is not None]
    if not named:
        return pa.nulls(len(present), NAMES)
    table = np.zeros((len(present), len(named)), np.bool_)
    table[present] = np.stack([flags for _, flags in named], axis=1)
    counts = table.sum(axis=1)
    return lists(take(pa.array([name for name, _ in named]), np.nonzero(table)[1]), counts)
