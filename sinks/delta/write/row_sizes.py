"""Uncompressed sizes of stored rows, from the footers of their files: Delta's log has only compressed sizes.

Large texts often compress to a tenth or a hundredth, so a file's size on disk does not bound its size in memory.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import pyarrow.parquet as pq

from sinks.delta.files.storage import TableSource

_MOST_FILES = 20_000


@dataclass(frozen=True, slots=True)
class _File:
    rows: int
    columns: Mapping[str, int]
    """Uncompressed bytes of each column."""


_known: dict[tuple[str, str], _File] = {}
"""Files never change, so each footer is read once; the oldest entries are dropped."""


def uncompressed_bytes(table: TableSource, paths: Iterable[str]) -> int:
    """Uncompressed bytes of these files."""
    return sum(sum(_file(table, path).columns.values()) for path in paths)


def widest_row(table: TableSource, paths: Iterable[str], columns: Sequence[str]) -> int:
    """Uncompressed bytes of these columns per row: the average of the file where it is greatest."""
    files = (_file(table, path) for path in paths)
    return max((sum(file.columns.get(name, 0) for name in columns) // max(file.rows, 1) for file in files), default=0)


def _file(table: TableSource, path: str) -> _File:
    key = (table.uri, path)
    found = _known.get(key)
    if found is None:
        found = _known[key] = _read(table, path)
        while len(_known) > _MOST_FILES:
            _known.pop(next(iter(_known)), None)
    return found


def _read(table: TableSource, path: str) -> _File:
    with table.open(path) as file:
        footer = pq.read_metadata(file)
    columns: dict[str, int] = {}
    for number in range(footer.num_row_groups):
        group = footer.row_group(number)
        for index in range(group.num_columns):
            column = group.column(index)
            name = column.path_in_schema
            columns[name] = columns.get(name, 0) + column.total_uncompressed_size
    return _File(footer.num_rows, columns)
