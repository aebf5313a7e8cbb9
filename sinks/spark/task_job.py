"""The tasks of one planned micro-batch: each reads, folds and writes its share on an executor."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema

from cdc.log.shares import PLANNED
from cdc.ports import Share
from sinks.tasks.applier import BatchPlan
from sinks.tasks.outcome import OUTCOME, Outcome
from sinks.tasks.unit_of_work import Assignment, run

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class SparkTaskJob:
    """See sinks.tasks.applier.TaskJob. `planned` has one row and one partition per share."""

    def __init__(self, planned: "DataFrame") -> None:
        self._planned = planned

    def run(self, assignment: Assignment) -> Outcome:
        """One Spark job. Spark repeats a task that fails; if it fails four times, the job and the query fail."""
        work: Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]] = partial(_run_shares, assignment)
        outcomes = self._planned.mapInArrow(work, from_arrow_schema(OUTCOME))
        rows: pa.Table = outcomes.toArrow()
        return Outcome.read(rows)

    def plan(self) -> BatchPlan:
        """The shares and where the batch ends, by a small job of its own."""
        rows: pa.Table = self._planned.toArrow()
        shares = [Share(str(text)) for text in rows["share"].to_pylist()]
        return BatchPlan(shares, next(filter(None, rows["progress"].to_pylist()), None))


def _run_shares(assignment: Assignment, planned: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in a Spark worker."""
    for rows in planned:
        for share, part, progress in zip(*(rows.column(name).to_pylist() for name in PLANNED.names), strict=True):
            outcome = run(assignment, Share(share), part)
            outcome.progress = progress
            yield from outcome.batches()
