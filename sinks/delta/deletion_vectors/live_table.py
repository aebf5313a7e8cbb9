"""The newest version of a table as its log describes it: files, deleted rows, and commits that mark more of them."""

from collections.abc import Mapping, Sequence
from typing import TypeAlias
from urllib.parse import unquote

import numpy as np
import orjson
from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError

from cdc.arrays import Ints
from cdc.failpoint import reached
from sinks.delta.deletion_vectors.bitmap import inline_all, is_readable, positions
from sinks.delta.files.storage import TableStorage
from sinks.delta.files.transaction_log import Action, LiveFiles, commit, file_name, removal, selections
from sinks.delta.write.region import Files

_FEATURE = "deletionVectors"
_FEATURES = {_FEATURE, "timestampNtz", "appendOnly", "invariants"}
_PLAIN_WRITER, _BY_FEATURES = 2, 7
_PROPERTY = "delta.enableDeletionVectors"
_EVERY_CHECKPOINT = 100

_Identity: TypeAlias = tuple[str, str, int | None]


class LiveTable:
    """One table, followed commit by commit. Not for two threads at once."""

    def __init__(self, storage: TableStorage) -> None:
        self.storage = storage
        self._live = LiveFiles(storage)
        self._deleted: dict[str, tuple[_Identity, Ints]] = {}

    @property
    def adds(self) -> Mapping[str, Action]:
        """The `add` action of every file, by its path in the log."""
        return self._live.adds

    def follow(self, table: DeltaTable) -> bool:
        """Come to the version of the table; False where its log or one of its features is unknown here."""
        return (
            self._live.follow(table.version())
            and _supported(self._live.protocol)
            and _rows_replaceable(self._live.metadata)
        )

    def has_files(self, stored: Files) -> bool:
        """Whether `deltalake` and this module see the same files."""
        return set(stored.paths) == set(map(unquote, self.adds))

    @property
    def enabled(self) -> bool:
        """Whether deletion vectors are enabled."""
        return _PROPERTY in self._live.metadata.get("configuration", {})

    @property
    def has_vector_files(self) -> bool:
        """Whether some vectors are in files of their own."""
        return any((add.get("deletionVector") or {}).get("storageType", "i") != "i" for add in self.adds.values())

    def enable(self, table: DeltaTable) -> None:
        """Enable deletion vectors in a commit: a table feature that readers must support."""
        protocol, metadata = self._live.protocol, self._live.metadata
        features = {name: sorted({*protocol.get(name, ()), _FEATURE}) for name in ("readerFeatures", "writerFeatures")}
        actions: list[Action] = [
            {"protocol": {"minReaderVersion": 3, "minWriterVersion": 7, **features}},
            {"metaData": {**metadata, "configuration": {**metadata.get("configuration", {}), _PROPERTY: "true"}}},
        ]
        commit(self.storage, table.version() + 1, "SET TBLPROPERTIES", actions, {})
        self._refresh(table)

    def set_properties(self, table: DeltaTable, wanted: Mapping[str, str]) -> bool:
        """Set properties of the table in one commit; False if its log cannot be read here.

        `deltalake` would enable unrelated features (`variantType`) on a table with deletion vectors.
        """
        if not self._live.follow(table.version()) or not _supported(self._live.protocol):
            return False
        metadata = self._live.metadata
        changed = {**metadata, "configuration": {**metadata.get("configuration", {}), **wanted}}
        commit(self.storage, table.version() + 1, "SET TBLPROPERTIES", [{"metaData": changed}], {})
        self._refresh(table)
        return True

    def deleted(self, table: DeltaTable) -> dict[str, Ints]:
        """The deleted rows of each file; read by `deltalake` only where another writer made the vector."""
        wanted = {path: _identity(add) for path, add in self.adds.items() if add.get("deletionVector")}
        known = {path: rows for path, (identity, rows) in self._deleted.items() if wanted.get(path) == identity}
        for path in wanted.keys() - known.keys():
            if (rows := _own_vector(self.adds[path])) is not None:
                known[path] = rows
        if len(known) < len(wanted):
            alive = selections(table)
            for path in wanted.keys() - known.keys():
                known[path] = np.flatnonzero(~np.array(alive[file_name(path)], np.bool_))
        self._deleted = {path: (wanted[path], rows) for path, rows in known.items()}
        return known

    def commit(
        self,
        table: DeltaTable,
        own: CommitProperties,
        new: Sequence[Action],
        deleted: Mapping[str, Ints],
        merged: Sequence[str],
    ) -> None:
        """Add new files, give files these deleted rows (all of them), and remove merged files, in one commit."""
        left = {path: rows for path, rows in deleted.items() if path not in merged}
        vectors = inline_all(list(left.values()))
        added = {path: with_vector(self.adds[path], one) for path, one in zip(left, vectors, strict=True)}
        actions: list[Action] = [{"remove": removal(self.adds[path])} for path in (*left, *merged)]
        actions += [{"add": add} for add in (*new, *added.values()) if add is not None]
        actions += [{"txn": {"appId": one.app_id, "version": one.version}} for one in own.app_transactions or ()]
        version = table.version() + 1
        reached("delta.before_mark")
        commit(self.storage, version, "MERGE", actions, dict(own.custom_metadata or {}))
        self._live.add_commit(version, actions)
        self._refresh(table)
        self._deleted |= {path: (_identity(add), left[path]) for path, add in added.items() if add is not None}
        if version % _EVERY_CHECKPOINT == 0:
            table.create_checkpoint()

    def _refresh(self, table: DeltaTable) -> None:
        table.update_incremental()
        if not self._live.follow(table.version()):
            raise CommitFailedError("the table's log was cleaned up in between")


