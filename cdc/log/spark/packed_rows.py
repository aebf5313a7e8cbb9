"""Rows in cells of Arrow: a micro-batch crosses the JVM as a few blobs, not row by row.

Spark turns each row of a Python source into its own form, and each collected row back: with short plans that is most of
what a batch costs (docs/adr/0010-fold.md). A cell is an Arrow stream of some megabytes; nobody looks inside before the
driver does. What would be too much for a driver is not packed: a cell says so instead.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.model import LOG_SCHEMA, PROGRESS_TABLE
from cdc.ports import Offset

LARGEST = 64 << 20
"""Bytes of rows that are packed at most; compressed, a driver's JVM holds a third of it."""
_CELL = 8 << 20
_CHUNK_ROWS = 10_000
"""Rows that travel to the JVM at once where they are not packed: larger batches only cost memory there."""

_CELLS: dict[str, pa.DataType] = {
    "rows": pa.binary(),
    "after": pa.string(),
    "until": pa.string(),
    "selection": pa.string(),
}
PACKED = pa.schema(_CELLS)
"""Either rows, or where they are to be read and what of them."""

_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4")


@dataclass(frozen=True, slots=True)
class Selection:
    """Columns of LOG_SCHEMA, and tables by name (none: all)."""

    columns: Sequence[str] = tuple(LOG_SCHEMA.names)
    tables: Sequence[str] = ()

    def packing(self) -> dict[str, str]:
        """The options of a source that packs what is selected."""
        return {"packed": str(LARGEST), "selection": self.told()}

    def told(self) -> str:
        """As an option says it."""
        return json.dumps([list(self.columns), list(self.tables)])

    @classmethod
    def heard(cls, told: str) -> Self:
        """Read an option back."""
        return cls(*json.loads(told))

    def rows_of(self, rows: pa.Table) -> pa.Table:
        """Those of the wanted tables, with all columns."""
        if not self.tables:
            return rows
        wanted = pa.array([PROGRESS_TABLE, *self.tables], pa.string())
        return rows.filter(pc.is_in(rows.column("table"), value_set=wanted))


@dataclass(frozen=True, slots=True)
class TooLarge:
    """The rows after one offset, up to another, are too many to hold."""

    after: str
    until: str
    selection: str


@dataclass(frozen=True, slots=True)
class Shape:
    """How a source gives rows: what of them, packed up to so many bytes (0: not packed), in how many tasks at most."""

    selection: Selection
    packed: int
    tasks: int

    @classmethod
    def of(cls, options: Mapping[str, str]) -> Self:
        """As the options of a source say it."""
        told = options.get("selection")
        selection = Selection.heard(told) if told else Selection()
        return cls(selection, int(options.get("packed", 0)), int(options["tasks"]))

    @property
    def schema(self) -> pa.Schema:
        """Of what Spark is given."""
        return PACKED if self.packed else LOG_SCHEMA

    def given(self, rows: Iterable[pa.Table], after: Offset, until: Offset, tasks: int) -> Iterator[pa.RecordBatch]:
        """What one of so many tasks gives of its rows, which lie between two offsets."""
        if not self.packed:
            for table in rows:
                yield from self.selection.rows_of(table).combine_chunks().to_batches(max_chunksize=_CHUNK_ROWS)
            return
        held, room = [], self.packed // tasks
        for table in rows:
            held.append(self.selection.rows_of(table).select(list(self.selection.columns)))
            room -= held[-1].nbytes
            if room < 0:
                yield too_large(TooLarge(after, until, self.selection.told()))
                return
        if held:
            yield from pack(pa.concat_tables(held))


def pack(rows: pa.Table) -> Iterator[pa.RecordBatch]:
    """Cells that hold these rows."""
    step = max(1, rows.num_rows * _CELL // max(rows.nbytes, 1))
    for start in range(0, rows.num_rows, step):
        with pa.BufferOutputStream() as sink:
            with pa.ipc.new_stream(sink, rows.schema, options=_OPTIONS) as stream:
                stream.write_table(rows.slice(start, step))
            cell = pa.array([sink.getvalue().to_pybytes()], pa.binary())
        yield pa.RecordBatch.from_arrays([cell, *[pa.nulls(1, pa.string())] * 3], schema=PACKED)


def too_large(found: TooLarge) -> pa.RecordBatch:
    """A cell that says where the rows are."""
    texts = [pa.array([text], pa.string()) for text in astuple(found)]
    return pa.RecordBatch.from_arrays([pa.nulls(1, pa.binary()), *texts], schema=PACKED)


def unpack(cells: pa.Table) -> pa.Table | TooLarge:
    """The rows of all cells, or the word that they are too many. The cells of a batch hold one at least."""
    blobs = cells.column("rows")
    if blobs.null_count:
        row = cells.filter(blobs.is_null()).slice(0, 1).select(["after", "until", "selection"]).to_pylist()[0]
        return TooLarge(**row)
    tables = []
    for chunk in blobs.chunks:
        for cell in chunk:
            with pa.ipc.open_stream(cell.as_buffer()) as stream:
                tables.append(stream.read_all())
    return pa.concat_tables(tables)
