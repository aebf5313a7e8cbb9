"""Finds the stored rows that a batch may replace: looks its keys up in the files that may have them.

A batch all over a large table opens hundreds of files for a few rows each, so the work per file decides the cost: only
keys are read, a sorted file is searched by bisection, and a column with a single value according to the statistics is
not read at all (all rows of a snapshot have one version).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.arrays import AnyArray, Ints
from cdc.json_text.typed import no_values
from sinks.delta.deletion_vectors.key_cache import KeyCache, SortedKeys
from sinks.delta.files.storage import TableStorage
from sinks.delta.files.transaction_log import Action
from sinks.delta.rows.changes import TypedChanges
from sinks.delta.schema.layout import DELETED, VERSION
from sinks.delta.write.region import Files

if TYPE_CHECKING:
    from sinks.delta.schema.layout import AnyField

_PIECE_BYTES = 8 << 20
"""Bytes of a column with large values that are decoded at once."""


@dataclass(frozen=True, slots=True)
class Found:
    """Stored rows that a batch may replace, each with the number of its file and its row number in it."""

    rows: pa.Table
    file: Ints
    row: Ints


@dataclass(frozen=True, slots=True)
class TableFiles:
    """The files of a table by their paths in the log, what is known of each by its number, and the cached keys."""

    storage: TableStorage
    paths: Sequence[str]
    deleted: Callable[[int], Ints | None]
    """The deleted rows of a file."""
    constants: Callable[[int], Mapping[str, int | bool]]
    """Millrace's own columns that have a single value in the whole file."""
    cache: KeyCache


def look_up(table: TableFiles, given: TypedChanges, stored: Files) -> Found:
    """Every live row with a key of the batch; for keys of several columns perhaps some more."""
    layout = given.layout
    columns = dict.fromkeys([*layout.key, VERSION, DELETED, *given.kept])
    wanted = pa.schema([layout.arrow.field(column) for column in columns])
    name = layout.compared[0]
    number = {unquote(path): at for at, path in enumerate(table.paths)}
    table.cache.of_column(name)
    table.cache.keep_only(number)
    parts, files, numbers = [wanted.empty_table()], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for path, asked in _asked(_sorted_keys(given), stored):
        at = number[path]
        file = _File(table, path, wanted, name, large=given.kept)
        rows = file.rows_with(asked, table.deleted(at))
        parts.append(file.read(rows, table.constants(at)))
        files.append(np.full(len(rows), at))
        numbers.append(rows)
    return Found(pa.concat_tables(parts).combine_chunks(), np.concatenate(files), np.concatenate(numbers))


def candidates(given: TypedChanges, stored: Files) -> list[str]:
    """The files that may have some of the keys."""
    return [path for path, _ in _asked(_sorted_keys(given), stored)]


def _sorted_keys(given: TypedChanges) -> AnyArray:
    """The distinct values of the first key column."""
    keys: AnyArray = pc.unique(given.rows[given.layout.compared[0]].combine_chunks())
    return keys.take(pc.sort_indices(keys))


def _asked(keys: AnyArray, stored: Files) -> Iterator[tuple[str, AnyArray]]:
    """The files that may have some of the keys, each with these keys. `keys` are sorted."""
    firsts, lasts = _places(keys, stored)
    for at in np.flatnonzero(lasts > firsts).tolist():
        yield stored.paths[at], keys.slice(firsts[at], lasts[at] - firsts[at])


def _places(keys: AnyArray, stored: Files) -> tuple[Ints, Ints]:
    """For each file, the first of the sorted keys that it may have, and the one after the last."""
    if pa.types.is_integer(keys.type):
        values = keys.to_numpy().astype(np.int64, copy=False)
        first = np.searchsorted(values, np.array(stored.lows[0], np.int64))
        return first, np.searchsorted(values, np.array(stored.highs[0], np.int64), side="right")
    texts = keys.to_pylist()
    return (
        np.array([bisect_left(texts, low) for low in stored.lows[0]], np.int64),
        np.array([bisect_right(texts, high) for high in stored.highs[0]], np.int64),
    )


