"""Writes scattered changes of a large table: deletion vectors delete the old rows, and the new rows go into a new file.

In one commit, files with replaced rows are added again with a deletion vector, and the new file is added. No file is
copied, so the cost of a batch is that of finding its keys: reading the key columns of files that may have them. Small
files of earlier batches are merged once there are SMALL_FILES of them; maintenance (sinks.delta.maintenance) restores
the order of the files.

`deltalake` reads, rewrites and vacuums tables with deletion vectors, but cannot write one.
"""

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from cdc.arrays import Ints
from sinks.delta.deletion_vectors import new_files
from sinks.delta.deletion_vectors.key_cache import KeyCache
from sinks.delta.deletion_vectors.key_lookup import Found, TableFiles, constants, look_up
from sinks.delta.deletion_vectors.live_table import LiveTable, joined
from sinks.delta.deletion_vectors.new_files import live_rows, small_files, write_files
from sinks.delta.files.storage import TableStorage
from sinks.delta.rows.changes import TypedChanges
from sinks.delta.rows.rewrite import decide, new_rows
from sinks.delta.write.merge import commit_properties
from sinks.delta.write.region import Files, Region
from sinks.rows.images import STORED_ROW_MISSING

LEAST_REGION = 4 * 1024 * 1024
"""Compressed bytes of a region from which deletion vectors are used: some 120,000 rows, 0.1 s of CPU. Below that a
rewrite costs no more, and leaves no extra work for readers and maintenance."""

LEAST_RATIO = 4
"""The least number of rows in the region per change."""


class VectorWriter:
    """Writes one table with deletion vectors. Not for two threads at once."""

    def __init__(self, storage: TableStorage) -> None:
        self.live = LiveTable(storage)
        self.keys = KeyCache()

    def is_cheaper(self, given: TypedChanges, region: Region | None) -> bool:
        """Whether deletion vectors are cheaper than rewriting the files that the batch touches."""
        if region is None or region.bytes < LEAST_REGION or region.rows < LEAST_RATIO * given.rows.num_rows:
            return False
        return self.live.storage.excludes_others()

    def write(self, table: DeltaTable, given: TypedChanges, stored: Files, small: int) -> TypedChanges | None:
        """Write the batch in one commit, or in none if nothing changes; None if the table's log cannot be read here."""
        live = self.live
        if not live.follow(table) or not live.has_files(stored):
            return None
        if not live.enabled:
            live.enable(table)
            if not live.has_files(stored):
                raise CommitFailedError("another writer of the table committed in between")
        deleted = live.deleted(table)
        paths = list(live.adds)
        found = look_up(
            TableFiles(
                live.storage,
                paths,
                lambda at: deleted.get(paths[at]),
                lambda at: constants(live.adds[paths[at]]),
                self.keys,
            ),
            given,
            stored,
        )
        decided = decide(found.rows, given)
        if decided.winners.any():
            changed = _with_replaced(paths, found, decided.replaced, deleted)
            merged = self._merged(small)
            old = [live_rows(live.storage, path, given.layout, changed.get(path, deleted.get(path))) for path in merged]
            rows = pa.concat_tables([new_rows(found.rows, given, decided), *old])
            adds = write_files(live.storage, rows, given.layout, 2 * small)
            live.commit(table, commit_properties(table, given), adds, changed, merged)
        return given.without(decided.orphans, STORED_ROW_MISSING)

    def _merged(self, small: int) -> list[str]:
        """Small files of earlier batches, once there are enough of them."""
        found = small_files(self.live.adds, small)
        return found if len(found) >= new_files.SMALL_FILES else []


def _with_replaced(paths: list[str], found: Found, replaced: Ints, deleted: dict[str, Ints]) -> dict[str, Ints]:
    """For each file with replaced rows, all of its deleted rows."""
    replaced = replaced[np.lexsort((found.row[replaced], found.file[replaced]))]
    files, starts = np.unique(found.file[replaced], return_index=True)
    groups = np.split(found.row[replaced], starts)[1:]
    new = {paths[at]: rows for at, rows in zip(files.tolist(), groups, strict=True)}
    return {path: joined(deleted.get(path), rows) for path, rows in new.items()}
