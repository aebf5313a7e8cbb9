"""Columns as spans of bytes in one shared buffer: the result of parsing pgoutput and COPY, before any conversion.

Pure numpy and pyarrow. A value is not copied until it goes into an image, and an input buffer is never written to: code
that changes bytes makes a new buffer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self, cast

import numpy as np
import pyarrow as pa

from cdc.arrays import Bools, Bytes, Ints
from cdc.capture.rows.arrow_buffers import binary, bounds_of, flags_of, octets_of, take
from cdc.errors import DecodeError

MAX_BUFFER = 2**31 - 1
"""Arrow's strings have 32-bit offsets: in a larger buffer they would overflow silently."""

FEW = 8
"""Up to this many rows are converted value by value: a call into numpy or Arrow costs 1 to 3 µs even for one row, and a
feed of one small transaction would spend half a millisecond on calls."""


def few(count: int) -> bool:
    """Whether this many rows are converted faster one by one."""
    return count <= FEW


@dataclass(frozen=True, slots=True)
class Spans:
    """One column over many rows: row i is `data[start[i]:stop[i]]`, NULL where `valid` is false.

    `valid` None means that every row has a value. Spans ascend and do not overlap, also those of NULLs: `gather` and
    the images depend on it.
    """

    data: Bytes
    start: Ints
    stop: Ints
    valid: Bools | None = None

    def __len__(self) -> int:
        return len(self.start)

    @classmethod
    def of(cls, array: "pa.BinaryArray | pa.StringArray") -> Self:
        """The spans of an Arrow array that is not a slice; NULLs become `valid`."""
        bounds = bounds_of(array).astype(np.int64)
        valid = flags_of(array.is_valid()) if array.null_count else None
        return cls(octets_of(array), bounds[:-1], bounds[1:], valid)

    @classmethod
    def pack(cls, values: Sequence[bytes]) -> Self:
        """Spans over a few values, for conversions that work value by value."""
        stop = np.cumsum(np.fromiter(map(len, values), np.int64, len(values)))
        data = np.frombuffer(bytearray(b"".join(values)), np.uint8)
        return cls(data, np.concatenate(([0], stop[:-1])).astype(np.int64) if len(stop) else stop, stop)

    def values(self) -> list[bytes]:
        """A copy of every value; empty if NULL."""
        found = [
            self.data[start:stop].tobytes() for start, stop in zip(self.start.tolist(), self.stop.tolist(), strict=True)
        ]
        return (
            found if self.valid is None else [value if ok else b"" for value, ok in zip(found, self.valid, strict=True)]
        )

    def value(self, row: int) -> bytes:
        """A copy of one value."""
        return self.data[self.start[row] : self.stop[row]].tobytes()

    def pick(self, rows: Ints | Bools) -> Self:
        """These rows only, in the given order, which must ascend."""
        valid = None if self.valid is None else self.valid[rows]
        return replace(self, start=self.start[rows], stop=self.stop[rows], valid=valid)

    def last_octet(self) -> Bytes:
        """The last byte of each value; 0 if NULL or empty."""
        at = self.stop - 1
        octets = self.data[np.maximum(at, 0)] if len(self.data) else np.zeros(len(self), np.uint8)
        empty = self.stop <= self.start
        if self.valid is not None:
            empty |= ~self.valid
        return np.where(empty, np.uint8(0), octets) if empty.any() else octets


@dataclass(frozen=True, slots=True)
class Block:
    """Many rows of one table: the source's columns in order, most of them still in the shared buffer `data`."""

    data: Bytes
    columns: Sequence[Spans]
    count: int


def gather(spans: Spans) -> Spans:
    """The same values, contiguous in a new, read-only buffer; NULLs have no bytes."""
    taken = Spans.of(as_arrow(spans))
    data = taken.data[: taken.stop[-1] if len(taken) else 0]
    return Spans(data, taken.start, taken.stop, spans.valid)


def as_arrow(spans: Spans) -> "pa.BinaryArray":
    """The values and NULLs as a new Arrow array."""
    count = len(spans)
    bounds = np.zeros(2 * count + 1, np.int32)
    bounds[0:-1:2] = spans.start
    bounds[1::2] = spans.stop
    bounds[-1] = bounds[-2] if count else 0
    return take(binary(bounds, spans.data), np.arange(0, 2 * count, 2, dtype=np.int32), spans.valid)


def distinct(spans: Spans) -> tuple[list[bytes], Ints]:
    """The distinct values and each row's index into them (0 if NULL): for conversions that work value by value."""
    encoded = as_arrow(spans).dictionary_encode()
    codes = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    return cast("list[bytes]", encoded.dictionary.to_pylist()), codes


def require_room(size: int, what: str) -> None:
    """Raise DecodeError for a size above Arrow's 32-bit offsets, before anything is allocated."""
    if size > MAX_BUFFER:
        raise DecodeError(
            f"{what} needs {size} bytes, more than an image may have ({MAX_BUFFER})",
            0,
            "Leave the large column out of the publication or drop it in the pipeline file.",
        )
