"""Writes scattered changes of a large table: deletion vectors delete the old rows, and the new rows go into a new file.

In one commit, files with replaced rows are added again with a deletion vector, and the new file is added. No file is
copied, so the cost of a batch is that of finding its keys: reading the key columns of files that may have them. Small
files of earlier batches are merged once there are SMALL_FILES of them; maintenance (sinks.delta.maintenance) restores
the order of the files.

For tables on a local disk: `deltalake` reads, rewrites and vacuums tables with deletion vectors, but cannot write one.
"""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote
from uuid import uuid4

import numpy as np
import orjson
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from cdc.arrays import Ints
from cdc.failpoint import reached
from sinks.delta.deletion_vectors.bitmap import inline
from sinks.delta.deletion_vectors.key_cache import KeyCache
from sinks.delta.deletion_vectors.key_lookup import Found, TableFiles, look_up, read
from sinks.delta.rows.changes import TypedChanges, sorted_by
from sinks.delta.rows.rewrite import decide, new_rows
from sinks.delta.schema.layout import TableLayout
from sinks.delta.transaction_log import (
    Action,
    LiveFiles,
    commit,
    file_name,
    log_folder,
    read_commit,
    removal,
    selections,
)
from sinks.delta.write.merge import commit_properties
from sinks.delta.write.region import Files, Region
from sinks.rows.images import STORED_ROW_MISSING

LEAST_REGION = 4 * 1024 * 1024
"""Compressed bytes of a region from which deletion vectors are used: some 120,000 rows, 0.1 s of CPU. Below that a
rewrite costs no more, and leaves no extra work for readers and maintenance."""

LEAST_RATIO = 4
"""The least number of rows in the region per change."""

SMALL_FILES = 32
"""Small files are merged when there are so many: each is opened by every batch whose keys it may have."""

STAGING = "_millrace_staging"
_TAG = "MILLRACE_MARKS"
"""Tags the files that this module adds, so that small ones can be found and merged."""
_FEATURE = "deletionVectors"
_FEATURES = {_FEATURE, "timestampNtz", "appendOnly", "invariants"}
_PLAIN_WRITER, _BY_FEATURES = 2, 7
_PROPERTY = "delta.enableDeletionVectors"
_EVERY_CHECKPOINT = 100


