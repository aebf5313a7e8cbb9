"""Random access to one object, for readers of Parquet."""

import io

from cdc.object_store.bucket import Bucket

_BLOCK_BYTES = 2 << 20
"""Bytes of a request: a row group is read in a few, and a task that needs one of several wastes little."""


class ObjectFile(io.RawIOBase):
    """An object that does not change. `tail` are its last bytes, if they are known: there Parquet has its footer."""

    def __init__(self, bucket: Bucket, path: str, size: int, tail: bytes = b"") -> None:
        super().__init__()
        self._bucket = bucket
        self._path = path
        self._size = size
        self._tail = (size - len(tail), tail)
        self._block = (0, b"")
        self._at = 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The place of the next read."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move the place of the next read."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(start + offset, 0)
        return self._at

    def read(self, size: int = -1) -> bytes:
        """The next bytes, all that were asked for. Raises what the bucket raises."""
        start = self._at
        stop = self._size if size < 0 else min(start + size, self._size)
        if stop <= start:
            return b""
        for first, content in (self._tail, self._block):
            if first <= start and stop <= first + len(content):
                break
        else:
            first = start
            content = self._bucket.between(self._path, start, min(max(stop, start + _BLOCK_BYTES), self._size))
            self._block = (first, content)
        self._at = stop
        return content[start - first : stop - first]