def joined(deleted: Ints | None, more: Ints) -> Ints:
    """Sorted rows of both; `more` are sorted and not among the deleted ones."""
    return more if deleted is None else np.sort(np.concatenate([deleted, more]), kind="stable")


def _rows_replaceable(metadata: Action) -> bool:
    """Whether the table has no partitions and allows replacing rows."""
    appends_only = metadata.get("configuration", {}).get("delta.appendOnly") == "true"
    return not metadata.get("partitionColumns") and not appends_only


def _supported(protocol: Action) -> bool:
    """Whether this module supports every feature of the table; row ids, change feeds and the like it does not."""
    if protocol["minWriterVersion"] < _BY_FEATURES:
        return bool(protocol["minWriterVersion"] <= _PLAIN_WRITER and protocol["minReaderVersion"] == 1)
    return {*protocol.get("readerFeatures", ()), *protocol.get("writerFeatures", ())} <= _FEATURES


def with_vector(add: Action, vector: Action) -> Action | None:
    """The `add` action of a file with this vector; None if no row is left."""
    stats = orjson.loads(add["stats"]) if add.get("stats") else {}
    if vector["cardinality"] == stats.get("numRecords"):
        return None
    if stats and stats.get("tightBounds") is not False:
        add = {**add, "stats": orjson.dumps({**stats, "tightBounds": False}).decode()}
    return {**add, "dataChange": True, "deletionVector": vector}


def inline_vector(add: Action) -> str | None:
    """The text of a file's vector, if it is part of the log and this module can read it."""
    vector = add.get("deletionVector") or {}
    text = str(vector["pathOrInlineDv"]) if vector.get("storageType") == "i" else ""
    return text if is_readable(text) else None


def _own_vector(add: Action) -> Ints | None:
    """The deleted rows of a file whose vector this module can read."""
    text = inline_vector(add)
    return None if text is None else positions(text)


def _identity(add: Action) -> _Identity:
    vector = add["deletionVector"]
    return vector["storageType"], vector["pathOrInlineDv"], vector.get("offset")
