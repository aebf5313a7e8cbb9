"""A stable hash of keys: murmur2, as in Kafka's default Java partitioner, so that other producers agree.

Never Python's `hash`, which differs from process to process.
"""

import numpy as np
import numpy.typing as npt

from cdc.arrays import AnyArray

BUCKETS = 256
"""Keys fall into so many buckets; a task reads a range of them."""
_SEED = np.uint32(0x9747B28C)
_M = np.uint32(0x5BD1E995)
_WORD = 4


def partitions_of(keys: AnyArray, count: int) -> npt.NDArray[np.int64]:
    """The partition of each key, out of `count` partitions."""
    if count == 1:
        return np.zeros(len(keys), np.int64)
    return (murmur2(keys) & np.uint32(0x7FFFFFFF)).astype(np.int64) % count


def buckets_of(keys: AnyArray) -> npt.NDArray[np.uint8]:
    """The bucket of each key; a missing key (of a truncate or a message) is in bucket 0."""
    found: npt.NDArray[np.uint8] = (murmur2(keys.fill_null("")) & np.uint32(BUCKETS - 1)).astype(np.uint8)
    if keys.null_count:
        found[keys.is_null().to_numpy(zero_copy_only=False)] = 0
    return found


def murmur2(keys: AnyArray) -> npt.NDArray[np.uint32]:
    """The hash of each key. Keys of the same length are hashed together."""
    hashes = np.zeros(len(keys), np.uint32)
    if not len(keys):
        return hashes
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + len(keys) + 1].astype(np.int64)
    raw = keys.buffers()[2]
    data = np.frombuffer(raw, np.uint8) if raw is not None else np.zeros(0, np.uint8)
    lengths = np.diff(offsets)
    for length in np.unique(lengths):
        rows = np.flatnonzero(lengths == length)
        block = data[offsets[rows][:, None] + np.arange(length)]
        hashes[rows] = _hash_block(block, int(length))
    return hashes


def _hash_block(block: npt.NDArray[np.uint8], length: int) -> npt.NDArray[np.uint32]:
    with np.errstate(over="ignore"):
        h = np.full(len(block), _SEED ^ np.uint32(length), np.uint32)
        whole = length // _WORD * _WORD
        words = np.ascontiguousarray(block[:, :whole]).view("<u4")
        for index in range(words.shape[1]):
            k = words[:, index] * _M
            k ^= k >> np.uint32(24)
            h = h * _M ^ k * _M
        if length > whole:
            for index in reversed(range(whole, length)):
                h ^= block[:, index].astype(np.uint32) << np.uint32(8 * (index - whole))
            h *= _M
        h ^= h >> np.uint32(13)
        h *= _M
        h ^= h >> np.uint32(15)
        return h
