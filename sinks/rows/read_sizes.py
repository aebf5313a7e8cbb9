"""How many stored rows are read at once: partial rows keep large columns, and those of a batch need not fit in memory.

A change that leaves out a large column is small itself, so the size of a batch says nothing of what it reads back.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

PIECE_BYTES = 8 << 20
"""Of stored rows that are held at once. A row is held a few times over: as an answer, as text, as a request."""
_FIRST, _MOST = 16, 500

T = TypeVar("T")


def by_bytes(sized: Iterable[tuple[T, int]], most: int = _MOST) -> Iterator[list[T]]:
    """Neighbours whose sizes add up to at most PIECE_BYTES; a larger one alone."""
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
    """How many rows to ask a store for next, so that an answer stays near PIECE_BYTES: by what the last rows weighed,
    at most `growth` times as many as before, and never beyond `most`."""

    def __init__(self, most: int, *, first: int = 200, growth: int = 8) -> None:
        self._most = most
        self._growth = growth
        self.rows = min(first, most)

    def saw(self, rows: int, size: int) -> None:
        """An answer held so many rows and bytes."""
        fitting = PIECE_BYTES * max(1, rows) // max(1, size)
        self.rows = max(1, min(fitting, self.rows * self._growth, self._most))


class Pieces:
    """For stores that do not say how large a row is before it is read: as many as make PIECE_BYTES, by what the last
    ones weighed, and never more than twice as many as before."""

    def __init__(self) -> None:
        self._size = PageSize(_MOST, first=_FIRST, growth=2)

    def of(self, rows: Sequence[T]) -> Iterator[Sequence[T]]:
        """The rows in pieces. Say how large each was (`weighed`) before the next is asked for."""
        at = 0
        while at < len(rows):
            piece = rows[at : at + self._size.rows]
            at += len(piece)
            yield piece

    def weighed(self, rows: int, size: int) -> None:
        """So many rows took so many bytes."""
        self._size.saw(rows, size)
