"""What a Delta table shows of itself: its id and newest commit, and whether somebody set it back since the last look.

On a local disk the commits since the last look are read as files, without a handle: some kilobytes every few seconds.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
from deltalake import DeltaTable

from sinks.delta.write.merge import WRITER
from sinks.fingerprints import Difference, Mark

_TAKEN_BACK = ("RESTORE", "TRUNCATE", "REPLACE TABLE", "CREATE OR REPLACE TABLE")
GONE = Difference("its Delta table is gone", "Bring it back.")
_OTHER = Difference("another Delta table lies where it was written, or an older copy of it", "Bring it back.")
Open = Callable[[], DeltaTable]


def mark_of(table: DeltaTable, folder: Path | None) -> Mark:
    """What a table shows now."""
    version = table.version()
    return {"id": str(table.metadata().id), "version": version, "commit": _digest(_commit(folder, version))}


def compared(known: Mark, folder: Path | None, opened: Open) -> Mark | Difference:
    """The table's mark now, or why it is not what was written. `folder` is None in an object store."""
    if folder is None:
        return _by_handle(known, opened)
    if not (folder / "_delta_log").is_dir():
        return GONE
    version = int(known["version"])
    commit = _commit(folder, version)
    if not commit:  # cleaned up since, or never there
        return _by_handle(known, opened)
    if _digest(commit) != known["commit"]:
        return _OTHER
    while content := _commit(folder, version + 1):
        version, commit = version + 1, content
        lines = [orjson.loads(line) for line in content.split(b"\n") if line]
        if foreign := _set_back(lines, str(known["id"]), version):
            return foreign
    return {**known, "version": version, "commit": _digest(commit)}


def missing_files(table: DeltaTable, folder: Path) -> list[str]:
    """Files that the newest version of a table needs and that are not there."""
    there = {path.name for path in folder.iterdir()}
    paths = (Path(unquote(uri.removeprefix("file://"))) for uri in table.file_uris())
    return [path.name for path in paths if path.parent.name == folder.name and path.name not in there]


def lacking(files: list[str]) -> Difference:
    """The difference for a table without some of its files."""
    return Difference(f"{len(files)} file(s) of its Delta table are gone, for instance {files[0]}", "Bring them back.")


def _by_handle(known: Mark, opened: Open) -> Mark | Difference:
    table = opened()
    now = mark_of(table, None)
    if now["id"] != known["id"] or table.version() < int(known["version"]):
        return _OTHER
    for commit in table.history(table.version() - int(known["version"])) if now["version"] != known["version"] else ():
        version = int(commit.get("version", 0))
        if version > int(known["version"]) and (foreign := _set_back([{"commitInfo": commit}], "", version)):
            return foreign
    return now


def _set_back(lines: list[dict[str, Any]], identity: str, version: int) -> Difference | None:
    """Whether a commit took away what was written before it."""
    ours = any(line.get("txn", {}).get("appId") == WRITER for line in lines)
    for line in lines:
        if identity and line.get("metaData", {}).get("id", identity) != identity:
            return _OTHER
        info = line.get("commitInfo", {})
        operation = str(info.get("operation", ""))
        overwrite = operation == "WRITE" and str(info.get("operationParameters", {}).get("mode")) == "Overwrite"
        if operation.startswith(_TAKEN_BACK) or (overwrite and not ours and WRITER not in info):
            return Difference(f"{operation}, in version {version} of its Delta table, took back what was written")
    return None


def _commit(folder: Path | None, version: int) -> bytes:
    if folder is None:
        return b""
    try:
        return (folder / "_delta_log" / f"{version:020}.json").read_bytes()
    except FileNotFoundError:
        return b""


def _digest(commit: bytes) -> str:
    return hashlib.sha256(commit).hexdigest()[:16]
