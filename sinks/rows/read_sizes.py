"""How many stored rows to read at once, so that they fit in memory.

A partial row is small itself but makes the sink read large columns back: the size of a batch does not bound them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

PIECE_BYTES = 8 << 20
"""Bytes of stored rows in memory at once. Each row exists a few times: as an answer, as text, as a request."""
_FIRST, _MOST = 16, 500

T = TypeVar("T")


def by_bytes(sized: Iterable[tuple[T, int]], most: int = _MOST) -> Iterator[list[T]]:
    """Consecutive items whose sizes add up to at most PIECE_BYTES; a larger one comes alone."""
    piece: list[T] = []
    total = 0
    for one, size in sized:
        if piece and (total + size > PIECE_BYTES or len(piece) >= most):
            yield piece
            piece, total = [], 0
        piece.append(one)
        total += size
    if piece:
        yield piece


class PageSize:
    """How many rows to ask a store for next, so that an answer has about PIECE_BYTES: by the size of the last rows, at
    most `growth` times as many as before, and never more than `most`."""

    def __init__(self, most: int, *, first: int = 200, growth: int = 8) -> None:
        self._most = most
        self._growth = growth
        self.rows = min(first, most)

    def record(self, rows: int, size: int) -> None:
        """Record the rows and bytes of an answer."""
        fitting = PIECE_BYTES * max(1, rows) // max(1, size)
        self.rows = max(1, min(fitting, self.rows * self._growth, self._most))


class Pieces:
    """For stores that do not tell the size of a row before it is read: pieces of about PIECE_BYTES, by the size of the
    last rows, and never more than twice as many as before."""

    def __init__(self) -> None:
        self._size = PageSize(_MOST, first=_FIRST, growth=2)

    def of(self, rows: Sequence[T]) -> Iterator[Sequence[T]]:
        """The rows in pieces. Call `record` with the size of each piece before taking the next."""
        at = 0
        while at < len(rows):
            piece = rows[at : at + self._size.rows]
            at += len(piece)
            yield piece

    def record(self, rows: int, size: int) -> None:
        """Record the rows and bytes of a piece."""
        self._size.record(rows, size)
