"""A backfill as it stands: what was asked, how far it is, and its mark in the log. Pure."""

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
    """Where a backfill stands."""

    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    LEFT = "left"
    """Its table left the pipeline; should it come back, it begins again."""


_OPEN = (JobState.RUNNING, JobState.PAUSED)
_STEERED = {
    ("pause", JobState.RUNNING): JobState.PAUSED,
    ("resume", JobState.PAUSED): JobState.RUNNING,
    ("resume", JobState.FAILED): JobState.RUNNING,
    ("cancel", JobState.RUNNING): JobState.CANCELLED,
    ("cancel", JobState.PAUSED): JobState.CANCELLED,
    ("cancel", JobState.FAILED): JobState.CANCELLED,
}


@dataclass(frozen=True, slots=True)
class Job:
    """One backfill. `place` is where its walk goes on; None: at the beginning."""

    id: str
    request: Request
    state: JobState = JobState.RUNNING
    place: tuple[str, ...] | None = None
    rows: int = 0
    reason: str = ""
    fresh: bool = False
    """The table may be new to the stream: a transaction older than its publication would be missed."""
    anew: bool = False
    """The log has rows of the table from before it left, or was dropped: they go first, and these rows beat them."""
    part: bool = False
    """It was for some rows only; kept for one that is over, whose request is not."""
    swept: bool = False
    """The rows of before have gone."""

    @property
    def whole(self) -> bool:
        """Whether every row of the table is read."""
        return not self.part and self.request == Request(self.request.table)

    @property
    def asked_at(self) -> Lsn:
        """Where a request stands in the WAL: every change committed before it has a smaller version, every one
        committed after it a greater one by more than 1 (docs/adr/0013-versions.md)."""
        return Lsn(int(self.id, 16))

    @property
    def open(self) -> bool:
        """Whether it is yet to be finished."""
        return self.state in _OPEN

    @property
    def automatic(self) -> bool:
        """Whether nobody asked for it: it takes the place of a first snapshot."""
        return self.id.startswith("table:")

    def steered(self, verb: str) -> Self:
        """After pause, resume or cancel; unchanged where that means nothing.

        One that stands for a snapshot can be resumed for ever: without it its table is never whole.
        """
        state = _STEERED.get((verb, self.state), self.state)
        if self.automatic and (verb, self.state) == ("resume", JobState.CANCELLED):
            state = JobState.RUNNING
        return replace(self, state=state, reason="" if state is JobState.RUNNING else self.reason)

    def mark(self) -> tuple[str, str]:
        """Its mark in the log: name and text. Marks stay, so of one that is over only the outcome is kept."""
        over = self.state is JobState.DONE or (self.state is JobState.CANCELLED and not self.automatic)
        body = {
            "request": (Request(self.request.table) if over else self.request).facts(),
            "state": self.state.value,
            "place": None if over else self.place,
            "rows": self.rows,
            "reason": self.reason,
            "fresh": self.fresh,
            "anew": self.anew,
            "swept": self.swept,
            **({"part": True} if over and not self.whole else {}),
        }
        return PREFIX + self.id, json.dumps(body, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def of_mark(cls, name: str, text: str) -> Self:
        """Read a mark back."""
        body = json.loads(text)
        place = None if body["place"] is None else tuple(body["place"])
        request = Request.of_facts(body["request"])
        state = JobState(body["state"])
        flags = (body["fresh"], body.get("anew", False), body.get("part", False), body.get("swept", False))
        return cls(name.removeprefix(PREFIX), request, state, place, body["rows"], body["reason"], *flags)


def known(marks: Mapping[str, str]) -> dict[str, Job]:
    """Every backfill that the log remembers, by id."""
    jobs = [Job.of_mark(name, text) for name, text in marks.items() if name.startswith(PREFIX)]
    return {job.id: job for job in jobs}


def missing(tables: Iterable[TableSettings], marks: Mapping[str, str]) -> list[Job]:
    """The backfills that stand for a first snapshot which a table never had, or which a crash cut short.

    Tables whose `snapshot` is `incremental`, tables added to the pipeline, and tables with unfinished chunks. Tables
    that come back, or were made again under their name, begin again whatever they had.
    """
    jobs = []
    former = known(marks)
    plans = planned(marks, [table.name for table in tables])
    for table in tables:
        name, plan = table.name, plans.get(table.name)
        before = former.get(own_id(name))
        if before is not None and before.state is JobState.LEFT:
            jobs.append(Job(own_id(name), Request(name), fresh=True, anew=True))
        elif table.snapshot != "never" and before is None and (plan is None or not plan.finished):
            jobs.append(Job(own_id(name), Request(name), fresh=plan is None))
    return jobs


def beginning_again(jobs: Iterable[Job]) -> dict[TableId, WaitReason]:
    """The tables whose rows the log drops, and that have yet to get those that the source has now."""
    found = {}
    for job in jobs:
        if job.anew and job.state not in (JobState.DONE, JobState.LEFT):
            message = (
                f"{job.request.table} begins again, and not all of its rows are read: backfill {job.id} is {job.state}."
            )
            steer = "" if job.state is JobState.RUNNING else f" --resume {job.id}"
            found[job.request.table] = WaitReason(message, f"See: millrace backfill{steer}")
    return found


def left(tables: Iterable[TableId]) -> dict[str, str]:
    """The marks of tables that leave the pipeline."""
    return dict(Job(own_id(name), Request(name), JobState.LEFT).mark() for name in tables)


def own_id(table: TableId) -> str:
    """The id of the backfill that stands for a table's first snapshot."""
    return f"table:{table}"
