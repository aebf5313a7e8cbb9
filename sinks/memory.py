"""A store in this process: the smallest complete sink, for tests and trials.

A store lives as long as the process and is shared by every sink of the same name, so opening the sink again acts like
a restart of Millrace.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.settings import SinkSettings
from cdc.errors import Rejected, RejectedItem
from cdc.json_text.members import splice
from cdc.key_range import Removal
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Batch, Sink
from sinks.context import SinkContext
from sinks.fingerprints import Difference, Mark, new_id
from sinks.rows.images import IMAGES, STORED_ROW_MISSING


class MemorySettings(SinkSettings):
    """A store in this process, for tests."""

    kind: Literal["memory"] = "memory"


SETTINGS = MemorySettings


@dataclass(frozen=True, slots=True)
class Row:
    """A stored row; `image` is None for a tombstone, kept so that an older change does not bring the row back."""

    version: int
    image: str | None


@dataclass(slots=True)
class StoredRow:
    """The rows of one table."""

    rows: dict[str, Row] = field(default_factory=dict)
    truncated: int = 0
    id: str = field(default_factory=new_id)


Store = dict[str, StoredRow]
_STORES: dict[str, Store] = {}


def open_sink(settings: MemorySettings, context: SinkContext) -> Sink:
    """The sink on the store of that name."""
    return MemorySink(settings.name, _STORES.setdefault(settings.name, {}))


class MemorySink:
    """See cdc.ports.Sink."""

    def __init__(self, name: str, store: Store) -> None:
        self._name = name
        self._store = store

    @property
    def name(self) -> str:
        return self._name

    def prepare(self, schema: TableSchema) -> None:
        self._store.setdefault(str(schema.table), StoredRow())

    def apply(self, batch: Batch) -> None:
        stored = self._store.setdefault(str(batch.schema.table), StoredRow())
        self._truncate(stored, batch.truncated)
        for removal in batch.removed:
            self._remove(stored, removal)
        rejected = [item for row in batch.rows.to_pylist() if (item := self._put(stored, row))]
        if rejected:
            raise Rejected(rejected)

    def _truncate(self, stored: StoredRow, version: int) -> None:
        stored.truncated = max(stored.truncated, version)
        for key, row in stored.rows.items():
            if row.version < version:
                stored.rows[key] = Row(version, None)

    def _remove(self, stored: StoredRow, removal: Removal) -> None:
        keys = list(stored.rows)
        versions = pa.array([row.version for row in stored.rows.values()], pa.int64())
        for number in removal.removes(pa.array(keys, pa.string()), versions).nonzero()[0]:
            stored.rows[keys[number]] = Row(removal.version, None)

    def _put(self, stored: StoredRow, row: dict[str, object]) -> RejectedItem | None:
        key, version, image = str(row["key"]), int(str(row["version"])), row["after"]
        old = stored.rows.get(key)
        if version < stored.truncated or (old and old.version >= version):
            return None
        if row["op"] == "d":
            stored.rows[key] = Row(version, None)
            return None
        unchanged = row["unchanged"]
        if isinstance(unchanged, list) and unchanged:
            if old is None or old.image is None:
                return RejectedItem(str(row["table"]), key, version, STORED_ROW_MISSING)
            image, missing = splice(str(image), old.image, unchanged)
            if missing:
                return RejectedItem(str(row["table"]), key, version, STORED_ROW_MISSING)
        stored.rows[key] = Row(version, str(image))
        return None

    def stored(self, schema: TableSchema) -> pa.Table:
        rows = self._store.get(str(schema.table), StoredRow()).rows
        live = sorted((key, row.image) for key, row in rows.items() if row.image is not None)
        return pa.table({"key": [key for key, _ in live], "after": [image for _, image in live]}, schema=IMAGES)

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        return images.select(["key", "after"]).take(pc.sort_indices(images, sort_keys=[("key", "ascending")]))

    def mark_table(self, schema: TableSchema) -> Mark:
        return {"id": self._store[str(schema.table)].id}

    def compare_marks(self, known: Mapping[TableId, Mark], reached: Lsn) -> Mapping[TableId, Mark | Difference]:
        return {table: self._seen(table, mark) for table, mark in known.items()}

    def _seen(self, table: TableId, mark: Mark) -> Mark | Difference:
        stored = self._store.get(str(table))
        return mark if stored and stored.id == mark["id"] else Difference("is not what was written")

    def recreate(self, schema: TableSchema) -> None:
        self._store.pop(str(schema.table), None)

    def close(self) -> None:
        """Nothing to close."""
