"""A Delta table's own log on a local disk: which files are live, and commits that `deltalake` has no words for.

Only what deletion vectors need. A log in a form that is not known here (checkpoints in parts, or of version 2) is said
to be unreadable, and the caller goes another way; nothing is guessed.
"""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from cdc.durable_files import create

Action = dict[str, Any]
"""The content of one action, as the log writes it."""

_MODE = 0o666  # less the umask, as `deltalake` writes: other users may read the table


class LiveFiles:
    """The `add` actions of a table, followed from commit to commit. Not for two threads at once."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "_delta_log"
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
                commit = (self._log / f"{number:020}.json").read_bytes()
                self.take(number, [orjson.loads(line) for line in filter(None, commit.split(b"\n"))])
        except (FileNotFoundError, _Unreadable):
            self._version = -1
            return False
        return bool(self.protocol and self.metadata)

    def _from_checkpoint(self, version: int) -> None:
        self.adds, self.protocol, self.metadata = {}, {}, {}
        last = self._log / "_last_checkpoint"
        if not last.exists():
            return
        facts = orjson.loads(last.read_bytes())
        if facts["version"] > version or "parts" in facts or "v2Checkpoint" in facts:
            raise _Unreadable
        name = f"{facts['version']:020}.checkpoint.parquet"
        actions = pq.read_table(self._log / name, columns=["add", "protocol", "metaData"])
        for kind in ("add", "protocol", "metaData"):
            found: list[Any] = actions[kind].drop_null().to_pylist()
            for action in found:
                self._learn(kind, _without_nulls(action))
        self._version = int(facts["version"])

    def take(self, version: int, lines: Iterable[Action]) -> None:
        """Take in the actions of the next commit; its writer knows them without reading."""
        lines = list(lines)
        for line in lines:
            if "remove" in line:
                self.adds.pop(line["remove"]["path"], None)
        for line in lines:
            for kind, action in line.items():
                self._learn(kind, action)
        self._version = version

    def _learn(self, kind: str, action: Action) -> None:
        if kind == "add":
            self.adds[action["path"]] = {**action, "partitionValues": {}}
        elif kind == "protocol":
            self.protocol = action
        elif kind == "metaData":
            self.metadata = action


class _Unreadable(Exception):
    """The log has a form that is not known here."""


def _without_nulls(action: Action) -> Action:
    """As a commit would write it: Parquet has a place for every field, and pairs for a map."""
    maps = ("configuration", "options", "tags")
    plain = {name: dict(value) if name in maps else value for name, value in action.items() if value is not None}
    return {name: _without_nulls(value) if isinstance(value, dict) else value for name, value in plain.items()}


def removal(add: Action) -> Action:
    """The action that takes a file away as it is, its deletion vector included: both name it together."""
    kept = {name: add[name] for name in ("path", "size", "deletionVector") if add.get(name) is not None}
    return {
        **kept,
        "dataChange": True,
        "deletionTimestamp": _now(),
        "extendedFileMetadata": True,
        "partitionValues": {},
    }


def commit(folder: Path, version: int, operation: str, actions: Iterable[Action], facts: Mapping[str, str]) -> None:
    """Write commit `version`, durable and whole. Raises CommitFailedError if another writer made it first."""
    info = {"timestamp": _now(), "operation": operation, "operationParameters": {}, "engineInfo": "millrace", **facts}
    lines = b"\n".join(orjson.dumps(action) for action in ({"commitInfo": info}, *actions))
    try:
        create(folder / "_delta_log" / f"{version:020}.json", lines, _MODE)
    except FileExistsError as error:
        raise CommitFailedError("another writer of the table won") from error


def selections(table: DeltaTable) -> dict[str, list[bool]]:
    """By file name, of every file with a deletion vector: which of its rows still count."""
    found = pa.RecordBatchReader.from_stream(table.deletion_vectors()).read_all().to_pylist()
    return {file_name(one["filepath"]): one["selection_vector"] for one in found}


def file_name(path: str) -> str:
    """The last part of a path, as it is on disk: logs and addresses escape it."""
    return unquote(path).rsplit("/", 1)[-1]


def _now() -> int:
    return int(time.time() * 1000)
