"""Arrow arrays over numpy memory and back: the only module that builds buffers by hand.

Nothing is copied unless a docstring says so. Offsets are Arrow's own 32-bit ones.
"""

from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from cdc.arrays import Bools, Bytes, Ints

Bounds = NDArray[np.int32]
_Array = TypeVar("_Array", bound="pa.Array[Any]")


def _buffer(values: "NDArray[Any]") -> pa.Buffer:
    return pa.py_buffer(cast("Any", values))


def bitmap(flags: Bools) -> pa.Buffer:
    """Flags as Arrow's validity bits."""
    return _buffer(np.packbits(flags, bitorder="little"))


def binary(bounds: Bounds, data: Bytes) -> pa.BinaryArray:
    """The values `data[bounds[i]:bounds[i + 1]]`, not validated."""
    made = pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, _buffer(bounds), _buffer(data)])
    return cast("pa.BinaryArray", made)


def regrouped(array: pa.BinaryArray, size: int) -> pa.StringArray:
    """Every `size` consecutive values as one text over the same bytes. Raises ArrowInvalid if one is not UTF-8."""
    bounds = np.ascontiguousarray(bounds_of(array)[::size])
    made = pa.Array.from_buffers(pa.string(), len(bounds) - 1, [None, _buffer(bounds), array.buffers()[2]])
    made.validate(full=True)
    return cast("pa.StringArray", made)


def spread(compact: pa.StringArray, present: Bools) -> pa.StringArray:
    """The texts, in order, for the rows that are `present`; NULL for the others. Over the same bytes."""
    if len(compact) == len(present):
        return compact
    bounds = bounds_of(compact)[np.concatenate(([0], np.cumsum(present)))]
    buffers = [bitmap(present), _buffer(bounds), compact.buffers()[2]]
    return cast("pa.StringArray", pa.Array.from_buffers(pa.string(), len(present), buffers))


def letters(codes: Bytes) -> pa.StringArray:
    """Texts of one ASCII letter each."""
    return cast("pa.StringArray", binary(np.arange(len(codes) + 1, dtype=np.int32), codes).view(pa.string()))


def repeated(text: str, count: int) -> pa.StringArray:
    """The same text `count` times."""
    raw = text.encode()
    bounds = np.arange(count + 1, dtype=np.int32) * np.int32(len(raw))
    return cast("pa.StringArray", binary(bounds, np.frombuffer(raw * count, np.uint8)).view(pa.string()))


def lists(values: pa.StringArray, counts: Ints) -> "pa.ListArray[Any]":
    """Lists of `counts[i]` values each; NULL if that is 0."""
    bounds = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    made = pa.Array.from_buffers(
        pa.list_(pa.string()), len(counts), [bitmap(counts > 0), _buffer(bounds)], children=[values]
    )
    return cast("pa.ListArray[Any]", made)


def bounds_of(array: "pa.BinaryArray | pa.StringArray") -> Bounds:
    """Where each text of an array begins, and where the last one ends."""
    if len(array) == 0:
        return np.zeros(1, np.int32)
    everything = np.frombuffer(cast("Any", array.buffers()[1]), np.int32)
    return everything[array.offset : array.offset + len(array) + 1]


def octets_of(array: "pa.BinaryArray | pa.StringArray") -> Bytes:
    """The bytes that the bounds refer to; read only."""
    data = array.buffers()[2]
    return np.zeros(0, np.uint8) if data is None else np.frombuffer(cast("Any", data), np.uint8)


def take(array: _Array, index: "NDArray[Any]", valid: Bools | None = None) -> _Array:
    """A copy of these entries; NULL where not `valid`."""
    return array.take(cast("Any", pa.array(index, mask=None if valid is None else ~valid)))


def flags_of(array: "pa.Array[Any] | pa.ChunkedArray[Any]") -> Bools:
    """Arrow booleans without NULLs as a numpy array (copied)."""
    return cast("Bools", array.to_numpy(zero_copy_only=False))
