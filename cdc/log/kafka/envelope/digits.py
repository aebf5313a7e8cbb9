"""Numbers as text of a fixed width, blanks before them: a column at a time, and no number is written twice.

Most columns of a batch repeat a number over a whole transaction or lie close together; only those that do neither are
turned into text row by row, which costs a hundred nanoseconds each.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import Ints

Texts = npt.NDArray[np.void]
"""One text of a fixed width per row."""


def padded(numbers: Ints, width: int) -> Texts:
    """Each number, right-aligned. Every one must fit: 20 characters hold any of 64 bits, 11 any of 32."""
    if not len(numbers):
        return np.empty(0, f"V{width}")
    least, most = int(numbers.min()), int(numbers.max())
    if most - least < len(numbers):
        return _each(least + np.arange(most - least + 1, dtype=np.int64), width)[numbers - least]
    first = np.flatnonzero(np.concatenate(([True], numbers[1:] != numbers[:-1])))
    if 2 * len(first) < len(numbers):
        return np.repeat(_each(numbers[first], width), np.diff(first, append=len(numbers)))
    return _each(numbers, width)


def _each(numbers: Ints, width: int) -> Texts:
    texts: Any = pc.utf8_lpad(pc.cast(pa.array(numbers), pa.string()), width, " ")
    return np.frombuffer(texts.buffers()[2], f"V{width}", len(numbers))
