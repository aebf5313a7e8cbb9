"""The transaction log of a Delta table: live files, commits, and their durability.

`deltalake` never fsyncs, writes no deletion vectors, and reads every commit since the last checkpoint to look up a
transaction id, so this module does. A log in an unknown form (checkpoints in parts, or of version 2) counts as
unreadable, and the caller uses `deltalake` instead.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from cdc.durable_files import sync_written
from sinks.delta.deletion_vectors.bitmap import vector_file
from sinks.delta.files.storage import LOG, TableStorage

Action = dict[str, Any]
"""The content of one action, as the log writes it."""


def log_folder(folder: Path) -> Path:
    """The folder of a table's commits."""
    return folder / LOG


def commit_path(folder: Path, version: int) -> Path:
    """The file of one commit."""
    return folder / commit_name(version)


def commit_name(version: int) -> str:
    """The path of one commit in its table."""
    return f"{LOG}/{version:020}.json"


def read_commit(storage: TableStorage, version: int) -> list[Action]:
    """The actions of one commit. Raises FileNotFoundError if it was never made or has been cleaned up."""
    return parse_commit(storage.read(commit_name(version)))


def parse_commit(content: bytes) -> list[Action]:
    """The actions of a commit. Statistics may contain other line breaks than \\n."""
    return [orjson.loads(line) for line in content.split(b"\n") if line]


class TransactionAwareTable(DeltaTable):
    """A `DeltaTable` that remembers transaction ids. Not for two threads at once.

    For each look-up `deltalake` reads all commits since the last checkpoint: hundreds of files twice per batch, on a
    table that is written every second. Commits never change, so only new ones are read.
    """

    def __init__(self, storage: TableStorage, options: dict[str, str] | None = None) -> None:
        super().__init__(storage.uri, storage_options=options)
        self._storage = storage
        self._ids: dict[str, int | None] = {}
        self._seen = -1

    def transaction_version(self, app_id: str) -> int | None:
        """The number that the newest commit with this application id has."""
        self._read_new_commits(self.version())
        if app_id not in self._ids:
            self._ids[app_id] = super().transaction_version(app_id)
        return self._ids[app_id]

    def _read_new_commits(self, version: int) -> None:
        """Where a commit has been cleaned up, `deltalake` is asked again."""
        for number in range(self._seen + 1, version + 1) if self._ids else ():
            try:
                content = self._storage.read(commit_name(number))
            except FileNotFoundError:
                self._ids.clear()
                break
            for line in content.split(b"\n"):
                if b'"txn"' in line and (found := orjson.loads(line).get("txn")):
                    self._ids[found["appId"]] = found["version"]
        self._seen = version


class LiveFiles:
    """The `add` actions of a table, kept up to date commit by commit. Not for two threads at once."""

    def __init__(self, storage: TableStorage) -> None:
        self._storage = storage
        self._version = -1
        self.adds: dict[str, Action] = {}
        self.protocol: Action = {}
        self.metadata: Action = {}

    def follow(self, version: int) -> bool:
        """Bring the files to this version of the table; False if its log cannot be read here."""
        if self._version > version or self._version < 0:
            self._version = -1
        try:
            if self._version < 0:
                self._from_checkpoint(version)
            for number in range(self._version + 1, version + 1):
                self.add_commit(number, read_commit(self._storage, number))
        except (FileNotFoundError, _Unreadable):
            self._version = -1
            return False
        return bool(self.protocol and self.metadata)

    def add_commit(self, version: int, actions: Iterable[Action]) -> None:
        """Apply the actions of the next commit; its writer passes them without reading the file."""
        actions = list(actions)
        for action in actions:
            if "remove" in action:
                self.adds.pop(action["remove"]["path"], None)
        for action in actions:
            for kind, content in action.items():
                self._add(kind, content)
        self._version = version

    def _from_checkpoint(self, version: int) -> None:
        self.adds, self.protocol, self.metadata = {}, {}, {}
        try:
            facts = orjson.loads(self._storage.read(f"{LOG}/_last_checkpoint"))
        except FileNotFoundError:
            return
        if facts["version"] > version or "parts" in facts or "v2Checkpoint" in facts:
            raise _Unreadable
        file = self._storage.open(f"{LOG}/{facts['version']:020}.checkpoint.parquet")
        actions = pq.read_table(file, columns=["add", "protocol", "metaData"])
        for kind in ("add", "protocol", "metaData"):
            found: list[Any] = actions[kind].drop_null().to_pylist()
            for content in found:
                self._add(kind, _without_nulls(content))
        self._version = int(facts["version"])

    def _add(self, kind: str, content: Action) -> None:
        if kind == "add":
            self.adds[content["path"]] = {**content, "partitionValues": {}}
        elif kind == "protocol":
            self.protocol = content
        elif kind == "metaData":
            self.metadata = content


