"""Decodes envelopes to rows of the log by byte offsets: see `cdc.log.kafka.envelope.encode` for the layout.

Every byte that the layout fixes is compared, so foreign or damaged messages are never taken for a row. Errors name the
number of the message in the batch, never its content.
"""

import json
import re
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bytes, Ints
from cdc.errors import LogCorrupt
from cdc.log.kafka.envelope.encode import (  # fmt: skip
    ABSENT,
    AFTER_OPENS,
    BEFORE_IS_KEY,
    BEFORE_OPENS,
    NULL_KEY,
    SOURCE_OPENS,
    TAIL,
    TAIL_BYTES,
    TAIL_ENDS,
    join_table,
)
from cdc.model import LOG_SCHEMA

_NULL = 4  # bytes of the text `null`
_LONGEST_HEAD = 2048
_NUMBERS = ("ts_us", "xid", "version", "commit_lsn", "ordinal", "schema_id", "before", "after", "unchanged", "row")


class NotAnEnvelope(LogCorrupt):
    """A value that `encode` did not write. `row` is its number among the given values."""

    def __init__(self, row: int) -> None:
        super().__init__(f"value {row} of the batch is not an envelope of this log.")
        self.row = row


@dataclass(frozen=True, slots=True)
class _Values:
    """Values in one buffer, with the start and end of each."""

    data: Bytes
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, values: AnyArray) -> "_Values":
        offsets = np.frombuffer(values.buffers()[1], np.int32)[values.offset : values.offset + len(values) + 1]
        raw = values.buffers()[2]
        data = np.frombuffer(raw, np.uint8) if raw is not None else np.zeros(0, np.uint8)
        wide = offsets.astype(np.int64)
        return cls(data, wide[:-1], wide[1:])


@dataclass(frozen=True, slots=True)
class Decoded:
    """Rows, and the number of each within its entry."""

    rows: pa.Table
    numbers: Ints
    offsets: Ints | None = None
    """The Kafka offset of each row, if rows and records are not one to one."""


def decode(keys: AnyArray, values: AnyArray) -> Decoded:
    """The rows of one topic's messages, which must not include tombstones. Raises NotAnEnvelope."""
    if len(values) == 0:
        return Decoded(LOG_SCHEMA.empty_table(), np.zeros(0, np.int64))
    part = _Values.of(values)
    _refuse_short(part)
    tail = _tail(values)
    number = {name: _numbers(tail[name]) for name in _NUMBERS}
    before_at = part.starts + len(BEFORE_OPENS)
    key_bytes = np.diff(np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1])
    before_bytes = np.select(
        [number["before"] == ABSENT, number["before"] == BEFORE_IS_KEY], [_NULL, key_bytes], number["before"]
    ).astype(np.int64)
    after_at = before_at + before_bytes + len(AFTER_OPENS)
    after_bytes = np.where(number["after"] == ABSENT, _NULL, number["after"])
    source_at = after_at + after_bytes + len(SOURCE_OPENS)
    unchanged_at = part.ends - TAIL_BYTES - number["unchanged"]
    _refuse_misplaced(part, before_bytes, after_bytes, source_at, unchanged_at)
    columns = {
        "table": _tables(part, source_at, unchanged_at),
        "op": pa.array(tail["op"].reshape(-1).view("S1").astype(str), pa.string()),
        "key": _keys(keys),
        "after": _texts(part.data, after_at, after_bytes, number["after"] == ABSENT),
        "before": _texts(part.data, before_at, before_bytes, number["before"] < 0),
        "unchanged": _unchanged(part.data, unchanged_at, number["unchanged"]),
        "version": pa.array(number["version"]),
        "commit_lsn": pa.array(number["commit_lsn"]),
        "ordinal": pa.array(number["ordinal"]),
        "xid": pa.array(number["xid"]),
        "commit_ts": pa.array(number["ts_us"]).cast(pa.timestamp("us", tz="UTC")),
        "schema_id": pa.array(number["schema_id"].astype(np.int32)),
    }
    rows = pa.table([columns[name] for name in LOG_SCHEMA.names], schema=LOG_SCHEMA)
    return Decoded(rows, number["row"])


def _refuse_short(part: _Values) -> None:
    least = len(BEFORE_OPENS) + len(AFTER_OPENS) + len(SOURCE_OPENS) + 2 * _NULL + TAIL_BYTES
    short = np.flatnonzero(part.ends - part.starts < least)
    if len(short):
        raise NotAnEnvelope(int(short[0]))


def _tail(values: AnyArray) -> dict[str, Bytes]:
    """The fixed-width fields at the end of every value. Checks every byte between them."""
    ends = pc.binary_slice(values, -TAIL_BYTES)
    block = np.frombuffer(ends.buffers()[2], np.uint8)[: len(values) * TAIL_BYTES].reshape(len(values), TAIL_BYTES)
    cells = {}
    at = 0
    for field in TAIL:
        _refuse_different(block[:, at : at + len(field.opens)], field.opens)
        at += len(field.opens)
        cells[field.name] = np.ascontiguousarray(block[:, at : at + field.width])
        at += field.width
    _refuse_different(block[:, at:], TAIL_ENDS)
    return cells


