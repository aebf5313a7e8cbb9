"""The changes of a share in pieces of limited size, each with all changes of its keys. Pure Arrow, and temporary files.

Each piece is applied by itself, so none may end between two changes of a key: those of one transaction may have the
same version (docs/adr/0013-versions.md), and a store would ignore the second.
"""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from io import BufferedRandom
from itertools import chain, islice, pairwise

import numpy as np
import pyarrow as pa

from cdc.log.key_hash import murmur2
from cdc.model import LOG_SCHEMA

_PARTS = 64
"""Files of a share that is divided: one of 2 GB has parts of 32 MB."""
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


def pieces(changes: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """The changes in pieces of about `size` bytes. More than one piece are divided by the hash of the key, on disk: the
    changes of a key may be anywhere in a transaction that is too large for memory."""
    read = _of_size(changes, size)
    begin = list(islice(read, 2))
    # no generator: its frame would keep these two in memory until the last piece is applied
    return iter(begin) if len(begin) < 2 else _divided(chain(begin, read), size)


def _of_size(tables: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    """The same rows in tables of about `size` bytes. A share comes in many small ones: dividing each of them into all
    parts took 40 µs a change."""
    found: list[pa.Table] = []
    left = size
    for rows in tables:
        found.append(rows)
        left -= rows.nbytes
        if left <= 0:
            yield pa.concat_tables(found)
            found, left = [], size
    if found:
        yield pa.concat_tables(found)


def _divided(changes: Iterable[pa.Table], size: int) -> Iterator[pa.Table]:
    with ExitStack() as stack:
        # without a name: nothing is left behind by a worker that is killed
        files = [stack.enter_context(tempfile.TemporaryFile(prefix="millrace-")) for _ in range(_PARTS)]
        _write(changes, files)
        yield from _of_size(map(_read, files), size)


def _read(file: BufferedRandom) -> pa.Table:
    file.seek(0)
    with pa.ipc.open_stream(file) as stream:
        return stream.read_all()


def _write(changes: Iterable[pa.Table], files: Sequence[BufferedRandom]) -> None:
    with ExitStack() as stack:
        parts = [stack.enter_context(pa.ipc.new_stream(file, LOG_SCHEMA, options=_OPTIONS)) for file in files]
        for rows in changes:
            # not the bits of the hash by which partitions and buckets, and so shares, were chosen
            number = (murmur2(rows["key"].combine_chunks().fill_null("")) >> 16) % _PARTS
            order = np.argsort(number, kind="stable")
            ordered = rows.take(order)
            bounds = np.searchsorted(number[order], np.arange(_PARTS + 1)).tolist()
            for part, (low, high) in zip(parts, pairwise(bounds), strict=True):
                if low < high:
                    part.write_table(ordered.slice(low, high - low))
