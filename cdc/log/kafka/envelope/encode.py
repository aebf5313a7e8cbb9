"""Encodes rows of the log as Debezium envelopes, column by column.

A value is JSON that any Debezium consumer can read. The top level has Debezium's field order; inside `source` the texts
come first, and the numbers after them are padded with spaces to a fixed width, which JSON allows. So `decode` finds
each field by its distance from the end and returns the exact bytes of `before` and `after`: no number is parsed and
formatted again.

Promise: `decode(encode(rows)) == rows`. The trap: users' topics have this layout; a change of it needs a new `FORMAT`,
and the old one must stay readable.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Ints
from cdc.model import Op, TableId

Texts = npt.NDArray[np.void]
"""One text of a fixed width per row."""

FORMAT = 1
CONNECTOR_VERSION = "millrace-1"

BEFORE_OPENS = b'{"before":'
AFTER_OPENS = b',"after":'
SOURCE_OPENS = b',"source":{'
NULL_KEY = b"null"
"""Key of changes of a whole table. JSON's null, because a compacted topic refuses messages without a key."""

ABSENT = -1
"""Length stored for an image that the row does not have; its text is `null`."""
BEFORE_IS_KEY = -2
"""Length stored for a `before` that the row does not have and whose text repeats the key: Debezium consumers look for a
delete's key there."""

NUMBER = 20
LENGTH = 11


@dataclass(frozen=True, slots=True)
class EnvelopeField:
    """A fixed-width field of the tail: the text before it, its name, its width."""

    opens: bytes
    name: str
    width: int


TAIL: tuple[EnvelopeField, ...] = (
    EnvelopeField(b',"ts_ms":', "ts_ms", NUMBER),
    EnvelopeField(b',"ts_us":', "ts_us", NUMBER),
    EnvelopeField(b',"ts_ns":', "ts_ns", NUMBER + 3),
    EnvelopeField(b',"txId":', "xid", NUMBER),
    EnvelopeField(b',"lsn":', "version", NUMBER),
    EnvelopeField(
        b',"xmin":null,"origin":null,"origin_lsn":null,"millrace":{"format":1,"commit_lsn":', "commit_lsn", NUMBER
    ),
    EnvelopeField(b',"ordinal":', "ordinal", NUMBER),
    EnvelopeField(b',"schema_id":', "schema_id", LENGTH),
    EnvelopeField(b',"before":', "before", LENGTH),
    EnvelopeField(b',"after":', "after", LENGTH),
    EnvelopeField(b',"unchanged":', "unchanged", LENGTH),
    EnvelopeField(b',"row":', "row", LENGTH),
    EnvelopeField(b'}},"transaction":null,"op":"', "op", 1),
    EnvelopeField(b'","ts_ms":', "now_ms", NUMBER),
)
TAIL_ENDS = b"}"
_TAIL_TEXT = "".join(
    f"{field.opens.decode().replace('{', '{{').replace('}', '}}')}{{{field.name}:>{field.width}}}" for field in TAIL
)
FEW_ROWS = 24
"""Up to this many rows are faster row by row: the forty column operations cost a millisecond for any number of rows."""
TAIL_BYTES = sum(len(field.opens) + field.width for field in TAIL) + len(TAIL_ENDS)