def _refuse_different(block: Bytes, text: bytes) -> None:
    wrong = (block != np.frombuffer(text, np.uint8)).any(axis=1)
    if wrong.any():
        raise NotAnEnvelope(int(np.argmax(wrong)))


def _numbers(cells: Bytes) -> Ints:
    """Parse numbers that are padded with spaces on the left. Raises NotAnEnvelope on anything else."""
    count, width = cells.shape
    fixed = pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), count, [None, _buffer(cells)])
    try:
        texts = pc.ascii_ltrim_whitespace(fixed.cast(pa.binary()).cast(pa.string()))
        return np.asarray(texts.cast(pa.int64()))
    except pa.ArrowInvalid as error:
        raise NotAnEnvelope(_first_non_number(cells)) from error


def _first_non_number(cells: Bytes) -> int:
    for row, cell in enumerate(cells):
        if not re.fullmatch(rb" *-?\d+", cell.tobytes()):
            return row
    return 0


def _refuse_misplaced(part: _Values, before: Ints, after: Ints, source_at: Ints, unchanged_at: Ints) -> None:
    """Check that the lengths in the tail lead exactly to the field names between the images."""
    wrong = (before < 0) | (after < 0) | (source_at > unchanged_at) | (unchanged_at > part.ends - TAIL_BYTES)
    if wrong.any():
        raise NotAnEnvelope(int(np.argmax(wrong)))
    after_opens = part.starts + len(BEFORE_OPENS) + before
    expected = (
        (part.starts, BEFORE_OPENS),
        (after_opens, AFTER_OPENS),
        (after_opens + len(AFTER_OPENS) + after, SOURCE_OPENS),
    )
    for at, text in expected:
        _refuse_different(part.data[at[:, None] + np.arange(len(text))], text)


def _tables(part: _Values, source_at: Ints, until: Ints) -> AnyArray:
    """The table of each row. The messages of a topic nearly always share the start of `source`: it is parsed once."""
    names = np.empty(len(source_at), object)
    rest = np.arange(len(source_at))
    while len(rest):
        row = int(rest[0])
        head = part.data[source_at[row] : until[row]].tobytes()[:_LONGEST_HEAD]
        name, size = _head(head, row)
        room = until[rest] - source_at[rest] >= size
        same = np.zeros(len(rest), bool)
        block = part.data[source_at[rest[room]][:, None] + np.arange(size)]
        same[room] = (block == np.frombuffer(head[:size], np.uint8)).all(axis=1)
        if same.all() and len(rest) == len(names):
            return pa.repeat(name, len(names))
        names[rest[same]] = name
        rest = rest[~same]
    return pa.array(names, pa.string())


def _head(head: bytes, row: int) -> tuple[str, int]:
    """Table name and length of the start of `source`: its texts up to the field `snapshot`."""
    size = head.find(b',"snapshot":')  # a quote inside a text is escaped, so this cannot be part of one
    try:
        texts = json.loads(b"{" + head[:size] + b"}")
        return join_table(texts["schema"], texts["table"]), size
    except (ValueError, KeyError) as error:
        raise NotAnEnvelope(row) from error


def _keys(keys: AnyArray) -> AnyArray:
    texts = keys.cast(pa.string())
    return pc.if_else(pc.equal(texts, pa.scalar(NULL_KEY.decode())), None, texts)


def _texts(data: Bytes, at: Ints, length: Ints, absent: npt.NDArray[np.bool_]) -> AnyArray:
    """Slices of the buffer as an Arrow array: with interleaved offsets, every second span is a text."""
    if absent.all():
        return pa.nulls(len(at), pa.string())
    edges = np.empty(2 * len(at) + 1, np.int32)
    edges[0:-1:2] = at
    edges[1::2] = at + length
    edges[-1] = edges[-2]
    spans = pa.Array.from_buffers(pa.binary(), 2 * len(at), [None, _buffer(edges), _buffer(data)])
    wanted: AnyArray = pa.array(np.arange(0, 2 * len(at), 2), mask=absent)
    return spans.take(wanted).cast(pa.string())


def _buffer(data: AnyArray) -> pa.Buffer:
    return pa.py_buffer(data)


def _unchanged(data: Bytes, at: Ints, length: Ints) -> AnyArray:
    texts = _texts(data, at, length, np.zeros(len(at), bool))
    distinct = pc.unique(texts).to_pylist()
    if distinct == ["null"]:
        return pa.nulls(len(at), pa.list_(pa.string()))
    try:
        lists = {text: json.loads(text) for text in distinct}
        return pa.array([lists[text] for text in texts.to_pylist()], pa.list_(pa.string()))
    except (ValueError, pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise NotAnEnvelope(0) from error
