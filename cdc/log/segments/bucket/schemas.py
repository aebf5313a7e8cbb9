"""The schema registry in a bucket: one object per schema, `<table>/<id>.json`, which never changes.

An id is taken by creating its object, so that no two processes give the same one.
"""

import threading
from collections.abc import Sequence
from dataclasses import replace

from cdc.errors import LogCorrupt
from cdc.log.segments.bucket.access import LogBucket
from cdc.log.segments.schemas import decode, encode, file_name, unknown_schema
from cdc.model import TableId, TableSchema

_FOLDER = "schemas"


class BucketSchemas:
    """Schemas in a bucket; safe to share between threads and processes."""

    def __init__(self, bucket: LogBucket) -> None:
        self._bucket = bucket
        self._lock = threading.Lock()
        self._known: dict[str, TableSchema] = {}
        self._newest: dict[TableId, TableSchema] = {}

    def record(self, schema: TableSchema) -> TableSchema:
        """Store a schema if it differs from the newest one of its table."""
        folder = _folder(schema.table)
        with self._lock:
            newest = self._newest.get(schema.table) or self._last(folder)
            while newest is None or replace(schema, id=newest.id) != newest:
                stored = replace(schema, id=1 if newest is None else newest.id + 1)
                try:
                    self._bucket.create(_path(folder, stored.id), encode((stored,)))
                    newest = stored
                except FileExistsError:
                    newest = self._last(folder)
            self._newest[schema.table] = newest
            return newest

    def get(self, table: TableId, schema_id: int) -> TableSchema:
        """The schema that a change was written with."""
        with self._lock:
            try:
                return self._read(_path(_folder(table), schema_id))
            except FileNotFoundError:
                raise unknown_schema(table, schema_id) from None

    def newest(self) -> Sequence[TableSchema]:
        """The newest schema of every table, ordered by name."""
        with self._lock:
            last = {item.path.rpartition("/")[0]: item.path for item in self._bucket.listed(_FOLDER)}
            return sorted((self._read(path) for path in last.values()), key=lambda schema: schema.table)

    def _last(self, folder: str) -> TableSchema | None:
        paths = [item.path for item in self._bucket.listed(folder)]
        return self._read(paths[-1]) if paths else None

    def _read(self, path: str) -> TableSchema:
        if path not in self._known:
            try:
                (self._known[path],) = decode(self._bucket.get(path))
            except (ValueError, KeyError, TypeError):
                raise LogCorrupt(f"Schema object {path} is not readable.", "Restore it from a backup.") from None
        return self._known[path]


def _folder(table: TableId) -> str:
    # A client may encode a percent sign once more: the digest in the name tells tables apart without it.
    return f"{_FOLDER}/{file_name(table).removesuffix('.json').replace('%', '_')}"


def _path(folder: str, number: int) -> str:
    return f"{folder}/{number:09d}.json"
