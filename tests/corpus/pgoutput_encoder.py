"""pgoutput written by hand from the protocol's description: an encoder that shares nothing with the decoder."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

UNCHANGED = object()
"""A column that the server did not send."""
Value = bytes | None | object
EPOCH = 946_684_800_000_000
INT8, TEXT, BOOL, JSONB, TIMESTAMPTZ, NUMERIC, INT4_ARRAY = 20, 25, 16, 3802, 1184, 1700, 1007


def frame(payload: bytes, lsn: int = 0) -> bytes:
    """An XLogData frame around a message."""
    return struct.pack("!cQQq", b"w", lsn, lsn, 0) + payload


def keepalive(end: int = 0) -> bytes:
    """A keepalive frame."""
    return struct.pack("!cQqb", b"k", end, 0, 0)


@dataclass(frozen=True, slots=True)
class Relation:
    """A table: columns are (name, type oid, part of the key)."""

    oid: int
    schema: str
    name: str
    columns: tuple[tuple[str, int, bool], ...]
    identity: str = "d"


def _xid(xid: int | None) -> bytes:
    return b"" if xid is None else struct.pack("!I", xid)


def _text(value: str) -> bytes:
    return value.encode() + b"\0"


def begin(final_lsn: int, ts: int = 0, xid: int = 1) -> bytes:
    return struct.pack("!cQqI", b"B", final_lsn, ts - EPOCH, xid)


def commit(commit_lsn: int, end_lsn: int, ts: int = 0) -> bytes:
    return struct.pack("!cBQQq", b"C", 0, commit_lsn, end_lsn, ts - EPOCH)


def relation(it: Relation, xid: int | None = None) -> bytes:
    head = b"R" + _xid(xid) + struct.pack("!I", it.oid) + _text(it.schema) + _text(it.name)
    columns = b"".join(
        struct.pack("!B", key) + _text(name) + struct.pack("!Ii", oid, -1) for name, oid, key in it.columns
    )
    return head + it.identity.encode() + struct.pack("!H", len(it.columns)) + columns


def row(values: Sequence[Value]) -> bytes:
    return struct.pack("!H", len(values)) + b"".join(map(_value, values))


def _value(value: Value) -> bytes:
    if value is None:
        return b"n"
    if value is UNCHANGED:
        return b"u"
    assert isinstance(value, bytes)
    return b"t" + struct.pack("!I", len(value)) + value


def insert(oid: int, new: Sequence[Value], xid: int | None = None) -> bytes:
    return b"I" + _xid(xid) + struct.pack("!I", oid) + b"N" + row(new)


def update(
    oid: int, new: Sequence[Value], old: Sequence[Value] | None = None, mark: bytes = b"K", xid: int | None = None
) -> bytes:
    before = b"" if old is None else mark + row(old)
    return b"U" + _xid(xid) + struct.pack("!I", oid) + before + b"N" + row(new)


def delete(oid: int, old: Sequence[Value], mark: bytes = b"K", xid: int | None = None) -> bytes:
    return b"D" + _xid(xid) + struct.pack("!I", oid) + mark + row(old)


def truncate(oids: Sequence[int], xid: int | None = None) -> bytes:
    return b"T" + _xid(xid) + struct.pack("!IB", len(oids), 0) + struct.pack(f"!{len(oids)}I", *oids)


def origin(name: str) -> bytes:
    return b"O" + struct.pack("!Q", 7) + _text(name)


def type_name(oid: int, schema: str, name: str, xid: int | None = None) -> bytes:
    return b"Y" + _xid(xid) + struct.pack("!I", oid) + _text(schema) + _text(name)


def message(prefix: str, content: bytes, lsn: int = 0, transactional: bool = False, xid: int | None = None) -> bytes:
    head = b"M" + _xid(xid) + struct.pack("!BQ", transactional, lsn)
    return head + _text(prefix) + struct.pack("!I", len(content)) + content


def stream_start(xid: int, first: bool = True) -> bytes:
    return b"S" + struct.pack("!IB", xid, first)


def stream_stop() -> bytes:
    return b"E"


def stream_commit(xid: int, commit_lsn: int, end_lsn: int, ts: int = 0) -> bytes:
    return b"c" + struct.pack("!IBQQq", xid, 0, commit_lsn, end_lsn, ts - EPOCH)


def stream_abort(xid: int, subxid: int) -> bytes:
    return b"A" + struct.pack("!II", xid, subxid)


def parallel_abort(xid: int, subxid: int, lsn: int, ts: int = 0) -> bytes:
    return stream_abort(xid, subxid) + struct.pack("!Qq", lsn, ts - EPOCH)
