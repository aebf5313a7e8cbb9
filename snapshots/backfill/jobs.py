"""A backfill: its request, its progress, and its mark in the log. Pure."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from cdc.capture.replication.captured_tables import WaitReason
from cdc.config.settings import TableSettings
from cdc.model import Lsn, TableId
from snapshots.backfill.requests import Request
from snapshots.initial.plan import planned

PREFIX = "backfill:"


class JobState(StrEnum):
    """The state of a backfill."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LEFT = "left"
    """Its table was removed from the pipeline; if it is added again, it begins again."""


_OPEN = (JobState.RUNNING, JobState.PAUSED)
_TRANSITIONS = {
    ("pause", JobState.RUNNING): JobState.PAUSED,
    ("resume", JobState.PAUSED): JobState.RUNNING,
    ("resume", JobState.FAILED): JobState.RUNNING,
    ("cancel", JobState.RUNNING): JobState.CANCELLED,
    ("cancel", JobState.PAUSED): JobState.CANCELLED,
    ("cancel", JobState.FAILED): JobState.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Job:
    """One backfill. `resume` is where reading continues; None: at the beginning."""

    id: str
    request: Request
    state: JobState = JobState.RUNNING
    resume: tuple[str, ...] | None = None
    rows: int = 0
    reason: str = ""
    new_table: bool = False
    """The table may be new to the stream, which then lacks changes by transactions older than its publication."""
    restarts: bool = False
    """The log has former rows of the table, which was removed or dropped: they are removed first."""
    part: bool = False
    """It was for some rows only; kept when it has ended, because its request is not."""
    emptied: bool = False
    """The former rows have been removed."""

    @property
    def whole(self) -> bool:
        """Whether every row of the table is read."""
        return not self.part and self.request == Request(self.request.table)

    @property
    def requested_at(self) -> Lsn:
        """The LSN of the request: every change committed before it has a smaller version, every change committed after
        it a version greater by more than 1 (docs/adr/0013-versions.md)."""
        return Lsn(int(self.id, 16))

    @property
    def open(self) -> bool:
        """Whether it is unfinished: running or paused."""
        return self.state in _OPEN

    @property
    def automatic(self) -> bool:
        """Whether Millrace started it in place of an initial snapshot."""
        return self.id.startswith("table:")

    def after_control(self, verb: str) -> Self:
        """The backfill after pause, resume or cancel; unchanged if the verb does not apply.

        An automatic one can be resumed even if it was cancelled: without it its table is never complete.
        """
        state = _TRANSITIONS.get((verb, self.state), self.state)
        if self.automatic and (verb, self.state) == ("resume", JobState.CANCELLED):
            state = JobState.RUNNING
        return replace(self, state=state, reason="" if state is JobState.RUNNING else self.reason)

    def mark(self) -> tuple[str, str]:
        """Its mark in the log: name and text. Marks are never deleted, so that of an ended backfill has only the
        outcome."""
        over = self.state is JobState.DONE or (self.state is JobState.CANCELLED and not self.automatic)
        body = {
            "request": (Request(self.request.table) if over else self.request).facts(),
            "state": self.state.value,
            "place": None if over else self.resume,
            "rows": self.rows,
            "reason": self.reason,
            "fresh": self.new_table,
            "anew": self.restarts,
            "swept": self.emptied,
            **({"part": True} if over and not self.whole else {}),
        }
        return PREFIX + self.id, json.dumps(body, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of_mark(cls, name: str, text: str) -> Self:
        """Parse a mark."""
        body = json.loads(text)
        resume = None if body["place"] is None else tuple(body["place"])
        request = Request.of_facts(body["request"])
        state = JobState(body["state"])
        flags = (body["fresh"], body.get("anew", False), body.get("part", False), body.get("swept", False))
        return cls(name.removeprefix(PREFIX), request, state, resume, body["rows"], body["reason"], *flags)


def known(marks: Mapping[str, str]) -> dict[str, Job]:
    """Every backfill in the log's marks, by id."""
    jobs = [Job.of_mark(name, text) for name, text in marks.items() if name.startswith(PREFIX)]
    return {job.id: job for job in jobs}


def missing(tables: Iterable[TableSettings], marks: Mapping[str, str]) -> list[Job]:
    """The automatic backfills for tables that have no complete initial snapshot.

    Tables with `snapshot: incremental`, tables added to the pipeline, and tables whose snapshot was interrupted. Tables
    that were added again or recreated begin again in any case.
    """
    jobs = []
    former = known(marks)
    plans = planned(marks, [table.name for table in tables])
    for table in tables:
        name, plan = table.name, plans.get(table.name)
        before = former.get(own_id(name))
        if before is not None and before.state is JobState.LEFT:
            jobs.append(Job(own_id(name), Request(name), new_table=True, restarts=True))
        elif table.snapshot != "never" and before is None and (plan is None or not plan.finished):
            jobs.append(Job(own_id(name), Request(name), new_table=plan is None))
    return jobs


def beginning_again(jobs: Iterable[Job]) -> dict[TableId, WaitReason]:
    """The tables that begin again and whose current rows are not all read yet."""
    found = {}
    for job in jobs:
        if job.restarts and job.state not in (JobState.DONE, JobState.LEFT):
            message = f"{job.request.table} begins again and is incomplete: backfill {job.id} is {job.state}."
            option = "" if job.state is JobState.RUNNING else f" --resume {job.id}"
            found[job.request.table] = WaitReason(message, f"See: millrace backfill{option}")
    return found


def left(tables: Iterable[TableId]) -> dict[str, str]:
    """The marks of tables that are removed from the pipeline."""
    return dict(Job(own_id(name), Request(name), JobState.LEFT).mark() for name in tables)


def own_id(table: TableId) -> str:
    """The id of the automatic backfill of a table."""
    return f"table:{table}"