class VectorWriter:
    """Writes one table with deletion vectors. Not for two threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._live = LiveFiles(folder)
        self._deleted: dict[str, tuple[str, Ints]] = {}
        self._has_links: bool | None = None
        self._keys = KeyCache()

    def is_cheaper(self, given: TypedChanges, region: Region | None) -> bool:
        """Whether deletion vectors are cheaper than rewriting the files that the batch touches."""
        if region is None or region.bytes < LEAST_REGION or region.rows < LEAST_RATIO * given.rows.num_rows:
            return False
        if self._has_links is None:
            self._has_links = _hard_links(self._folder)
        return self._has_links

    def write(self, table: DeltaTable, given: TypedChanges, stored: Files, small: int) -> TypedChanges | None:
        """Write the batch in one commit, or in none if nothing changes; None if the table's log cannot be read here."""
        if (
            not self._live.follow(table.version())
            or not self._same_files(stored)
            or not _supported(self._live.protocol)
        ):
            return None
        if not _rows_replaceable(self._live.metadata):
            return None
        if _PROPERTY not in self._live.metadata.get("configuration", {}):
            self._enable(table)
            if not self._same_files(stored):
                raise CommitFailedError("another writer of the table committed in between")
        deleted = self._vectors(table)
        found = look_up(TableFiles(self._folder, self._live.adds, deleted, self._keys), given, stored)
        decided = decide(found.rows, given)
        if decided.winners.any():
            changed = self._with_replaced(found, decided.replaced, deleted)
            merged = self._small_files(small)
            old = [self._rows(path, given.layout, changed.get(path, deleted.get(path))) for path in merged]
            rows = pa.concat_tables([new_rows(found.rows, given, decided), *old])
            adds = _staged(self._folder, rows, given.layout, 2 * small)
            self._commit(table, commit_properties(table, given), adds, changed, merged)
        return given.without(decided.orphans, STORED_ROW_MISSING)

    def _same_files(self, stored: Files) -> bool:
        """Whether `deltalake` and this module see the same files."""
        return set(stored.paths) == set(map(unquote, self._live.adds))

    def _enable(self, table: DeltaTable) -> None:
        """Enable deletion vectors: a table feature that readers must support."""
        protocol, metadata = self._live.protocol, self._live.metadata
        features = {name: sorted({*protocol.get(name, ()), _FEATURE}) for name in ("readerFeatures", "writerFeatures")}
        actions: list[Action] = [
            {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
            {"metaData": {**metadata, "configuration": {**metadata.get("configuration", {}), _PROPERTY: "true"}}},
        ]
        commit(self._folder, table.version() + 1, "SET TBLPROPERTIES", actions, {})
        self._follow(table)

    def _follow(self, table: DeltaTable) -> None:
        table.update_incremental()
        if not self._live.follow(table.version()):
            raise CommitFailedError("the table's log was cleaned up in between")

    def set_properties(self, table: DeltaTable, wanted: Mapping[str, str]) -> bool:
        """Set properties of the table in one commit; False if its log cannot be read here.

        `deltalake` would enable unrelated features (`variantType`) on a table with deletion vectors.
        """
        if not self._live.follow(table.version()) or not _supported(self._live.protocol):
            return False
        metadata = self._live.metadata
        changed = {**metadata, "configuration": {**metadata.get("configuration", {}), **wanted}}
        commit(self._folder, table.version() + 1, "SET TBLPROPERTIES", [{"metaData": changed}], {})
        self._follow(table)
        return True

    # -- what is stored

    def _vectors(self, table: DeltaTable) -> dict[str, Ints]:
        """The deleted rows of each file; read by `deltalake` only where another writer made the vector."""
        wanted = {path: _identity(add) for path, add in self._live.adds.items() if add.get("deletionVector")}
        known = {path: rows for path, (identity, rows) in self._deleted.items() if wanted.get(path) == identity}
        if len(known) < len(wanted):
            alive = selections(table)
            for path in wanted.keys() - known.keys():
                known[path] = np.flatnonzero(~np.array(alive[file_name(path)], np.bool_))
        self._deleted = {path: (wanted[path], rows) for path, rows in known.items()}
        return known

    def _rows(self, path: str, layout: TableLayout, deleted: Ints | None) -> pa.Table:
        """The live rows of a file, in all columns."""
        rows = read(self._folder / unquote(path), layout.arrow)
        if deleted is None:
            return rows
        alive = np.ones(rows.num_rows, np.bool_)
        alive[deleted] = False
        return rows.filter(pa.array(alive))

    def _small_files(self, small: int) -> list[str]:
        """Small files of earlier batches, once there are SMALL_FILES of them."""
        adds = self._live.adds
        found = [path for path, add in adds.items() if _TAG in (add.get("tags") or {}) and add["size"] < small]
        return found if len(found) >= SMALL_FILES else []

    # -- what is written

    def _with_replaced(self, found: Found, replaced: Ints, deleted: dict[str, Ints]) -> dict[str, Ints]:
        """For each file with replaced rows, all of its deleted rows."""
        paths = list(self._live.adds)
        replaced = replaced[np.lexsort((found.row[replaced], found.file[replaced]))]
        files, starts = np.unique(found.file[replaced], return_index=True)
        groups = np.split(found.row[replaced], starts)[1:]
        new = {paths[at]: rows for at, rows in zip(files.tolist(), groups, strict=True)}
        return {path: np.union1d(deleted[path], rows) if path in deleted else rows for path, rows in new.items()}

    def _commit(
        self,
        table: DeltaTable,
        own: CommitProperties,
        new: Sequence[Action],
        deleted: dict[str, Ints],
        merged: Sequence[str],
    ) -> None:
        left = {path: rows for path, rows in deleted.items() if path not in merged}
        added = {path: with_vector(self._live.adds[path], rows) for path, rows in left.items()}
        actions: list[Action] = [{"remove": removal(self._live.adds[path])} for path in (*left, *merged)]
        actions += [{"add": add} for add in (*new, *added.values()) if add is not None]
        actions += [{"txn": {"appId": one.app_id, "version": one.version}} for one in own.app_transactions or ()]
        version = table.version() + 1
        reached("delta.before_mark")
        commit(self._folder, version, "MERGE", actions, dict(own.custom_metadata or {}))
        self._live.add_commit(version, actions)
        self._follow(table)
        self._deleted |= {path: (_identity(add), deleted[path]) for path, add in added.items() if add is not None}
        if version % _EVERY_CHECKPOINT == 0:
            table.create_checkpoint()


def _rows_replaceable(metadata: Action) -> bool:
    """Whether the table has no partitions and allows replacing rows."""
    appends_only = metadata.get("configuration", {}).get("delta.appendOnly") == "true"
    return not metadata.get("partitionColumns") and not appends_only


def _supported(protocol: Action) -> bool:
    """Whether this module supports every feature of the table; row ids, change feeds and the like it does not."""
    if protocol["minWriterVersion"] < _BY_FEATURES:
        return bool(protocol["minWriterVersion"] <= _PLAIN_WRITER and protocol["minReaderVersion"] == 1)
    return {*protocol.get("readerFeatures", ()), *protocol.get("writerFeatures", ())} <= _FEATURES


def with_vector(add: Action, deleted: Ints) -> Action | None:
    """The `add` action of a file with these rows deleted; None if no row is left."""
    stats = orjson.loads(add["stats"]) if add.get("stats") else {}
    if len(deleted) == stats.get("numRecords"):
        return None
    if stats and stats.get("tightBounds") is not False:
        add = {**add, "stats": orjson.dumps({**stats, "tightBounds": False}).decode()}
    return {**add, "dataChange": True, "deletionVector": inline(deleted)}


def _identity(add: Action) -> str:
    vector = add["deletionVector"]
    return f"{vector['storageType']}{vector['pathOrInlineDv']}@{vector.get('offset')}"


def _staged(folder: Path, rows: pa.Table, layout: TableLayout, file_size: int) -> list[Action]:
    """Write files with these rows into the table's folder, without a commit; `deltalake` makes their statistics."""
    stage = folder / STAGING / uuid4().hex
    rows = sorted_by(rows, layout.key).cast(layout.arrow)
    write_deltalake(stage, rows, target_file_size=file_size, writer_properties=layout.encodings)
    adds: list[Action] = [action["add"] for action in read_commit(stage, 0) if "add" in action]
    for add in adds:
        (stage / unquote(add["path"])).replace(folder / unquote(add["path"]))
    shutil.rmtree(stage)
    return [{**{name: value for name, value in add.items() if value is not None}, "tags": {_TAG: ""}} for add in adds]


def clear_staging(folder: Path, older_than: float = 3600.0) -> None:
    """Remove the staging folders of killed writers."""
    for stage in (folder / STAGING).glob("*"):
        if time.time() - stage.stat().st_mtime > older_than:
            shutil.rmtree(stage, ignore_errors=True)


def _hard_links(folder: Path) -> bool:
    """Whether the file system has hard links: a commit by a link never replaces another one."""
    one, two = (log_folder(folder) / f".{uuid4().hex}.tmp" for _ in range(2))
    try:
        one.touch()
        os.link(one, two)
    except OSError:
        return False
    finally:
        one.unlink(missing_ok=True)
        two.unlink(missing_ok=True)
    return True
