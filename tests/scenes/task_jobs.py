"""Batches applied by tasks that run in the process of the test, one after the other, with the faults that it asks for.

The outcomes travel as Arrow rows, as they do through Spark."""

import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa

from cdc.config.settings import Settings
from cdc.log.shares import BatchProgress, bucket_ranges
from cdc.log.spark.splits import share_of
from cdc.model import TableSchema
from cdc.ports import LogReader, Share
from sinks.apply.dead_letters import DeadLetters
from sinks.context import SinkContext
from sinks.registry import open_sink
from sinks.tasks.applier import BatchPlan, TaskApplier
from sinks.tasks.outcome import Outcome
from sinks.tasks.unit_of_work import Assignment, assignment_settings, run

Fault = Callable[[Assignment, Sequence[Share]], None]


class LocalTaskJob:
    """The entries after one sequence number up to another, in so many shares."""

    def __init__(self, log: LogReader, after: int, until: int, shares: int, fault: Fault | None = None) -> None:
        self.shares = [share_of(after, until, *buckets) for buckets in bucket_ranges(shares)]
        end = list(log.read(str(until - 1), str(until)))[-1].end  # type: ignore[arg-type]
        self._progress = BatchProgress(end, str(until)).encoded()  # type: ignore[arg-type]
        self._fault = fault
        self.runs: list[Assignment] = []
        self.staged = 0
        """How often a task has staged rows."""

    def run(self, assignment: Assignment) -> Outcome:
        self.runs.append(assignment)
        order = random.Random(len(self.runs)).sample(self.shares, len(self.shares))
        outcomes = [run(assignment, share) for share in order]
        outcomes[-1].progress = self._progress
        if self._fault is not None:
            self._fault(assignment, self.shares)
        self.staged += sum(len(outcome.staged) for outcome in outcomes)
        return Outcome.read(pa.Table.from_batches([row for outcome in outcomes for row in outcome.batches()]))

    def plan(self) -> BatchPlan:
        return BatchPlan(self.shares, self._progress)


def task_applier(
    settings: Settings, name: str, log: LogReader, letters: Path, source: Mapping[str, str] | None = None
) -> TaskApplier:
    """The applier of one of the settings' sinks; `source` has the rows of the source by their keys, to be read
    again."""

    def reselect(schema: TableSchema, keys: Sequence[str]) -> Mapping[str, str]:
        return {key: source[key] for key in keys if key in source} if source is not None else {}

    sink = next(sink for sink in settings.sinks if sink.name == name)
    applier = TaskApplier(
        name,
        open_sink=lambda: open_sink(sink, SinkContext(settings.state)),
        log=log,
        letters=DeadLetters(letters),
        stop=threading.Event(),
        retry=sink.retry,
        tables=sink.tables,
        reselect=reselect if source is not None else None,
    )
    applier.settings = assignment_settings(settings, name)
    return applier