class _Unreadable(Exception):
    """The log has an unknown form."""


def _without_nulls(action: Action) -> Action:
    """As a commit would write it: Parquet has every field, and pairs for a map."""
    maps = ("configuration", "options", "tags")
    plain = {name: dict(value) if name in maps else value for name, value in action.items() if value is not None}
    return {name: _without_nulls(value) if isinstance(value, dict) else value for name, value in plain.items()}


# -- commits


def removal(add: Action) -> Action:
    """The action that removes a file together with its deletion vector."""
    kept = {name: add[name] for name in ("path", "size", "deletionVector") if add.get(name) is not None}
    return {
        **kept,
        "dataChange": True,
        "deletionTimestamp": _now(),
        "extendedFileMetadata": True,
        "partitionValues": {},
    }


def commit(
    storage: TableStorage, version: int, operation: str, actions: Iterable[Action], facts: Mapping[str, str]
) -> None:
    """Write commit `version` whole or not at all; on a disk `sync` makes it durable.

    Raises CommitFailedError if another writer made it first.
    """
    info = {"timestamp": _now(), "operation": operation, "operationParameters": {}, "engineInfo": "millrace", **facts}
    lines = b"\n".join(orjson.dumps(action) for action in ({"commitInfo": info}, *actions))
    try:
        storage.create(commit_name(version), lines)
    except FileExistsError as error:
        raise CommitFailedError("another writer of the table committed first") from error


def sync(folder: Path, after: int, until: int) -> None:
    """Make the commits after one version, up to another, durable with the files that they add: 5 to 20 ms a commit.

    The trap: this follows the commit, so it covers what `apply` has returned from. A power cut in the middle of a
    commit can leave a commit whose files are empty (docs/adr/0004-delta-writes.md).
    """
    for version in range(after + 1, until + 1):
        path = commit_path(folder, version)
        with suppress(FileNotFoundError):  # cleaned up, so durable for long, or compacted by another process
            for added in _added_files(path.read_bytes()):
                with suppress(FileNotFoundError):
                    sync_written(folder / added)
            sync_written(path)
    for directory in (folder, log_folder(folder)):
        sync_written(directory)


def _added_files(content: bytes) -> Iterator[str]:
    for line in content.split(b"\n"):
        if not line or line.startswith(b'{"remove":'):
            continue
        added = orjson.loads(line).get("add")
        if added is not None and (vector := added.get("deletionVector")) is None:
            yield unquote(added["path"])
        elif added is not None and vector["storageType"] == "u":  # an old file with a new vector, which Spark wrote
            yield vector_file(vector["pathOrInlineDv"])


def _now() -> int:
    return int(time.time() * 1000)


# -- deletion vectors, read by `deltalake`


def selections(table: DeltaTable) -> dict[str, list[bool]]:
    """By file name, of every file with a deletion vector: which of its rows are live."""
    found = pa.RecordBatchReader.from_stream(table.deletion_vectors()).read_all().to_pylist()
    return {file_name(one["filepath"]): one["selection_vector"] for one in found}


def file_name(path: str) -> str:
    """The file's name on disk; paths in the log are URL-encoded."""
    return unquote(path).rsplit("/", 1)[-1]
