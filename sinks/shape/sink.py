"""A sink whose tables are shaped: it gives batches to the kind's own sink as its store keeps them.

Everything that opens a sink gets it, the driver, tasks of a cluster and `verify` alike (`sinks.registry`). Dead letters
stay changes of the source: they are shaped when they are tried, by the shape of that time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import pyarrow as pa

from cdc.config.settings import SinkSettings
from cdc.errors import ConfigError, Rejected, SinkError
from cdc.model import TableId, TableSchema
from cdc.ports import Batch, Sink, Staged, StagingSink, StoredPieces
from sinks.fingerprints import Fingerprinted, Mark
from sinks.rows.stored_key import KeyReader, StoredKey
from sinks.shape.columns import shaped_columns
from sinks.shape.table import ShapedBatch, ShapedTable

_AS_THEY_ARE = ("compare_marks", "record_position", "facts", "after_batch", "threads")
"""Methods of optional protocols that know nothing of columns."""


class ShapedSink:
    """See cdc.ports.Sink. Has the optional methods that the wrapped sink has: callers ask for them by protocol."""

    def __init__(self, sink: Sink, settings: SinkSettings) -> None:
        self._sink = sink
        self._settings = settings
        self._tables: dict[TableSchema, ShapedTable] = {}
        self._newest: dict[TableId, TableSchema] = {}
        shaped: Mapping[str, Callable[..., Any]] = {
            "stored_pieces": self._stored_pieces,
            "stored_key": self._stored_key,
            "mark_table": self._mark_table,
            "recreate": self._recreate,
            "plan": self._plan,
            "stage": self._stage,
            "commit_staged": self._commit_staged,
        }
        for name in (*shaped, *_AS_THEY_ARE):
            if hasattr(sink, name):
                setattr(self, name, shaped.get(name) or getattr(sink, name))

    @property
    def name(self) -> str:
        return self._sink.name

    def stored_schema(self, schema: TableSchema) -> TableSchema:
        """The columns that the store has for a schema of the source."""
        table = self._table(schema)
        return schema if table is None else table.columns.schema

    def shaped(self, batch: Batch) -> ShapedBatch:
        """A batch as the store gets it."""
        table = self._table(batch.schema)
        return ShapedBatch(batch, (), batch.rows["key"]) if table is None else table.batch(batch)

    def prepare(self, schema: TableSchema) -> None:
        newest = self._newest.get(schema.table)
        if newest is None or newest.id < schema.id:
            self._newest[schema.table] = schema
        self._sink.prepare(self.stored_schema(schema))

    def apply(self, batch: Batch) -> None:
        shaped = self.shaped(batch)
        rejected = list(shaped.rejected)
        try:
            self._sink.apply(shaped.batch)
        except Rejected as refused:
            rejected += shaped.of_source(refused.items)
        if rejected:
            raise Rejected(rejected)

    def stored(self, schema: TableSchema) -> pa.Table:
        return self._sink.stored(self.stored_schema(schema))

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        table = self._table(schema)
        return self._sink.expected(self.stored_schema(schema), images if table is None else table.expected(images))

    def close(self) -> None:
        self._sink.close()

    def _table(self, schema: TableSchema) -> ShapedTable | None:
        """None if the table is stored as it is. Raises SinkError if the shape does not fit the schema."""
        shape = self._settings.shape.get(schema.table)
        if shape is None:
            return None
        if schema not in self._tables:
            newest = self._newest.get(schema.table)
            try:
                columns = shaped_columns(shape, schema, self.name, newest if newest and newest.id > schema.id else None)
            except ConfigError as error:
                raise SinkError(error.message, error.remedy) from None
            self._tables[schema] = ShapedTable(columns, self._settings.mask_key.reveal().encode())
        return self._tables[schema]

    # -- optional protocols

    def _stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> Iterator[pa.Table]:
        return cast("StoredPieces", self._sink).stored_pieces(self.stored_schema(schema), keys)

    def _stored_key(self, schema: TableSchema, key: str) -> StoredKey:
        table = self._table(schema)
        stored = key if table is None else str(table.keys(pa.array([key]))[0])
        return cast("KeyReader", self._sink).stored_key(self.stored_schema(schema), stored)

    def _mark_table(self, schema: TableSchema) -> Mark:
        return cast("Fingerprinted", self._sink).mark_table(self.stored_schema(schema))

    def _recreate(self, schema: TableSchema) -> None:
        cast("Fingerprinted", self._sink).recreate(self.stored_schema(schema))

    def _plan(self, schema: TableSchema) -> bytes:
        return cast("StagingSink", self._sink).plan(self.stored_schema(schema))

    def _stage(self, batch: Batch, plan: bytes, part: str = "") -> Staged:
        shaped = self.shaped(batch)
        staged = cast("StagingSink", self._sink).stage(shaped.batch, plan, part)
        return Staged(staged.content, [*shaped.rejected, *shaped.of_source(staged.rejected)])

    def _commit_staged(self, schema: TableSchema, plan: bytes, staged: Sequence[bytes]) -> None:
        cast("StagingSink", self._sink).commit_staged(self.stored_schema(schema), plan, staged)
