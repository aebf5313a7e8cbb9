"""Writes one task's part of a batch: new files that no commit has yet, and which stored rows they replace."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from cdc.arrays import Ints
from sinks.delta.deletion_vectors import new_files
from sinks.delta.deletion_vectors.key_cache import KeyCache
from sinks.delta.deletion_vectors.key_lookup import TableFiles, candidates, look_up
from sinks.delta.deletion_vectors.new_files import live_rows, write_files
from sinks.delta.files.storage import TableStorage
from sinks.delta.files.transaction_log import Action
from sinks.delta.rows.changes import PARTIAL, TypedChanges
from sinks.delta.rows.rewrite import decide, new_rows
from sinks.delta.schema.layout import TableLayout
from sinks.delta.staging.plan import StagingPlan, ipc_bytes, ipc_table
from sinks.delta.write.region import Files
from sinks.delta.write.row_sizes import widest_row
from sinks.delta.write.writer import PARTIAL_BYTES, REGION_LIMIT
from sinks.rows.images import STORED_ROW_MISSING

Places = npt.NDArray[np.uint64]
_FACTS = b"millrace"
_FILE_BITS = np.uint64(32)


@dataclass(frozen=True, slots=True)
class StagedFiles:
    """What one task has written."""

    version: int
    """The version of the table that the task was given."""
    lsn: int
    adds: Sequence[Action]
    """Files with the new rows."""
    replaced: Places
    """The replaced rows: the number of the file in the plan, shifted by 32 bits, and the number of the row."""
    merged: Sequence[int]
    """Small files whose rows are in `merged_adds`, too, without the replaced ones."""
    merged_adds: Sequence[Action]

    def encoded(self) -> bytes:
        """As bytes of Arrow's IPC format."""
        facts = {"version": self.version, "lsn": self.lsn, "adds": self.adds}
        facts |= {"merged": self.merged, "merged_adds": self.merged_adds}
        rows = pa.table({"replaced": pa.array(self.replaced)})
        return ipc_bytes(rows.replace_schema_metadata({_FACTS: orjson.dumps(facts)}))

    @classmethod
    def decoded(cls, data: bytes) -> "StagedFiles":
        """The opposite of `encoded`."""
        rows = ipc_table(data)
        facts = orjson.loads((rows.schema.metadata or {})[_FACTS])
        return cls(replaced=rows["replaced"].to_numpy(), **facts)


@dataclass(frozen=True, slots=True)
class Task:
    """Where and for which version a task writes."""

    storage: TableStorage
    plan: StagingPlan
    keys: KeyCache
    part: str = ""

    def stage(self, given: TypedChanges) -> tuple[StagedFiles, TypedChanges]:
        """Write the changes; returns what was written, and the changes with what was rejected."""
        given = given.after_truncate(self.plan.truncated)
        bounds = self.plan.bounds(given.layout)
        adds: list[Action] = []
        replaced = [np.zeros(0, np.uint64)]
        done: list[TypedChanges] = []
        for piece in self._pieces(given, bounds):
            written, places, rest = self._write(piece, bounds)
            adds += written
            replaced.append(places)
            done.append(rest)
        places = np.sort(np.concatenate(replaced))
        merged, merged_adds = self._merge(given.layout, places, bounds.bytes) if adds else ([], [])
        staged = StagedFiles(self.plan.version, given.lsn, adds, places, merged, merged_adds)
        return staged, given.with_rejected(*done)

    def _pieces(self, given: TypedChanges, bounds: Files) -> Sequence[TypedChanges]:
        """The changes in pieces by the size of the stored columns that partial rows keep: one file or more each."""
        if not given.rows.num_rows:
            return ()
        if not given.partial:
            return (given,)
        width = widest_row(self.storage, candidates(given, bounds), given.kept)
        return given.pieces(given.rows[PARTIAL].to_numpy(), max(1, PARTIAL_BYTES // max(width, 1))) or (given,)

    def _write(self, given: TypedChanges, bounds: Files) -> tuple[list[Action], Places, TypedChanges]:
        plan = self.plan
        found = look_up(TableFiles(self.storage, plan.paths, plan.deleted, plan.constants, self.keys), given, bounds)
        decided = decide(found.rows, given)
        adds: list[Action] = []
        if decided.winners.any():
            rows = new_rows(found.rows, given, decided)
            adds = write_files(self.storage, rows, given.layout, plan.target, self.part)
        places = _places(found.file[decided.replaced], found.row[decided.replaced])
        return adds, places, given.without(decided.orphans, STORED_ROW_MISSING)

    def _merge(self, layout: TableLayout, replaced: Places, sizes: Ints) -> tuple[list[int], list[Action]]:
        """Merge small files of this part, which no other task changes; none where there are too few of them."""
        chosen = list(self._small_files(sizes))
        if len(chosen) < 2:
            return [], []
        paths, rows = self.plan.paths, []
        for number in chosen:
            mine = (replaced >> _FILE_BITS) == number
            gone = (replaced[mine] & np.uint64(0xFFFFFFFF)).astype(np.int64)
            before = self.plan.deleted(number)
            deleted = gone if before is None else np.union1d(before, gone)
            rows.append(live_rows(self.storage, paths[number], layout, deleted))
        return chosen, write_files(self.storage, pa.concat_tables(rows), layout, self.plan.target, self.part)

    def _small_files(self, sizes: Ints) -> Iterator[int]:
        """The smallest ones that fit in memory together."""
        parts = self.plan.files["part"].to_pylist()
        small = [at for at, part in enumerate(parts) if part == self.part and sizes[at] < self.plan.target // 2]
        if not self.part or len(small) < new_files.SMALL_FILES:
            return
        total = 0
        for number in sorted(small, key=sizes.__getitem__):
            total += int(sizes[number])
            if total > REGION_LIMIT:
                return
            yield number


def _places(file: Ints, row: Ints) -> Places:
    places: Places = (file.astype(np.uint64) << _FILE_BITS) | row.astype(np.uint64)
    return places
