"""COPY … TO STDOUT as blocks of raw lines, with libpq: about 1 µs per row where psycopg's own iterator takes 4.

Nothing is parsed here. When the iterator has ended or failed, the caller's connection can be used again; if the caller
stops in the middle, the connection is closed.
"""

import selectors
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import pq

from cdc.capture.source.connect import explain_result
from cdc.errors import SourceLost

Connection = psycopg.Connection[tuple[Any, ...]]

BLOCK_ROWS = 16_384
"""Blocks of 100,000 rows were 1.6 times slower: neither the lines nor their columns fit into the CPU cache."""
BLOCK_BYTES = 16 * 2**20
"""The limit of a block of wide rows, so that memory stays bounded; a single row may be larger."""
_PART_BYTES = 64 * 2**10


@dataclass(frozen=True, slots=True)
class CopyBlock:
    """Whole lines of COPY's text format, each with its line feed."""

    lines: bytes
    rows: int


def read_blocks(connection: Connection, query: bytes, doing: str) -> Iterator[CopyBlock]:
    """Run a COPY and yield its lines in blocks. Raises the source's error; `doing` begins its sentence.

    The trap: the COPY may still fail after some blocks; it has succeeded only when the iterator ends.
    """
    pgconn = connection.pgconn
    with selectors.DefaultSelector() as selector:
        selector.register(pgconn.socket, selectors.EVENT_READ)
        pgconn.send_query(query)
        result = _result(pgconn, selector, doing)
        if result is None or result.status != pq.ExecStatus.COPY_OUT:
            _finish(pgconn, selector, doing)
            raise _failure(result, doing)
        ended = False
        try:
            yield from _blocks(pgconn, selector, doing)
            ended = True
        finally:
            if not ended:
                _abandon(connection)
        _finish(pgconn, selector, doing)


def _blocks(pgconn: pq.abc.PGconn, selector: selectors.BaseSelector, doing: str) -> Iterator[CopyBlock]:
    parts: list[bytes] = []
    rows = size = 0
    for part, count in _parts(pgconn, selector, doing):
        parts.append(part)
        rows, size = rows + count, size + len(part)
        if rows >= BLOCK_ROWS or size >= BLOCK_BYTES:
            yield CopyBlock(b"".join(parts), rows)
            parts, rows, size = [], 0, 0
    if parts:
        yield CopyBlock(b"".join(parts), rows)


def _parts(pgconn: pq.abc.PGconn, selector: selectors.BaseSelector, doing: str) -> Iterator[tuple[bytes, int]]:
    """A few lines at a time, joined while in the CPU cache: half the CPU time of joining whole blocks."""
    get = pgconn.get_copy_data
    lines: list[bytes | memoryview] = []
    append, size = lines.append, 0
    while True:
        length, line = get(1)  # never get(0): it keeps the GIL while it waits
        if length > 0:
            append(line)
            size += length
            if size >= _PART_BYTES:
                yield b"".join(lines), len(lines)
                lines.clear()
                size = 0
        elif length == 0:
            _receive(pgconn, selector, doing)
        else:
            break
    if lines:
        yield b"".join(lines), len(lines)


def _receive(pgconn: pq.abc.PGconn, selector: selectors.BaseSelector, doing: str) -> None:
    selector.select()
    try:
        pgconn.consume_input()
    except psycopg.OperationalError:
        raise SourceLost(f"{doing} failed: the connection was lost.", "It is retried automatically.") from None


def _result(pgconn: pq.abc.PGconn, selector: selectors.BaseSelector, doing: str) -> pq.abc.PGresult | None:
    pgconn.flush()
    while pgconn.is_busy():
        _receive(pgconn, selector, doing)
    return pgconn.get_result()


def _finish(pgconn: pq.abc.PGconn, selector: selectors.BaseSelector, doing: str) -> None:
    failed = None
    while (result := _result(pgconn, selector, doing)) is not None:
        if result.status == pq.ExecStatus.FATAL_ERROR:
            failed = result
    if failed is not None:
        raise _failure(failed, doing)


def _failure(result: pq.abc.PGresult | None, doing: str) -> Exception:
    if result is None:
        return SourceLost(f"{doing} failed: the connection was lost.", "It is retried automatically.")
    return explain_result(result, doing)


def _abandon(connection: Connection) -> None:
    """Stop in the middle of a COPY: the session is unusable until all rows are received, so it is closed."""
    connection.close()
