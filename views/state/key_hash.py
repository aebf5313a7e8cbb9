"""A stable 64-bit hash of texts, all rows at once. Never Python's `hash`, which differs from process to process.

It is part of the format of the state: with another hash every stored row would be lost. Change `state.FORMAT` with it.
"""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cdc.arrays import AnyArray, Ints

Hashes = npt.NDArray[np.uint64]

_WORD = 8
_MULTIPLY = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SEEDS = (np.uint64(0x8A5CD789635D2DFF), np.uint64(0x121FD2155C472F96))
_MASKS = np.array([(1 << (8 * count)) - 1 for count in range(8)] + [2**64 - 1], np.uint64)


def hashes(texts: AnyArray, seed: int = 0) -> Hashes:
    """The hash of each text; null hashes like the empty text. `seed` 0 or 1 gives two independent hashes."""
    array: AnyArray = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
    array = array.cast(pa.large_string()).fill_null("")
    count = len(array)
    if not count:
        return np.zeros(0, np.uint64)
    bounds = np.frombuffer(array.buffers()[1], np.int64, count + 1, array.offset * 8)
    data = np.zeros(bounds[-1] + _WORD, np.uint8)  # padded: the last word of the last text is read whole
    if bounds[-1]:
        data[: bounds[-1]] = np.frombuffer(array.buffers()[2], np.uint8, bounds[-1])
    return _hash_spans(data, bounds[:-1], np.diff(bounds), _SEEDS[seed])


def _hash_spans(data: npt.NDArray[np.uint8], starts: Ints, lengths: Ints, seed: np.uint64) -> Hashes:
    """Word by word over all rows; a row drops out after its last word."""
    with np.errstate(over="ignore"):
        state: Hashes = _mixed(seed ^ (lengths.astype(np.uint64) * _MULTIPLY))
        rows = np.flatnonzero(lengths > 0)
        at = 0
        while len(rows):
            left = lengths[rows] - at
            words = _words(data, starts[rows] + at) & _MASKS[np.minimum(left, _WORD)]
            state[rows] = _mixed((state[rows] ^ words) * _MULTIPLY)
            at += _WORD
            rows = rows[left > _WORD]
        return state


def _words(data: npt.NDArray[np.uint8], places: Ints) -> Hashes:
    """The eight bytes at each place as one number."""
    every: Hashes = np.lib.stride_tricks.as_strided(data, (len(data) - _WORD + 1, _WORD), (1, 1))
    return np.ascontiguousarray(every[places]).view("<u8")[:, 0]


def _mixed(values: Hashes) -> Hashes:
    """Spread each bit over the whole word (the finalizer of splitmix64)."""
    values = (values ^ (values >> np.uint64(30))) * _FIRST
    values = (values ^ (values >> np.uint64(27))) * _SECOND
    mixed: Hashes = values ^ (values >> np.uint64(31))
    return mixed
