"""Deletion vectors, read back by a plain reader of Delta's protocol and of the portable Roaring format."""

import base64
import struct

import numpy as np
import pytest

from sinks.delta.deletion_vectors.bitmap import inline, positions

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_B85 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"


def read(described: dict[str, object]) -> list[int]:
    whole = base64.b85decode(str(described["pathOrInlineDv"]).translate(str.maketrans(_Z85, _B85)))
    size = int(str(described["sizeInBytes"]))
    assert len(whole) == -(-size // 4) * 4
    magic, bitmaps, key = struct.unpack_from("<iqi", whole)
    assert (magic, bitmaps, key) == (1681511377, 1, 0)
    return roaring(whole[16:size])


def roaring(data: bytes) -> list[int]:
    cookie, count = struct.unpack_from("<II", data)
    assert cookie == 12346
    heads = [struct.unpack_from("<HH", data, 8 + 4 * at) for at in range(count)]
    offsets = struct.unpack_from(f"<{count}I", data, 8 + 4 * count)
    rows: list[int] = []
    for (high, less_one), offset in zip(heads, offsets, strict=True):
        if less_one < 4096:
            lows = list(struct.unpack_from(f"<{less_one + 1}H", data, offset))
        else:
            bits = int.from_bytes(data[offset : offset + 8192], "little")
            lows = [low for low in range(65536) if bits >> low & 1]
        assert len(lows) == less_one + 1
        rows += [high << 16 | low for low in lows]
    return rows


@pytest.mark.parametrize(
    "rows",
    [
        np.array([0]),
        np.arange(4096),
        np.arange(4097),
        np.arange(0, 200_000, 7),
        np.array([65535, 65536, 131072]),
        np.concatenate([np.arange(5000), np.array([70_000]), np.arange(2**31, 2**31 + 3)]),
    ],
    ids=["one", "largest array", "smallest bit set", "several containers", "at the edges", "both kinds, far apart"],
)
def test_the_rows_are_those_that_were_written(rows: np.ndarray) -> None:
    described = inline(rows)
    assert read(described) == rows.tolist()
    assert described["cardinality"] == len(rows)
    read_back = positions(str(described["pathOrInlineDv"]))
    assert read_back is not None and read_back.tolist() == rows.tolist()
