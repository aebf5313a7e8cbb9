"""Whether the pipeline is ready, from the status of its parts. Pure: no clock, no file.

Promise: a part that has not reported lately is not ready, whatever it reported last.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from cdc.model import Lsn
from cdc.service.state.status import SILENT_AFTER, Facts, age

_PAGE = 8192
_HEADERS = (24, 40)  # of a page, and of the first page of a WAL file


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the pipeline is not ready: the part, the message (a sentence whose subject is the part) and the remedy."""

    part: str
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if not self.message.endswith((".", ":", "?", "!")):
            object.__setattr__(self, "message", f"{self.message}.")


def reasons(
    capture: Facts,
    apply: Facts,
    sinks: tuple[str, ...],
    now: datetime,
    *,
    views: Facts | None = None,
    view_names: Iterable[str] = (),
) -> list[Reason]:
    """Everything that keeps the pipeline from being ready; empty means ready. `views` is the status of that process."""
    return [
        *_part("capture", capture, now, {"streaming"}),
        *_tables("capture", capture),
        *_first_rows(capture),
        *_views(capture, views or {}, tuple(view_names), now),
        *_part("apply", apply, now, {"running"}),
        *(reason for name in sinks for reason in _sink(name, nested(apply, "sinks", name))),
    ]


def _views(capture: Facts, views: Facts, names: tuple[str, ...], now: datetime) -> Iterator[Reason]:
    if not names:
        return
    if trouble := capture.get("views_trouble"):
        yield Reason("capture", f"cannot append the rows of views: {trouble}")
    yield from _part("views", views, now, {"running"})
    for name in names:
        facts = nested(views, "views", name)
        error, state = nested(facts, "error"), facts.get("state", "starting")
        if error:
            again = " It is tried again automatically." if error.get("transient") else ""
            yield Reason(f"view {name}", f"failed: {error.get('message')}", f"{error.get('remedy', '')}{again}".strip())
        elif state not in ("live", "dropped"):
            yield Reason(f"view {name}", str(facts.get("message") or f"is {state}"), "See: millrace view list")


def _part(name: str, facts: Facts, now: datetime, good: set[str]) -> Iterator[Reason]:
    error = nested(facts, "error")
    if error.get("message"):
        yield Reason(name, str(error["message"]), str(error.get("remedy", "")))
    elif age(facts, now) > SILENT_AFTER:
        yield Reason(name, "has not reported lately", "See its log lines; the supervisor restarts it.")
    elif facts.get("state") not in good:
        trouble = f": {facts['trouble']}" if facts.get("trouble") else ""
        yield Reason(name, f"is {facts.get('state', 'starting')}{trouble}", "Wait; progress is in /v1/status.")


def _tables(part: str, facts: Mapping[str, object]) -> Iterator[Reason]:
    """Waiting tables, while the others continue."""
    waiting = nested(facts, "tables_waiting")
    for table in sorted(waiting):
        reason = nested(waiting, table)
        yield Reason(part, f"table {table} waits: {reason.get('message', '')}", str(reason.get("remedy", "")))


def _first_rows(capture: Facts) -> Iterator[Reason]:
    jobs = capture.get("backfills")
    for job in jobs if isinstance(jobs, list) else ():
        identity = str(job.get("id")) if isinstance(job, Mapping) else ""
        if identity.startswith("table:") and job.get("state") == "failed":
            message = f"has not read all rows of {job.get('table')}: {job.get('reason') or 'its backfill failed'}"
            yield Reason("capture", message, f"Resume it: millrace backfill --resume {identity}")


def _sink(name: str, facts: Mapping[str, object]) -> Iterator[Reason]:
    if gap := nested(facts, "gap"):
        yield Reason(f"sink {name}", str(gap["message"]), str(gap["remedy"]))
    yield from _losses(name, nested(facts, "losses"))
    if facts.get("state") == "paused":
        yield Reason(f"sink {name}", "is paused", f"Resume it: millrace resume {name}")
    elif facts.get("state") == "stopped":
        restart = f"Then restart the sink: millrace pause {name} && millrace resume {name}"
        yield Reason(f"sink {name}", f"stopped: {facts.get('error')}", restart)
    elif facts.get("state") != "running":
        message = str(facts.get("error") or f"is {facts.get('state', 'starting')}")
        yield Reason(f"sink {name}", message)
    yield from _tables(f"sink {name}", facts)
    for table in nested(facts, "tables_refilling"):
        reason = nested(facts, "tables_refilling", table)
        yield Reason(f"sink {name}", str(reason.get("message", "")), str(reason.get("remedy", "")))
    paused = facts.get("held")
    for table in paused if isinstance(paused, list) else ():
        yield Reason(f"sink {name}", f"table {table} is paused", f"Resume it: millrace resume {table}")


def _losses(name: str, losses: Mapping[str, object]) -> Iterator[Reason]:
    """Lost tables: one sentence for all with the same message and remedy."""
    grouped: dict[tuple[str, str], list[str]] = {}
    for table in losses:
        reason = nested(losses, table)
        grouped.setdefault((str(reason.get("message")), str(reason.get("remedy"))), []).append(table)
    for (message, remedy), tables in grouped.items():
        yield Reason(f"sink {name}", f"{', '.join(tables)}: {message}", remedy)


def nested(facts: Facts, *path: str) -> Mapping[str, object]:
    """A nested object; empty if it is missing or not an object."""
    here: object = facts
    for name in path:
        here = here.get(name) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else {}


def has_reached(wanted: Lsn, reached: Lsn, head: Lsn, watermark: Lsn) -> bool:
    """Whether a sink holds everything committed up to an LSN.

    Either it applied an entry that ends there or beyond, or it applied the whole log and capture knows that the source
    sent nothing else up to that LSN (most LSNs do not end a captured transaction).
    """
    wanted = _before_page_header(wanted)
    return reached >= wanted or (reached >= head and watermark >= wanted)


def _before_page_header(lsn: Lsn) -> Lsn:
    """At the end of a WAL page Postgres reports the LSN after the next page's header, which a stream reaches only once
    more is written. A header contains no record, so the end of the page means the same."""
    return Lsn(lsn - lsn % _PAGE) if lsn % _PAGE in _HEADERS else lsn
