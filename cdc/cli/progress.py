"""The progress of a backfill or a comparison: a bar in a terminal, plain lines in a pipe."""

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
def progress_display(quiet: bool) -> Iterator[Show]:
    """A bar in a terminal, a line per change in a pipe, nothing if `quiet`."""
    if quiet:
        yield lambda facts: None
    elif OUT.is_terminal:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), TextColumn("{task.fields[figures]}"))
        with Progress(*columns, console=OUT) as progress:
            task = progress.add_task("waiting for the pipeline", total=None, figures="")
            yield lambda facts: progress.update(
                task, description=_title(facts), completed=facts["rows"], total=_total(facts), figures=_figures(facts)
            )
    else:
        yield _Lines().show


class _Lines:
    """Plain lines; an unchanged line is not repeated."""

    def __init__(self) -> None:
        self._last = ""

    def show(self, facts: Facts) -> None:
        line = progress_line(facts)
        if line != self._last:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
            self._last = line


def progress_line(facts: Facts) -> str:
    """One line: table and state, rows done, rate, time left."""
    return f"{_title(facts)}: {_figures(facts)}"


def _title(facts: Facts) -> str:
    waiting = f", waiting for {facts['waiting']}" if facts.get("waiting") else ""
    return f"{facts['table']} {facts['state']}{waiting}"


def _total(facts: Facts) -> int | None:
    """The estimate may be too small; once the job is done, its rows count."""
    if facts["state"] == "done":
        return max(1, int(facts["rows"]))
    return max(int(facts["rows"]), int(facts.get("estimate") or 0)) or None


def _figures(facts: Facts) -> str:
    of = f" of about {facts['estimate']:,}" if facts.get("estimate") and facts["state"] != "done" else ""
    parts = [f"{facts['rows']:,}{of} rows"]
    if rate := facts.get("rows_per_second"):
        parts.append(f"{rate:,.0f} rows/s")
    if facts.get("eta_seconds") is not None:
        parts.append(f"{duration(facts['eta_seconds'])} left")
    return ", ".join(parts)


def duration(seconds: float) -> str:
    """As hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))


def table_row(job: Facts) -> list[object]:
    """One row of the table of backfills."""
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
