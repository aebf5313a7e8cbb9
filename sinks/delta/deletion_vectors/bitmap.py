"""Deletion vectors: the numbers of a file's deleted rows, as Delta's transaction log stores them. Pure.

They are stored inline, so a vacuum has no extra files to handle, in the form of Delta's protocol: an array of 32-bit
Roaring bitmaps in their portable form, in Z85.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from uuid import UUID

import numpy as np
import numpy.typing as npt

from cdc.arrays import Ints

_MAGIC = 1681511377
_NO_RUNS = 12346
_ARRAY_MOST = 4096
_Z85 = np.frombuffer(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#", np.uint8)
_POWERS = 85 ** np.arange(4, -1, -1)
_DIGITS = np.zeros(256, np.int64)
_DIGITS[_Z85] = np.arange(85)
_HEAD = struct.Struct("<iqi")


def inline(rows: Ints) -> dict[str, object]:
    """The descriptor of a vector of these rows: sorted, distinct, below 2^32."""
    return inline_all([rows])[0]


def inline_all(vectors: Sequence[Ints]) -> list[dict[str, object]]:
    """The descriptors of several vectors; their texts are made together, which costs a fifth for short ones."""
    bodies = [_serialised(rows) for rows in vectors]
    text = _z85(b"".join(body + b"\0" * (-len(body) % 4) for body in bodies))
    ends = [0, *accumulate(-(-len(body) // 4) * 5 for body in bodies)]
    return [
        {"storageType": "i", "pathOrInlineDv": text[start:end], "sizeInBytes": len(body), "cardinality": len(rows)}
        for rows, body, (start, end) in zip(vectors, bodies, pairwise(ends), strict=True)
    ]


def is_readable(text: str) -> bool:
    """Whether `positions` can read an inline vector."""
    return text.startswith(_BEGINNING)


def positions(text: str) -> Ints | None:
    """The rows of an inline vector, sorted; None in a form that this module does not write (runs, several bitmaps)."""
    if not is_readable(text):
        return None
    bitmap = _from_z85(text)[_HEAD.size :]
    containers = int.from_bytes(bitmap[4:8], "little")
    heads = np.frombuffer(bitmap, "<u2", 2 * containers, 8).astype(np.int64).reshape(-1, 2)
    offsets = np.frombuffer(bitmap, "<u4", containers, 8 + 4 * containers).tolist()
    found = [
        (key << 16) + _container(bitmap, at, count + 1)
        for (key, count), at in zip(heads.tolist(), offsets, strict=True)
    ]
    return np.concatenate(found)


def _container(bitmap: bytes, at: int, count: int) -> Ints:
    if count <= _ARRAY_MOST:
        return np.frombuffer(bitmap, "<u2", count, at).astype(np.int64)
    return np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, np.uint8, 8192, at), bitorder="little"))


def vector_file(text: str) -> str:
    """The path of a vector in a file of its own: the text ends with the Z85 of a UUID, after an optional folder."""
    folder, name = text[:-20], UUID(bytes=_from_z85(text[-20:]))
    return f"{folder}/deletion_vector_{name}.bin" if folder else f"deletion_vector_{name}.bin"


def _serialised(rows: Ints) -> bytes:
    return _HEAD.pack(_MAGIC, 1, 0) + _bitmap(rows)


def _bitmap(rows: Ints) -> bytes:
    """One portable Roaring bitmap without runs: arrays for up to 4096 rows of 65536, bit sets beyond."""
    if rows[-1] >> 16 == 0 and len(rows) <= _ARRAY_MOST:  # nearly always: files are small, and few rows are deleted
        return struct.pack("<IIHHI", _NO_RUNS, 1, 0, len(rows) - 1, 16) + rows.astype("<u2").tobytes()
    highs = rows >> 16
    keys, starts = np.unique(highs, return_index=True)
    parts = np.split((rows & 0xFFFF).astype("<u2"), starts[1:])
    containers = [part.tobytes() if len(part) <= _ARRAY_MOST else _bits(part) for part in parts]
    head = struct.pack("<II", _NO_RUNS, len(keys))
    counts = b"".join(struct.pack("<HH", key, len(part) - 1) for key, part in zip(keys, parts, strict=True))
    first = len(head) + len(counts) + 4 * len(keys)
    offsets = first + np.cumsum([0, *map(len, containers[:-1])])
    return head + counts + offsets.astype("<u4").tobytes() + b"".join(containers)


def _bits(part: npt.NDArray[np.uint16]) -> bytes:
    bits = np.zeros(65536, np.uint8)
    bits[part] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def _z85(data: bytes) -> str:
    words = np.frombuffer(data, ">u4").astype(np.int64)
    digits: npt.NDArray[np.uint8] = _Z85[words[:, None] // _POWERS % 85]
    return digits.tobytes().decode()


def _from_z85(text: str) -> bytes:
    """With up to three bytes of padding at the end."""
    digits = _DIGITS[np.frombuffer(text.encode(), np.uint8)].reshape(-1, 5)
    return (digits @ _POWERS).astype(">u4").tobytes()


_BEGINNING = _z85(_HEAD.pack(_MAGIC, 1, 0) + struct.pack("<I", _NO_RUNS))
