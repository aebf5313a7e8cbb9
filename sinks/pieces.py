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


class Pieces:
    """For stores that do not say how large a row is before it is read: as many as make PIECE_BYTES, by what the last
    ones weighed, and never more than twice as many as before."""

    def __init__(self) -> None:
        self._rows = _FIRST

    def of(self, rows: Sequence[T]) -> Iterator[Sequence[T]]:
        """The rows in pieces. Say how large each was (`weighed`) before the next is asked for."""
        at = 0
        while at < len(rows):
            piece = rows[at : at + self._rows]
            at += len(piece)
            yield piece

    def weighed(self, rows: int, size: int) -> None:
        """So many rows took so many bytes."""
        fit = PIECE_BYTES * rows // max(size, 1)
        self._rows = max(1, min(fit, 2 * self._rows, _MOST))