class _File:
    """One file of the table, opened when needed; columns are read once."""

    def __init__(self, table: TableFiles, path: str, wanted: pa.Schema, key: str, *, large: Sequence[str]) -> None:
        self._table = table
        self._large = large
        self._key = key
        self._path = path
        self._wanted = wanted
        self._file: pq.ParquetFile | None = None
        self._read: dict[str, AnyArray] = {}

    def rows_with(self, asked: AnyArray, deleted: Ints | None) -> Ints:
        """The numbers of the live rows with one of these keys, sorted and distinct."""
        keys = self._table.cache.get(self._path)
        if keys is None and (keys := SortedKeys.of(self._column(self._wanted.field(self._key)))) is not None:
            self._table.cache.keep(self._path, keys)
        if keys is None:
            matching: AnyArray = pc.is_in(self._column(self._wanted.field(self._key)), value_set=asked)
            rows = np.flatnonzero(matching.to_numpy(zero_copy_only=False))
        else:
            rows = keys.rows_with(asked.to_numpy().astype(np.int64, copy=False))
        return rows if deleted is None else rows[~_among(rows, deleted)]

    def read(self, rows: Ints, same: Mapping[str, int | bool]) -> pa.Table:
        """The rows with these numbers; `same` are the values of columns that have only one."""
        if not len(rows):
            return self._wanted.empty_table()
        arrays: list[AnyArray] = [
            pa.repeat(pa.scalar(same[field.name], field.type), len(rows))
            if field.name in same
            else self._values(field, rows)
            for field in self._wanted
        ]
        return pa.Table.from_arrays(arrays, schema=self._wanted)

    def _values(self, field: "AnyField", rows: Ints) -> AnyArray:
        if field.name in self._large:
            self._file = self._file or _open(self._table.storage.open(self._path))
            return _large_values(self._file, field, rows)
        keys = self._table.cache.get(self._path) if field.name == self._key else None
        return pa.array(keys.keys_of(rows), field.type) if keys else self._column(field).take(pa.array(rows))

    def _column(self, field: "AnyField") -> AnyArray:
        if field.name not in self._read:
            self._file = self._file or _open(self._table.storage.open(self._path))
            self._read[field.name] = _column(self._file, field)
        return self._read[field.name]


def _among(numbers: Ints, ordered: Ints) -> npt.NDArray[np.bool_]:
    """Which numbers are in the sorted ones. For few numbers `np.isin` costs more than the rest of the look-up."""
    at = np.minimum(np.searchsorted(ordered, numbers), len(ordered) - 1)
    found: npt.NDArray[np.bool_] = ordered[at] == numbers
    return found


def constants(add: Action) -> dict[str, int | bool]:
    """Millrace's own columns that have a single value in the whole file, by its statistics."""
    stats = orjson.loads(add["stats"]) if add.get("stats") else {}
    least, most, nulls = (stats.get(kind, {}) for kind in ("minValues", "maxValues", "nullCount"))
    return {
        name: least[name]
        for name in (VERSION, DELETED)
        if name in least and nulls.get(name) == 0 and least[name] == most.get(name)
    }


def read(opened: pa.NativeFile, wanted: pa.Schema) -> pa.Table:
    """These columns of a file; a column that was added later is null."""
    file = _open(opened)
    return pa.Table.from_arrays([_column(file, field) for field in wanted], schema=wanted)


def _open(file: pa.NativeFile) -> pq.ParquetFile:
    return pq.ParquetFile(file)


def _large_values(file: pq.ParquetFile, field: "AnyField", rows: Ints) -> AnyArray:
    """Some rows of a column with large values, by their sorted numbers; the column is decoded in pieces."""
    if field.name not in file.schema_arrow.names:
        return no_values(len(rows), field.type)
    found: list[AnyArray] = []
    at = 0
    for batch in file.iter_batches(_rows_per_piece(file, field.name), columns=[field.name], use_threads=False):
        first, last = np.searchsorted(rows, [at, at + batch.num_rows])
        if last > first:
            among: AnyArray = pa.array(rows[first:last] - at)
            found.append(batch.column(0).cast(field.type).take(among))
        at += batch.num_rows
    return pa.concat_arrays(found)


def _rows_per_piece(file: pq.ParquetFile, name: str) -> int:
    groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
    number = file.schema_arrow.names.index(name)
    size = sum(group.column(number).total_uncompressed_size for group in groups)
    return max(1, _PIECE_BYTES * file.metadata.num_rows // max(size, 1))


def _column(file: pq.ParquetFile, field: "AnyField") -> AnyArray:
    names: Sequence[str] = file.schema_arrow.names
    if field.name not in names:
        return no_values(file.metadata.num_rows, field.type)
    column = file.read([field.name], use_threads=False).column(0)
    whole: AnyArray = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return whole if whole.type == field.type else whole.cast(field.type)
