"""CopyData payloads joined into one buffer, with the headers of all WAL messages read at once.

Lengths come from the frames, never from the message content. The buffer ends in a few zero bytes, so a number can be
read at any offset before the offset is checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cdc.arrays import Bools, Bytes, Ints
from cdc.capture.rows.byte_spans import require_room
from cdc.errors import DecodeError

HEAD = 25
"""Bytes before the payload of an XLogData frame: `w`, start, end, time."""
_XLOG, _KEEPALIVE = ord("w"), ord("k")
_SLACK = 32
NONE: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True)
class Frames:
    """The WAL messages of one feed: message i is `data[start[i]:stop[i]]`, beginning with its kind."""

    data: Bytes
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def kind(self) -> Bytes:
        """Each message's first byte."""
        return self.data[self.start]

    @cached_property
    def present(self) -> Bools:
        """Which kinds occur: most feeds have few, and the others need no search."""
        return np.bincount(self.kind, minlength=256) > 0

    def of(self, kinds: Bools) -> Ints:
        """The messages of these kinds, in order."""
        return kinds[self.kind].nonzero()[0] if (self.present & kinds).any() else NONE

    @cached_property
    def lsn(self) -> Ints:
        """Each message's LSN (the start of its XLogData)."""
        return self.u64(self.start - HEAD + 1)

    @cached_property
    def _view32(self) -> "np.ndarray[tuple[int], np.dtype[np.uint32]]":
        return np.ndarray((len(self.data) - 3,), ">u4", self.data.data, strides=(1,))

    @cached_property
    def _view64(self) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
        return np.ndarray((len(self.data) - 7,), ">i8", self.data.data, strides=(1,))

    @cached_property
    def _bytes(self) -> memoryview:
        return self.data.data

    def u16(self, at: Ints) -> Ints:
        """Unsigned 16-bit numbers at these offsets."""
        return self.data[at].astype(np.int64) << 8 | self.data[at + 1]

    def u32(self, at: Ints) -> Ints:
        """Unsigned 32-bit numbers at these offsets."""
        return self._view32[at].astype(np.int64)

    def u64(self, at: Ints) -> Ints:
        """64-bit numbers at these offsets."""
        return self._view64[at].astype(np.int64)

    def message(self, index: int) -> memoryview:
        """One message, for the kinds that are read one by one."""
        return self._bytes[self.start[index] : self.stop[index]]

    def offset(self, index: int, at: int) -> int:
        """An offset in the buffer as the offset in the frame of that message."""
        return int(at - self.start[index]) + HEAD


def join(frames: Sequence[bytes | memoryview]) -> Frames:
    """Join the frames. Keepalives are dropped; anything but XLogData and keepalives is a DecodeError."""
    sizes = np.fromiter(map(len, frames), np.int64, len(frames))
    require_room(int(sizes.sum()) + _SLACK, "One feed of WAL messages")
    data = np.frombuffer(bytearray().join([*frames, bytes(_SLACK)]), np.uint8)
    stop = np.cumsum(sizes)
    start = stop - sizes
    first = data[start]
    wal = (first == _XLOG) & (sizes > 0)
    known = wal | ((first == _KEEPALIVE) & (sizes > 0))
    if not known.all():
        at = int(np.argmin(known))
        raise DecodeError(f"Frame {at} is neither XLogData nor a keepalive", 0)
    start, stop = start[wal], stop[wal]
    short = stop - start <= HEAD
    if short.any():
        at = int(np.argmax(short))
        raise DecodeError("An XLogData frame ends inside its header", int(stop[at] - start[at]))
    return Frames(data, start + HEAD, stop)


def flags_of_kinds(kinds: str) -> Bools:
    """Message kinds as the flags that `Frames.of` takes."""
    flags = np.zeros(256, np.bool_)
    flags[np.frombuffer(kinds.encode(), np.uint8)] = True
    return flags


BEGIN, COMMIT = flags_of_kinds("B"), flags_of_kinds("C")
