"""How many rows to ask a store for at once, so that an answer stays about as large whatever the rows' size."""

_TARGET_BYTES = 8 << 20
_FIRST = 200
"""Rows of the first answer, before anything is known of their size."""
_GROWTH = 8


class PageSize:
    """Grows and shrinks with the size of the rows seen last; never beyond `most`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows = min(_FIRST, most)

    def saw(self, rows: int, size: int) -> None:
        """An answer held so many rows and bytes."""
        fitting = _TARGET_BYTES * max(1, rows) // max(1, size)
        self.rows = max(1, min(fitting, self.rows * _GROWTH, self._most))
