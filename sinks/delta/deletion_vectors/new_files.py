"""New files of a table, written without a commit, and old ones to merge into them."""

from collections.abc import Mapping
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from cdc.arrays import Ints
from sinks.delta.deletion_vectors.key_lookup import read
from sinks.delta.files.storage import LocalFolder, TableStorage
from sinks.delta.files.transaction_log import Action, read_commit
from sinks.delta.rows.changes import sorted_by
from sinks.delta.schema.layout import TableLayout

SMALL_FILES = 32
"""Small files are merged when there are so many: each is opened by every batch whose keys it may have."""

_TAG = "MILLRACE_MARKS"
"""Tags the files that are written here, so that small ones can be found and merged."""


def write_files(
    storage: TableStorage, rows: pa.Table, layout: TableLayout, file_size: int, part: str = ""
) -> list[Action]:
    """Write files with these rows, sorted by key; returns their `add` actions. `deltalake` makes their statistics.

    `part` names the part of the key space that they have, see `cdc.ports.StagingSink.stage`.
    """
    rows = sorted_by(rows, layout.key).cast(layout.arrow)
    with storage.folder_for_new_files() as folder:
        write_deltalake(folder, rows, target_file_size=file_size, writer_properties=layout.encodings)
        adds: list[Action] = [action["add"] for action in read_commit(LocalFolder(folder), 0) if "add" in action]
        for add in adds:
            storage.put(folder / unquote(add["path"]))
    return [{**{name: value for name, value in add.items() if value is not None}, "tags": {_TAG: part}} for add in adds]


def part_of(add: Action) -> str | None:
    """The part of a file that was written here; None for files of other writers."""
    part = (add.get("tags") or {}).get(_TAG)
    return None if part is None else str(part)


def small_files(adds: Mapping[str, Action], small: int) -> list[str]:
    """The files of earlier batches that are smaller than `small` bytes."""
    return [path for path, add in adds.items() if part_of(add) is not None and add["size"] < small]


def live_rows(storage: TableStorage, path: str, layout: TableLayout, deleted: Ints | None) -> pa.Table:
    """The live rows of a file, in all columns; `path` is that of the log."""
    rows = read(storage.open(unquote(path)), layout.arrow)
    if deleted is None:
        return rows
    alive = np.ones(rows.num_rows, np.bool_)
    alive[deleted] = False
    return rows.filter(pa.array(alive))