@dataclass(frozen=True, slots=True)
class Messages:
    """The messages of one table, in log order. `deletes[i]`: write a tombstone after message i."""

    table: str
    keys: AnyArray
    values: AnyArray
    deletes: AnyArray


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of the changes, for the field `source`."""

    prefix: str
    database: str


def encode(rows: pa.Table, origin: Origin, now: datetime, first: int = 0) -> Iterator[Messages]:
    """The messages of each table among these rows; keeps the order within a table.

    `first` is the number of the first row within its entry: a reader reads the partitions separately and uses the
    numbers to restore the order in which the rows were appended.
    """
    if rows.num_rows <= FEW_ROWS:
        yield from encode_few(rows, origin, now, first)
        return
    rows = rows.append_column("row", pa.array(np.arange(first, first + rows.num_rows)))
    tables = rows.column("table").combine_chunks().dictionary_encode()
    if isinstance(tables, pa.ChunkedArray):
        tables = tables.combine_chunks()
    names: list[Any] = tables.dictionary.to_pylist()
    for code, name in enumerate(names):
        part = rows if len(names) == 1 else rows.filter(pc.equal(tables.indices, pa.scalar(code, pa.int32())))
        yield _encode_table(name, part.combine_chunks(), origin, now)


def _encode_table(table: str, rows: pa.Table, origin: Origin, now: datetime) -> Messages:
    column = {name: _one_chunk(rows.column(name)) for name in rows.schema.names}
    deletes = pc.equal(column["op"], pa.scalar(Op.DELETE.value))
    before, before_bytes = _before(column["before"], column["key"], deletes)
    unchanged, unchanged_bytes = _unchanged(column["unchanged"])
    lengths = {
        "before": before_bytes,
        "after": pc.fill_null(pc.cast(pc.binary_length(column["after"]), pa.int64()), ABSENT),
        "unchanged": unchanged_bytes,
    }
    pieces: list[AnyArray] = [
        BEFORE_OPENS.decode(), before, AFTER_OPENS.decode(), pc.fill_null(column["after"], "null"),
        SOURCE_OPENS.decode() + source_head(table, origin) + ',"snapshot":',
        pc.if_else(pc.equal(column["op"], pa.scalar(Op.READ.value)), '"true"', '"false"'),
        ',"sequence":"[\\"', pc.cast(column["commit_lsn"], pa.string()),
        '\\",\\"', pc.cast(column["version"], pa.string()), '\\"]","unchanged":', unchanged,
        _tails({**column, **lengths}, now),
    ]  # fmt: skip
    values = pc.binary_join_element_wise(*pieces, "")
    keys = pc.fill_null(column["key"], NULL_KEY.decode())
    return Messages(table, _binary(keys), _binary(values), deletes)


def _tails(column: dict[str, AnyArray], now: datetime) -> AnyArray:
    """The fixed-width part of every message: one block of bytes, filled column by column."""
    stamp = _numbers(pc.cast(column["commit_ts"], pa.int64()))
    block = np.frombuffer(bytearray(_BLANK_TAIL * len(stamp)), _TAIL_DTYPE)
    for name in ("xid", "version", "commit_lsn", "ordinal", "schema_id", "before", "after", "unchanged", "row"):
        block[name] = _padded(_numbers(column[name]), _TAIL_DTYPE[name].itemsize)
    block["ts_ms"] = _padded(stamp // 1000, NUMBER)
    block["ts_us"] = block["ts_ns"] = _padded(stamp, NUMBER)
    # Append three digits instead of multiplying, which would overflow for dates after 2262; but write 0, not 0000.
    if (zero := stamp == 0).any():
        block["ts_ns"][zero], block["nanos"][zero] = np.void(b" " * NUMBER), np.void(b"  0")
    block["op"] = np.frombuffer("".join(column["op"].to_pylist()).encode(), "V1")
    block["now_ms"] = _padded(np.array([int(now.timestamp() * 1000)]), NUMBER)
    bounds = np.arange(len(block) + 1, dtype=np.int32) * np.int32(TAIL_BYTES)
    buffers: AnyArray = [None, pa.py_buffer(bounds.data), pa.py_buffer(block.view(np.uint8).data)]
    return pa.Array.from_buffers(pa.string(), len(block), buffers)


def _tail_dtype() -> tuple["np.dtype[np.void]", bytes]:
    """The numpy dtype of the tail, and a blank tail. The last three digits of `ts_ns` are a separate field."""
    blank = b"".join(field.opens + b" " * field.width for field in TAIL) + TAIL_ENDS
    at = {field.name: blank.index(field.opens) + len(field.opens) for field in TAIL}
    width = {field.name: field.width for field in TAIL} | {"ts_ns": NUMBER, "nanos": 3}
    at["nanos"] = at["ts_ns"] + NUMBER
    dtype = np.dtype(
        {"names": list(at), "formats": [f"V{width[name]}" for name in at], "offsets": list(at.values()),
         "itemsize": len(blank)}
    )  # fmt: skip
    one = np.frombuffer(bytearray(blank), dtype)
    one["nanos"] = np.void(b"000")
    return dtype, one.tobytes()


_TAIL_DTYPE, _BLANK_TAIL = _tail_dtype()


def encode_few(rows: pa.Table, origin: Origin, now: datetime, first: int) -> Iterator[Messages]:
    """The same bytes as `encode`, built row by row."""
    columns = {name: rows.column(name) for name in rows.schema.names}
    columns["commit_ts"] = columns["commit_ts"].cast(pa.int64())
    lists: dict[str, list[Any]] = {name: column.to_pylist() for name, column in columns.items()}
    tables: dict[str, list[int]] = {}
    for at, table in enumerate(lists["table"]):
        tables.setdefault(table, []).append(at)
    millis = int(now.timestamp() * 1000)
    for table, indexes in tables.items():
        head = SOURCE_OPENS.decode() + source_head(table, origin)
        values = [_value({name: each[at] for name, each in lists.items()}, first + at, head, millis) for at in indexes]
        keys = [NULL_KEY if (key := lists["key"][at]) is None else key.encode() for at in indexes]
        deletes = [lists["op"][at] == Op.DELETE.value for at in indexes]
        yield Messages(table, pa.array(keys, pa.binary()), pa.array(values, pa.binary()), pa.array(deletes))


def _value(row: dict[str, Any], number: int, head: str, millis: int) -> bytes:
    key, before, after, op, stamp = row["key"], row["before"], row["after"], row["op"], row["commit_ts"]
    before_is_key = before is None and op == Op.DELETE.value and key is not None
    unchanged = _list_text(row["unchanged"])
    tail = {
        **row,
        "ts_ms": stamp // 1000,
        "ts_us": stamp,
        "ts_ns": f"{stamp}000" if stamp else "0",
        "before": BEFORE_IS_KEY if before_is_key else ABSENT if before is None else len(before.encode()),
        "after": ABSENT if after is None else len(after.encode()),
        "unchanged": len(unchanged.encode()),
        "row": number,
        "now_ms": millis,
    }
    pieces = [
        BEFORE_OPENS.decode(), (key if before_is_key else before) or "null",
        AFTER_OPENS.decode(), after or "null", head,
        ',"snapshot":"true"' if op == Op.READ.value else ',"snapshot":"false"',
        f',"sequence":"[\\"{row["commit_lsn"]}\\",\\"{row["version"]}\\"]","unchanged":', unchanged,
    ]  # fmt: skip
    return ("".join(pieces) + _TAIL_TEXT.format_map(tail) + TAIL_ENDS.decode()).encode()


@cache
def source_head(table: str, origin: Origin) -> str:
    """The part of `source` that is the same for every message of a table."""
    schema, name = split_table(table)
    texts = {
        "version": CONNECTOR_VERSION, "connector": "postgresql", "name": origin.prefix,
        "db": origin.database, "schema": schema, "table": name,
    }  # fmt: skip
    return json.dumps(texts, ensure_ascii=False, separators=(",", ":"))[1:-1]


def split_table(table: str) -> tuple[str, str]:
    """Schema and name of a qualified table name; the schema of an unqualified one (a logical message) is empty."""
    try:
        parsed = TableId.parse(table)
    except ValueError:
        return "", table
    return parsed.schema, parsed.name


def join_table(schema: str, name: str) -> str:
    """The inverse of `split_table`."""
    return str(TableId(schema, name)) if schema else name


_UNSAFE = re.compile(r"[^a-zA-Z0-9._-]")


def topic_of(prefix: str, table: str) -> str:
    """`<prefix>.<schema>.<table>`, every character that Kafka forbids replaced by `_`, as Debezium does."""
    schema, name = split_table(table)
    return _UNSAFE.sub("_", ".".join(part for part in (prefix, schema, name) if part))


def _before(before: AnyArray, key: AnyArray, deletes: AnyArray) -> tuple[AnyArray, AnyArray]:
    present = pc.is_valid(before)
    use_key = pc.and_(pc.and_(deletes, pc.invert(present)), pc.is_valid(key))
    text = pc.coalesce(before, pc.if_else(use_key, key, None), pa.scalar("null"))
    absent = pc.if_else(use_key, pa.scalar(BEFORE_IS_KEY, pa.int64()), pa.scalar(ABSENT, pa.int64()))
    return text, pc.if_else(present, pc.cast(pc.binary_length(text), pa.int64()), absent)


def _unchanged(lists: AnyArray) -> tuple[AnyArray, AnyArray]:
    """JSON of the lists, and its length. Nearly always all lists are null, and then no row is visited."""
    if lists.null_count == len(lists):
        return "null", pa.array(np.full(len(lists), len("null")))
    known: dict[tuple[str, ...], str] = {}
    texts = []
    for names in lists.to_pylist():
        each = tuple(names or ())
        found = known.get(each)
        if found is None:
            found = known[each] = _list_text(list(each))
        texts.append("null" if names is None else found)
    made: AnyArray = pa.array(texts, pa.string())
    return made, pc.binary_length(made)


def _list_text(names: list[str] | None) -> str:
    return "null" if names is None else json.dumps(names, ensure_ascii=False, separators=(",", ":"))


def _one_chunk(column: AnyArray) -> AnyArray:
    flat = column.combine_chunks()
    return flat.combine_chunks() if isinstance(flat, pa.ChunkedArray) else flat


def _numbers(column: AnyArray) -> Ints:
    numbers: Ints = column.to_numpy().astype(np.int64, copy=False)
    return numbers


def _binary(texts: AnyArray) -> AnyArray:
    return texts.cast(pa.binary())


def _padded(numbers: Ints, width: int) -> Texts:
    """Each number as text, right-aligned. The width must fit: 20 characters for 64-bit numbers, 11 for 32-bit ones.

    A number that repeats is formatted once, and so is each number of a dense range: formatting every row costs 100 ns.
    """
    if not len(numbers):
        return np.empty(0, f"V{width}")
    least, most = int(numbers.min()), int(numbers.max())
    if most - least < len(numbers):
        return _format_each(least + np.arange(most - least + 1, dtype=np.int64), width)[numbers - least]
    first = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    if 2 * len(first) < len(numbers):
        return np.repeat(_format_each(numbers[first], width), np.diff(first, append=len(numbers)))
    return _format_each(numbers, width)


def _format_each(numbers: Ints, width: int) -> Texts:
    texts: Any = pc.utf8_lpad(pc.cast(pa.array(numbers), pa.string()), width, " ")
    return np.frombuffer(texts.buffers()[2], f"V{width}", len(numbers))
