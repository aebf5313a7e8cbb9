"""The content of objects, read at random or kept in memory."""

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from cdc.log.segments.bucket.access import LogBucket
from cdc.object_store.object_file import ObjectFile

_TAIL_BYTES = 256 << 10
"""The first request for an object reads its end: the footer, and most fresh segments whole."""
_WHOLE_BYTES = 4 << 20
"""Objects up to this size are read in one request."""
_MOST_BYTES = 32 << 20
"""What is kept in memory: the last few hundred entries of a usual log."""


class ContentCache:
    """Ends of objects that never change, the last ones used. Safe to share between threads.

    `missed` is called when an object is gone.
    """

    def __init__(self, bucket: LogBucket, missed: Callable[[], None]) -> None:
        self._bucket = bucket
        self._missed = missed
        self._lock = threading.Lock()
        self._known: dict[str, bytes] = {}
        self._size = 0

    def fetch(self, path: str) -> int:
        """Read the end of an object; returns the size of the whole. Raises FileNotFoundError."""
        content, size = self._bucket.tail(path, _TAIL_BYTES)
        self._keep(path, content)
        return size

    def open(self, path: str, size: int) -> pa.NativeFile:
        """An object for random access. Raises FileNotFoundError."""
        with self._lock:
            known = self._known.get(path, b"")
        if len(known) < size <= _WHOLE_BYTES:
            try:
                known = self._bucket.get(path)
            except FileNotFoundError:
                self._missed()
                raise
            self._keep(path, known)
        if len(known) >= size:
            return pa.BufferReader(known)
        return pa.PythonFile(ObjectFile(self._bucket, path, size, known), mode="r")

    def _keep(self, path: str, content: bytes) -> None:
        with self._lock:
            self._size += len(content) - len(self._known.pop(path, b""))
            self._known[path] = content
            while self._size > _MOST_BYTES and len(self._known) > 1:
                self._size -= len(self._known.pop(next(iter(self._known))))


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """One object with a Parquet file."""

    path: str
    size: int
    cache: ContentCache = field(repr=False, compare=False)

    @property
    def name(self) -> str:
        """For messages."""
        return self.path

    def open(self) -> pa.NativeFile:
        """See SegmentPart."""
        return self.cache.open(self.path, self.size)


@dataclass(frozen=True, slots=True)
class StoredObjects:
    """The object of a segment, followed by the parts of a large transaction."""

    objects: tuple[ObjectPart, ...]

    @property
    def name(self) -> str:
        """For messages."""
        return self.objects[0].path

    @property
    def size(self) -> int:
        """Bytes in the bucket."""
        return sum(part.size for part in self.objects)

    @property
    def place(self) -> str:
        """Paths and sizes."""
        return json.dumps([[part.path, part.size] for part in self.objects])

    @property
    def paths(self) -> Sequence[str]:
        """Of all its objects."""
        return [part.path for part in self.objects]

    def parts(self) -> Sequence[ObjectPart]:
        """The objects: the first of a large transaction has no rows."""
        return self.objects
