"""Packed rows: a micro-batch passes through the JVM as a few binary blocks instead of row by row.

Spark converts each row of a Python source to its own format, and each collected row back: with short plans that is most
of the cost of a batch (docs/adr/0010-fold.md). A block is an Arrow stream of some megabytes, which only the driver
decodes. A micro-batch too large for the driver is not packed: its block only says where the rows are.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.shares import PLANNED
from cdc.model import LOG_SCHEMA, PROGRESS_TABLE
from cdc.ports import Offset

LARGEST = 64 << 20
"""Bytes of rows above which a micro-batch is not packed. Compressed they take a third of that in the driver's JVM."""
_BLOCK_BYTES = 8 << 20
_CHUNK_ROWS = 10_000
"""Rows sent to the JVM at once if they are not packed: larger Arrow batches only cost memory there."""

_FIELDS: dict[str, pa.DataType] = {
    "rows": pa.binary(),
    "after": pa.string(),
    "until": pa.string(),
    "selection": pa.string(),
}
PACKED = pa.schema(_FIELDS)
"""Either packed rows, or the two offsets and the selection to read them with."""

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which columns of LOG_SCHEMA, and which tables by name (none: all)."""

    columns: Sequence[str] = tuple(LOG_SCHEMA.names)
    tables: Sequence[str] = ()

    def packing(self) -> dict[str, str]:
        """The options of a source that packs the selected rows."""
        return {"packed": str(LARGEST), "selection": self.encoded()}

    def encoded(self) -> str:
        """The value of the option `selection`."""
        return json.dumps([list(self.columns), list(self.tables)])

    @classmethod
    def decoded(cls, encoded: str) -> Self:
        """The inverse of `encoded`."""
        return cls(*json.loads(encoded))

    def rows_of(self, rows: pa.Table) -> pa.Table:
        """The rows of the selected tables, with all columns."""
        if not self.tables:
            return rows
        wanted = pa.array([PROGRESS_TABLE, *self.tables], pa.string())
        return rows.filter(pc.is_in(rows.column("table"), value_set=wanted))


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The rows between two offsets are too large for the driver."""

    after: str
    until: str
    selection: str


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How a source returns rows: the selection, packed up to so many bytes (0: not packed), in how many tasks; or, if
    `planned`, no rows but one share per task."""

    selection: Selection
    packed: int
    tasks: int
    planned: bool = False

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """Read from the options of a source."""
        encoded = options.get("selection")
        selection = Selection.decoded(encoded) if encoded else Selection()
        return cls(selection, int(options.get("packed", 0)), int(options["tasks"]), "planned" in options)

    @property
    def schema(self) -> pa.Schema:
        """The schema that Spark sees."""
        if self.planned:
            return PLANNED
        return PACKED if self.packed else LOG_SCHEMA

    def output(self, rows: Iterable[pa.Table], after: Offset, until: Offset, tasks: int) -> Iterator[pa.RecordBatch]:
        """The output of one of `tasks` tasks for its rows between two offsets."""
        if not self.packed:
            for table in rows:
                yield from self.selection.rows_of(table).combine_chunks().to_batches(max_chunksize=_CHUNK_ROWS)
            return
        parts, left = [], self.packed // tasks
        for table in rows:
            parts.append(self.selection.rows_of(table).select(list(self.selection.columns)))
            left -= parts[-1].nbytes
            if left < 0:
                yield too_large_block(TooLarge(after, until, self.selection.encoded()))
                return
        if parts:
            yield from pack(pa.concat_tables(parts))


def pack(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Blocks that contain these rows."""
    step = max(1, rows.num_rows * _BLOCK_BYTES // max(rows.nbytes, 1))
    for start in range(0, rows.num_rows, step):
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, rows.schema, options=_OPTIONS) as stream:
                stream.write_table(rows.slice(start, step))
            block = pa.array([sink.getvalue().to_pybytes()], pa.binary())
        yield pa.RecordBatch.from_arrays([block, *[pa.nulls(1, pa.string())] * 3], schema=PACKED)


def too_large_block(found: TooLarge) -> pa.RecordBatch:
    """A block that says where the rows are instead of containing them."""
    texts = [pa.array([text], pa.string()) for text in astuple(found)]
    return pa.RecordBatch.from_arrays([pa.nulls(1, pa.binary()), *texts], schema=PACKED)


def unpack(blocks: pa.Table) -> pa.Table | TooLarge:
    """The rows of all blocks, or TooLarge. Without a block there are none: Spark's first batch may be empty."""
    blobs = blocks.column("rows")
    if blobs.null_count:
        row = blocks.filter(blobs.is_null()).slice(0, 1).select(["after", "until", "selection"]).to_pylist()[0]
        return TooLarge(**row)
    tables = []
    for chunk in blobs.chunks:
        for block in chunk:
            with pa.ipc.open_stream(block.as_buffer()) as stream:
                tables.append(stream.read_all())
    return pa.concat_tables(tables) if tables else LOG_SCHEMA.empty_table()
