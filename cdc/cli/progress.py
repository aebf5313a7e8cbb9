"""How far a backfill is, as people see it: a bar in a terminal, plain lines in a pipe. Pure but for the printing."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn

from cdc.cli.output import OUT

Facts = dict[str, Any]
Show = Callable[[Facts], None]


@contextmanager
def screen(quiet: bool) -> Iterator[Show]:
    """A bar in a terminal, a line per change in a pipe, nothing when JSON is wanted."""
    if quiet:
        yield lambda facts: None
    elif OUT.is_terminal:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[pace]}"))
        with Progress(*columns, console=OUT) as progress:
            task = progress.add_task("waiting for the pipeline", total=None, pace="")
            yield lambda facts: progress.update(
                task, description=_what(facts), completed=facts["rows"], total=_total(facts), pace=_pace(facts)
            )
    else:
        yield _Lines().show


class _Lines:
    """Plain lines, each said once."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, facts: Facts) -> None:
        line = told(facts)
        if line != self._last:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            self._last = line


def told(facts: Facts) -> str:
    """One line: what it does, how much of it is done, how fast, and how long it will take."""
    return f"{_what(facts)}: {_pace(facts)}"


def _what(facts: Facts) -> str:
    waiting = f", waiting for {facts['waiting']}" if facts.get("waiting") else ""
    return f"{facts['table']} {facts['state']}{waiting}"


def _total(facts: Facts) -> int | None:
    """The estimate may be too small, and of one that is over it counts no more."""
    if facts["state"] == "done":
        return max(1, int(facts["rows"]))
    return max(int(facts["rows"]), int(facts.get("estimate") or 0)) or None


def _pace(facts: Facts) -> str:
    of = f" of about {facts['estimate']:,}" if facts.get("estimate") and facts["state"] != "done" else ""
    parts = [f"{facts['rows']:,}{of} rows"]
    if rate := facts.get("rows_per_second"):
        parts.append(f"{rate:,.0f} rows/s")
    if facts.get("eta_seconds") is not None:
        parts.append(f"{duration(facts['eta_seconds'])} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


def listed(job: Facts) -> list[object]:
    """One row of the list of backfills."""
    left, rate = job.get("eta_seconds"), job.get("rows_per_second")
    return [
        job["id"],
        job["table"],
        job["state"],
        f"{job['rows']:,}",
        f"{job['estimate']:,}" if job.get("estimate") else "",
        f"{rate:,.0f}" if rate else "",
        duration(left) if left is not None else "",
        job.get("reason") or job.get("waiting", ""),
    ]


HEADINGS = ("id", "table", "state", "rows", "of about", "rows/s", "left", "reason")
