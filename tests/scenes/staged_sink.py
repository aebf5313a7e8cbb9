"""A Delta sink whose batches are written by several tasks, as Spark runs them: tasks run twice, and share no memory."""

import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from cdc.errors import Busy, Rejected
from cdc.model import TableId, TableSchema
from cdc.ports import Batch, Staged
from sinks.delta.sink import DeltaSink

TASKS = 3


def split(batch: Batch, tasks: int = TASKS) -> Iterator[tuple[int, Batch]]:
    """The batch of each task, by the hash of the key; tasks without rows are left out."""
    owners = [zlib.crc32(str(key).encode()) % tasks for key in batch.rows["key"].to_pylist()]
    for task in sorted(set(owners)):
        yield task, Batch(batch.schema, batch.rows.filter(pa.array([owner == task for owner in owners])))


class StagedSink:
    """`apply` by plan, stage and commit. Batches that truncate or remove ranges take the other way, as they must."""

    def __init__(self, open_sink: Callable[[], DeltaSink], rng: random.Random) -> None:
        self.driver = open_sink()
        self.workers = [open_sink() for _ in range(TASKS)]
        self.planned = 0
        self._rng = rng

    def __getattr__(self, name: str) -> Any:
        return getattr(self.driver, name)

    def apply(self, batch: Batch) -> None:
        """Until nobody else has committed in between."""
        plan = self.driver.plan(batch.schema) if not batch.truncated and not batch.removed else b""
        if not plan:
            self.driver.apply(batch)
            return
        self.planned += 1
        staged = list(self.stage(batch, plan))
        try:
            self.driver.commit_staged(batch.schema, plan, [one.content for one in staged])
        except Busy:
            self.apply(batch)
            return
        if rejected := [item for one in staged for item in one.rejected]:
            raise Rejected(rejected)

    def stage(self, batch: Batch, plan: bytes) -> Iterator[Staged]:
        """One attempt of each task; some ran twice."""
        for task, part in split(batch):
            attempts = [self._attempt(task, part, plan) for _ in range(self._rng.choice([1, 1, 2]))]
            yield self._rng.choice(attempts)

    def _attempt(self, task: int, part: Batch, plan: bytes) -> Staged:
        return self._rng.choice(self.workers).stage(part, plan, f"{task} of {TASKS}")

    def recreate(self, schema: TableSchema) -> None:
        """See Fingerprinted."""
        self.driver.recreate(schema)

    def mark_table(self, schema: TableSchema) -> Any:
        """See Fingerprinted."""
        return self.driver.mark_table(schema)

    def compare_marks(self, known: Any, reached: Any) -> Any:
        """See Fingerprinted."""
        return self.driver.compare_marks(known, reached)

    def stored_key(self, schema: TableSchema, key: str) -> Any:
        """See KeyReader."""
        return self.driver.stored_key(schema, key)

    def stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """See StoredPieces."""
        return self.driver.stored_pieces(schema, keys)

    def versions_of(self, table: TableId) -> int:
        """The number of the newest commit."""
        return self.driver.store(table).current().version()
