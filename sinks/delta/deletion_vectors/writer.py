"""Scattered changes of a large table: the old rows are marked as gone, the new ones go into a file of their own.

One commit, as with every way: files whose rows were replaced are named again with a deletion vector, and the new file
is added. Nothing is copied, so a batch costs what its keys cost to find: the key columns of files that may hold them.
Small files that earlier batches left are taken in by every so many, so that their number stays bounded; the order of
the files is restored by maintenance (sinks.delta.maintenance).

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
from sinks.delta.deletion_vectors.key_lookup import Found, Table, look_up, read
from sinks.delta.rows.changes import TypedChanges, sorted_by
from sinks.delta.rows.rewrite import decide, fresh
from sinks.delta.schema.layout import TableLayout
from sinks.delta.transaction_log import Action, LiveFiles, commit, file_name, removal, selections
from sinks.delta.write.merge import marks
from sinks.delta.write.region import Files, Region
from sinks.rows.images import STORED_ROW_MISSING

LEAST_REGION = 4 * 1024 * 1024
"""Compressed bytes that a rewrite must touch before marks are made instead: some 120,000 rows, 0.1 s of CPU. Below that
a rewrite costs no more, and leaves no work behind for readers and for maintenance."""

LEAST_RATIO = 4
"""…and for each change, so many rows must be spared the copying."""

SMALL_FILES = 32
"""Small files are taken in when there are so many: each is opened by every batch whose keys it may hold."""

STAGING = "_millrace_staging"
_TAG = "MILLRACE_MARKS"
"""On files that hold the new rows of marked ones, so that those left by small batches are known from sorted ones."""
_FEATURE = "deletionVectors"
_FEATURES = {_FEATURE, "timestampNtz", "appendOnly", "invariants"}
_PLAIN_WRITER, _BY_FEATURES = 2, 7
_PROPERTY = "delta.enableDeletionVectors"
_EVERY_CHECKPOINT = 100


class VectorWriter:
    """One table's way with deletion vectors. Not for two threads at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._live = LiveFiles(folder)
        self._gone: dict[str, tuple[str, Ints]] = {}
        self._able: bool | None = None
        self._keys = KeyCache()

    def pays(self, given: TypedChanges, region: Region | None) -> bool:
        """Whether marking is cheaper than rewriting the files that the batch touches."""
        if region is None or region.bytes < LEAST_REGION or region.rows < LEAST_RATIO * given.rows.num_rows:
            return False
        if self._able is None:
            self._able = _links(self._folder)
        return self._able

    def write(self, table: DeltaTable, given: TypedChanges, stored: Files, small: int) -> TypedChanges | None:
        """Write the batch in one commit, or in none if nothing changes; None if the table's log cannot be read here."""
        if not self._live.follow(table.version()) or not self._known(stored) or not _understood(self._live.protocol):
            return None
        if not _plain(self._live.metadata):
            return None
        if _PROPERTY not in self._live.metadata.get("configuration", {}):
            self._allow(table)
            if not self._known(stored):
                raise CommitFailedError("another writer of the table came in between")
        gone = self._vectors(table)
        found = look_up(Table(self._folder, self._live.adds, gone, self._keys), given, stored)
        decided = decide(found.rows, given)
        if decided.winners.any():
            marked = self._marked(found, decided.replaced, gone)
            taken_in = self._small_files(small)
            old = [self._rows(path, given.layout, marked.get(path, gone.get(path))) for path in taken_in]
            rows = pa.concat_tables([fresh(found.rows, given, decided), *old])
            adds = _staged(self._folder, rows, given.layout, 2 * small)
            self._commit(table, marks(table, given), adds, marked, taken_in)
        return given.without(decided.orphans, STORED_ROW_MISSING)

    def _known(self, stored: Files) -> bool:
        """Whether both readers of the log see the same files."""
        return set(stored.paths) == set(map(unquote, self._live.adds))

    def _allow(self, table: DeltaTable) -> None:
        """Deletion vectors are a feature of the table that its readers must know."""
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

        `deltalake` would list features that nobody asked for (`variantType`) on a table with deletion vectors.
        """
        if not self._live.follow(table.version()) or not _understood(self._live.protocol):
            return False
        metadata = self._live.metadata
        changed = {**metadata, "configuration": {**metadata.get("configuration", {}), **wanted}}
        commit(self._folder, table.version() + 1, "SET TBLPROPERTIES", [{"metaData": changed}], {})
        self._follow(table)
        return True

    # -- what is stored

    def _vectors(self, table: DeltaTable) -> dict[str, Ints]:
        """The rows of each file that no longer count; asked of `deltalake` only where another writer made a vector."""
        wanted = {path: _identity(add) for path, add in self._live.adds.items() if add.get("deletionVector")}
        known = {path: rows for path, (identity, rows) in self._gone.items() if wanted.get(path) == identity}
        if len(known) < len(wanted):
            alive = selections(table)
            for path in wanted.keys() - known.keys():
                known[path] = np.flatnonzero(~np.array(alive[file_name(path)], np.bool_))
        self._gone = {path: (wanted[path], rows) for path, rows in known.items()}
        return known

    def _rows(self, path: str, layout: TableLayout, dead: Ints | None) -> pa.Table:
        """The live rows of a file, in all columns."""
        rows = read(self._folder / unquote(path), layout.arrow)
        if dead is None:
            return rows
        alive = np.ones(rows.num_rows, np.bool_)
        alive[dead] = False
        return rows.filter(pa.array(alive))

    def _small_files(self, small: int) -> list[str]:
        """Files that earlier batches left, once there are many."""
        adds = self._live.adds
        left = [path for path, add in adds.items() if _TAG in (add.get("tags") or {}) and add["size"] < small]
        return left if len(left) >= SMALL_FILES else []

    # -- what is written

    def _marked(self, found: Found, replaced: Ints, gone: dict[str, Ints]) -> dict[str, Ints]:
        """For each file that loses rows, all rows of it that no longer count."""
        paths = list(self._live.adds)
        replaced = replaced[np.lexsort((found.place[replaced], found.file[replaced]))]
        files, starts = np.unique(found.file[replaced], return_index=True)
        lost = np.split(found.place[replaced], starts)[1:]
        marked = {paths[at]: places for at, places in zip(files.tolist(), lost, strict=True)}
        return {path: np.union1d(gone[path], places) if path in gone else places for path, places in marked.items()}

    def _commit(
        self,
        table: DeltaTable,
        own: CommitProperties,
        new: Sequence[Action],
        marked: dict[str, Ints],
        taken_in: Sequence[str],
    ) -> None:
        left = {path: dead for path, dead in marked.items() if path not in taken_in}
        named = {path: with_vector(self._live.adds[path], dead) for path, dead in left.items()}
        actions: list[Action] = [{"remove": removal(self._live.adds[path])} for path in (*left, *taken_in)]
        actions += [{"add": add} for add in (*new, *named.values()) if add is not None]
        actions += [{"txn": {"appId": one.app_id, "version": one.version}} for one in own.app_transactions or ()]
        version = table.version() + 1
        reached("delta.before_mark")
        commit(self._folder, version, "MERGE", actions, dict(own.custom_metadata or {}))
        self._live.take(version, actions)
        self._follow(table)
        self._gone |= {path: (_identity(add), marked[path]) for path, add in named.items() if add is not None}
        if version % _EVERY_CHECKPOINT == 0:
            table.create_checkpoint()


def _plain(metadata: Action) -> bool:
    """Whether rows of the table may be replaced by files that name no partition."""
    appends_only = metadata.get("configuration", {}).get("delta.appendOnly") == "true"
    return not metadata.get("partitionColumns") and not appends_only


def _understood(protocol: Action) -> bool:
    """Whether a commit written here keeps what the table promises: row ids, change feeds and the like it does not."""
    if protocol["minWriterVersion"] < _BY_FEATURES:
        return bool(protocol["minWriterVersion"] <= _PLAIN_WRITER and protocol["minReaderVersion"] == 1)
    return {*protocol.get("readerFeatures", ()), *protocol.get("writerFeatures", ())} <= _FEATURES


def with_vector(add: Action, dead: Ints) -> Action | None:
    """A file named again without these rows; None if none is left."""
    stats = orjson.loads(add["stats"]) if add.get("stats") else {}
    if len(dead) == stats.get("numRecords"):
        return None
    if stats and stats.get("tightBounds") is not False:
        add = {**add, "stats": orjson.dumps({**stats, "tightBounds": False}).decode()}
    return {**add, "dataChange": True, "deletionVector": inline(dead)}


def _identity(add: Action) -> str:
    vector = add["deletionVector"]
    return f"{vector['storageType']}{vector['pathOrInlineDv']}@{vector.get('offset')}"


def _staged(folder: Path, rows: pa.Table, layout: TableLayout, file_size: int) -> list[Action]:
    """The rows as files of the table, not yet part of it; `deltalake` itself writes them and their statistics."""
    stage = folder / STAGING / uuid4().hex
    rows = sorted_by(rows, layout.key).cast(layout.arrow)
    write_deltalake(stage, rows, target_file_size=file_size, writer_properties=layout.encodings)
    lines = (stage / "_delta_log" / f"{0:020}.json").read_bytes().split(b"\n")
    adds: list[Action] = [action["add"] for action in map(orjson.loads, filter(None, lines)) if "add" in action]
    for add in adds:
        (stage / unquote(add["path"])).replace(folder / unquote(add["path"]))
    shutil.rmtree(stage)
    return [{**{name: value for name, value in add.items() if value is not None}, "tags": {_TAG: ""}} for add in adds]


def clear_staging(folder: Path, older_than: float = 3600.0) -> None:
    """Remove what a killed writer left behind."""
    for stage in (folder / STAGING).glob("*"):
        if time.time() - stage.stat().st_mtime > older_than:
            shutil.rmtree(stage, ignore_errors=True)


def _links(folder: Path) -> bool:
    """Whether the file system has hard links, by which a commit is made without replacing another's."""
    one, two = (folder / "_delta_log" / f".{uuid4().hex}.tmp" for _ in range(2))
    try:
        one.touch()
        os.link(one, two)
    except OSError:
        return False
    finally:
        one.unlink(missing_ok=True)
        two.unlink(missing_ok=True)
    return True
