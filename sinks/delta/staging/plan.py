"""What tasks have to know of a table's version to write for it: its files by statistics, and their deleted rows.

Made in the driver without looking at a row or at a single file: the cost is that of copying columns.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote

import orjson
import pyarrow as pa

from cdc.arrays import AnyArray, Ints
from sinks.delta.deletion_vectors.bitmap import inline, positions
from sinks.delta.deletion_vectors.live_table import LiveTable, inline_vector
from sinks.delta.deletion_vectors.new_files import part_of, small_files
from sinks.delta.files.transaction_log import Action
from sinks.delta.schema.layout import DELETED, VERSION, TableLayout
from sinks.delta.store import DeltaStore, arrow_schema, schema_of
from sinks.delta.write.merge import last_truncate
from sinks.delta.write.region import Files
from sinks.delta.write.writer import files_of, target_size

if TYPE_CHECKING:
    from deltalake import DeltaTable

MOST_SMALL_FILES = 1024
"""Small files from which `apply` has to write a batch, and merges them: tasks merge only those of their own part."""

_FACTS = b"millrace"


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """A version of a table. `files` has a row for each file: its path in the log, sizes, statistics, vector, part."""

    version: int
    truncated: int
    stored: pa.Schema
    """The table's columns."""
    schema_id: int
    """The id of the newest schema that the table was changed to, where it is recorded."""
    files: pa.Table

    def encoded(self) -> bytes:
        """As bytes of Arrow's IPC format."""
        facts = {"version": self.version, "truncated": self.truncated, "schema_id": self.schema_id}
        stored = self.stored.serialize().to_pybytes()
        return ipc_bytes(self.files.replace_schema_metadata({_FACTS: orjson.dumps(facts), b"stored": stored}))

    @classmethod
    def decoded(cls, data: bytes) -> "StagingPlan":
        """The opposite of `encoded`."""
        files = ipc_table(data)
        metadata = files.schema.metadata or {}
        stored = pa.ipc.read_schema(pa.py_buffer(metadata[b"stored"]))
        return cls(stored=stored, files=files, **orjson.loads(metadata[_FACTS]))

    @property
    def paths(self) -> list[str]:
        """The path of each file in the log."""
        return list(map(str, self.files["path"].to_pylist()))

    @property
    def target(self) -> int:
        """Bytes of a new file."""
        return target_size(int(self.files["size_bytes"].to_numpy().sum()))

    def bounds(self, layout: TableLayout) -> Files:
        """The files with the bounds of the compared key columns."""
        names: AnyArray = pa.array([unquote(path) for path in self.paths], pa.string())
        return files_of(self.files.set_column(self.files.column_names.index("path"), "path", names), layout.compared)

    def deleted(self, number: int) -> Ints | None:
        """The deleted rows of a file."""
        vector = self.files["vector"][number].as_py()
        return None if vector is None else positions(vector)

    def constants(self, number: int) -> Mapping[str, int | bool]:
        """Millrace's own columns that have a single value in a file."""
        found: dict[str, int | bool] = {}
        for name in (VERSION, DELETED):
            least, most, nulls = (self._statistic(kind, name, number) for kind in ("min", "max", "null_count"))
            if least is not None and least == most and nulls == 0:
                found[name] = least
        return found

    def _statistic(self, kind: str, name: str, number: int) -> int | bool | None:
        column = f"{kind}.{name}"
        found: int | bool | None = self.files[column][number].as_py() if column in self.files.column_names else None
        return found


def plan_of(store: DeltaStore, layout: TableLayout) -> StagingPlan | None:
    """The newest version of a table; None if tasks cannot write for it."""
    vectors = store.vectors if layout.compared else None
    if vectors is None or not store.guarded(vectors.live.storage.excludes_others):
        return None
    table = store.with_vectors(vectors.live)
    if table is None:
        return None
    return store.guarded(lambda: _plan(vectors.live, table, layout))


def _plan(live: LiveTable, table: "DeltaTable", layout: TableLayout) -> StagingPlan | None:
    # sorted: staged rows name a file by its number, and every process must number the files of a version alike
    actions = pa.table(table.get_add_actions(flatten=True)).sort_by("path")
    adds = {unquote(path): add for path, add in live.adds.items()}
    found = [adds.get(str(path)) for path in actions["path"].to_pylist()]
    known = [add for add in found if add is not None]
    size = target_size(int(actions["size_bytes"].to_numpy().sum()))
    if len(known) < actions.num_rows or len(small_files(live.adds, size // 2)) > MOST_SMALL_FILES:
        return None
    if known and not _bounded(actions, layout.compared):
        return None
    wanted = [
        f"{kind}.{name}" for kind in ("min", "max", "null_count") for name in (*layout.compared, VERSION, DELETED)
    ]
    columns: dict[str, AnyArray] = {
        "path": pa.array([add["path"] for add in known], pa.string()),
        **{name: actions[name] for name in ("size_bytes", "num_records", *wanted) if name in actions.column_names},
        "vector": pa.array(_vectors(live, table, known), pa.string()),
        "part": pa.array([part_of(add) for add in known], pa.string()),
    }
    return StagingPlan(table.version(), last_truncate(table), arrow_schema(table), schema_of(table), pa.table(columns))


def _bounded(actions: pa.Table, names: list[str]) -> bool:
    """Whether every file has bounds of the first compared column, by which keys are looked up."""
    bounds = [f"{kind}.{names[0]}" for kind in ("min", "max")]
    return all(name in actions.column_names and not actions[name].null_count for name in bounds)


def _vectors(live: LiveTable, table: "DeltaTable", adds: list[Action]) -> list[str | None]:
    """The vector of each file as inline text; those of other writers are translated."""
    texts = [inline_vector(add) for add in adds]
    if all(text is not None or not add.get("deletionVector") for text, add in zip(texts, adds, strict=True)):
        return texts
    deleted = live.deleted(table)
    return [str(inline(deleted[add["path"]])["pathOrInlineDv"]) if add.get("deletionVector") else None for add in adds]


def ipc_bytes(rows: pa.Table) -> bytes:
    """A table in Arrow's IPC format."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(rows)
    return sink.getvalue().to_pybytes()


def ipc_table(data: bytes) -> pa.Table:
    """The opposite of `ipc_bytes`."""
    return pa.ipc.open_stream(data).read_all()
