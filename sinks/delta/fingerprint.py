"""The mark of a Delta table: its id and newest commit; and whether another program has restored or replaced it.

The commits since the last check are read as files, without `deltalake`: some kilobytes every few seconds.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote

from deltalake import DeltaTable

from sinks.delta.files.storage import TableStorage
from sinks.delta.files.transaction_log import Action, commit_name, parse_commit
from sinks.delta.write.merge import WRITER
from sinks.fingerprints import Difference, Mark

_DESTRUCTIVE = ("RESTORE", "TRUNCATE", "REPLACE TABLE", "CREATE OR REPLACE TABLE")
GONE = Difference("its Delta table is gone", "Restore it.")
_OTHER = Difference("another Delta table, or an older copy, is at its path", "Restore the newest one.")
Open = Callable[[], DeltaTable]


def mark_of(table: DeltaTable, storage: TableStorage | None) -> Mark:
    """The current mark of a table."""
    version = table.version()
    return {"id": str(table.metadata().id), "version": version, "commit": _digest(_commit(storage, version))}


def compared(known: Mark, storage: TableStorage | None, open_table: Open) -> Mark | Difference:
    """The mark of an existing table, or why it differs from what was written. `storage` is None where only `deltalake`
    reads."""
    version = int(known["version"])
    commit = _commit(storage, version)
    if not commit:  # cleaned up since, or never made
        return _compared_by_deltalake(known, storage, open_table)
    if _digest(commit) != known["commit"]:
        return _OTHER
    while content := _commit(storage, version + 1):
        version, commit = version + 1, content
        if difference := _undone_by(parse_commit(content), str(known["id"]), version):
            return difference
    return {**known, "version": version, "commit": _digest(commit)}


def missing_files(table: DeltaTable, folder: Path) -> list[str]:
    """The files of a table's newest version that do not exist."""
    existing = {path.name for path in folder.iterdir()}
    paths = (Path(unquote(uri.removeprefix("file://"))) for uri in table.file_uris())
    return [path.name for path in paths if path.parent.name == folder.name and path.name not in existing]


def files_missing(files: list[str]) -> Difference:
    """The difference of a table without some of its files."""
    return Difference(f"{len(files)} file(s) of its Delta table are gone, for instance {files[0]}", "Restore them.")


def _compared_by_deltalake(known: Mark, storage: TableStorage | None, open_table: Open) -> Mark | Difference:
    table = open_table()
    now = mark_of(table, storage)
    if now["id"] != known["id"] or table.version() < int(known["version"]):
        return _OTHER
    for commit in table.history(table.version() - int(known["version"])) if now["version"] != known["version"] else ():
        version = int(commit.get("version", 0))
        if version > int(known["version"]) and (undone := _undone_by([{"commitInfo": commit}], "", version)):
            return undone
    return now


def _undone_by(actions: list[Action], identity: str, version: int) -> Difference | None:
    """The difference, if this commit has undone earlier ones."""
    ours = any(action.get("txn", {}).get("appId") == WRITER for action in actions)
    for action in actions:
        if identity and action.get("metaData", {}).get("id", identity) != identity:
            return _OTHER
        info = action.get("commitInfo", {})
        operation = str(info.get("operation", ""))
        overwrite = operation == "WRITE" and str(info.get("operationParameters", {}).get("mode")) == "Overwrite"
        if operation.startswith(_DESTRUCTIVE) or (overwrite and not ours and WRITER not in info):
            return Difference(f"{operation}, in version {version} of its Delta table, removed rows that were written")
    return None


def _commit(storage: TableStorage | None, version: int) -> bytes:
    if storage is None:
        return b""
    try:
        return storage.read(commit_name(version))
    except FileNotFoundError:
        return b""


def _digest(commit: bytes) -> str:
    return hashlib.sha256(commit).hexdigest()[:16]
