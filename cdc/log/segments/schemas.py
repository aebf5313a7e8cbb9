"""The schema registry: one JSON file per table beside the log, replaced atomically.

Any process may read while one writes. The ids of a table's schemas count from 1 and are never reused.
"""

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import quote

from cdc.durable_files import make_folder, open_or_make, sync_folder, write_errors
from cdc.durable_files import replace as replace_file
from cdc.errors import LogCorrupt
from cdc.model import Column, PgType, TableId, TableSchema, TypeKind

_FORMAT = 1


@dataclass(frozen=True, slots=True)
class _CachedFile:
    """The content of a file; `stamp` changes whenever the file is replaced."""

    stamp: tuple[int, int]
    versions: tuple[TableSchema, ...]


class FolderSchemas:
    """Schemas in a folder; safe to share between threads and processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, _CachedFile] = {}
        self._unsynced = False

    def record(self, schema: TableSchema) -> TableSchema:
        """Store a schema if it differs from the newest one of its table."""
        with self._lock, self._exclusively():
            path = self._folder / file_name(schema.table)
            self._sync_pending()
            versions = self._load(path)
            if versions and replace(schema, id=versions[-1].id) == versions[-1]:
                return versions[-1]
            stored = replace(schema, id=(versions[-1].id if versions else 0) + 1)
            self._unsynced = True
            with write_errors(self._folder):
                replace_file(path, encode((*versions, stored)))
            self._unsynced = False
            return stored

    def _sync_pending(self) -> None:
        """If a full disk prevented the sync after a replace, sync now: the new file must not be used before."""
        if self._unsynced:
            with write_errors(self._folder):
                sync_folder(self._folder)
            self._unsynced = False

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        """The schema that a change was written with."""
        with self._lock:
            for schema in self._load(self._folder / file_name(table)):
                if schema.id == schema_id:
                    return schema
        raise unknown_schema(table, schema_id)

    def newest(self) -> Sequence[TableSchema]:
        """The newest schema of every table, ordered by name."""
        with self._lock:
            names = self._folder.glob("*.json") if self._folder.is_dir() else ()
            newest = [versions[-1] for path in names if (versions := self._load(path))]
        return sorted(newest, key=lambda schema: schema.table)

    @contextmanager
    def _exclusively(self) -> Iterator[None]:
        make_folder(self._folder)
        with write_errors(self._folder / "lock"):
            lock = open_or_make(self._folder / "lock")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def _load(self, path: Path) -> tuple[TableSchema, ...]:
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns)
            known = self._known.get(path.name)
            if known is None or known.stamp != stamp:
                known = _CachedFile(stamp, decode(path.read_bytes()))
                self._known[path.name] = known
        except FileNotFoundError:
            return ()
        except (ValueError, KeyError, TypeError):
            raise LogCorrupt(f"Schema file {path.name} is not readable.", "Restore it from a backup.") from None
        return known.versions


def unknown_schema(table: TableId, schema_id: int) -> LogCorrupt:
    """The error for an id that the registry does not have."""
    return LogCorrupt(
        f"Schema {schema_id} of {table} is not in the registry.",
        "Restore the log's schemas folder together with its segments.",
    )


def file_name(table: TableId) -> str:
    """A readable file name that is unique whatever characters the table's name has."""
    digest = hashlib.sha256(f"{table.schema}\0{table.name}".encode()).hexdigest()[:16]
    return f"{quote(str(table), safe='')[:120]}-{digest}.json"


def encode(versions: Sequence[TableSchema]) -> bytes:
    """Some schemas of one table as JSON."""
    first = versions[0].table
    data = {
        "format": _FORMAT,
        "schema": first.schema,
        "name": first.name,
        "versions": [
            {
                "id": schema.id,
                "oid": schema.oid,
                "identity": schema.identity,
                "columns": [
                    {
                        "name": column.name,
                        "type": _type_data(column.type),
                        "modifier": column.modifier,
                        "key": column.key,
                    }
                    for column in schema.columns
                ],
            }
            for schema in versions
        ],
    }
    return json.dumps(data, ensure_ascii=False, indent=1).encode()


def decode(raw: bytes) -> tuple[TableSchema, ...]:
    """The inverse of `encode`. Raises ValueError, KeyError or TypeError."""
    data = json.loads(raw)
    if data["format"] != _FORMAT:
        raise ValueError(data["format"])
    table = TableId(data["schema"], data["name"])
    return tuple(
        TableSchema(
            table,
            tuple(
                Column(column["name"], _type(column["type"]), column["modifier"], column["key"])
                for column in version["columns"]
            ),
            version["id"],
            version["oid"],
            version["identity"],
        )
        for version in data["versions"]
    )


def _type_data(kind: PgType) -> dict[str, object]:
    element = None if kind.element is None else _type_data(kind.element)
    return {"oid": kind.oid, "name": kind.name, "kind": kind.kind.value, "element": element}


def _type(data: Mapping[str, object]) -> PgType:
    oid, name, kind, element = (data[key] for key in ("oid", "name", "kind", "element"))
    if not isinstance(oid, int) or not isinstance(name, str) or not isinstance(kind, str):
        raise ValueError("type")
    return PgType(oid, name, TypeKind(kind), _type(element) if isinstance(element, dict) else None)
