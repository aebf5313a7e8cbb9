"""Whether the pipeline does what it promises, judged from what its parts said: pure, no clock, no file.

Promise: health never lies by silence. A part that has not spoken lately is unwell, whatever it said last.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from cdc.model import Lsn
from cdc.service.state.status import Facts, age

_PAGE = 8192
_HEADERS = (24, 40)  # of a page, and of the first page of a WAL file
SILENT_AFTER = 15.0  # seconds; parts speak about once a second, a long garbage collection stays below this


@dataclass(frozen=True, slots=True)
class Reason:
    """Why the pipeline is not ready: which part, what (a whole sentence together with the part), and what to do."""

    part: str
    message: str
    remedy: str = ""

    def __post_init__(self) -> None:
        if not self.message.endswith((".", ":", "?", "!")):
            object.__setattr__(self, "message", f"{self.message}.")


def reasons(capture: Facts, apply: Facts, sinks: tuple[str, ...], now: datetime) -> list[Reason]:
    """Everything that keeps the pipeline from being ready; empty means ready."""
    return [
        *_part("capture", capture, now, {"streaming"}),
        *_tables("capture", capture),
        *_first_rows(capture),
        *_part("apply", apply, now, {"running"}),
        *(reason for name in sinks for reason in _sink(name, nested(apply, "sinks", name))),
    ]


def _part(name: str, facts: Facts, now: datetime, good: set[str]) -> Iterator[Reason]:
    error = nested(facts, "error")
    if error.get("message"):
        yield Reason(name, str(error["message"]), str(error.get("remedy", "")))
    elif age(facts, now) > SILENT_AFTER:
        yield Reason(name, "has not reported lately", "Look at its log lines; the supervisor starts it again.")
    elif facts.get("state") not in good:
        trouble = f": {facts['trouble']}" if facts.get("trouble") else ""
        yield Reason(name, f"is {facts.get('state', 'starting')}{trouble}", "Wait; progress is in /v1/status.")


def _tables(part: str, facts: Mapping[str, object]) -> Iterator[Reason]:
    """Tables that wait alone while the others go on."""
    waiting = nested(facts, "tables_waiting")
    for table in sorted(waiting):
        said = nested(waiting, table)
        yield Reason(part, f"table {table} waits: {said.get('message', '')}", str(said.get("remedy", "")))


def _first_rows(capture: Facts) -> Iterator[Reason]:
    jobs = capture.get("backfills")
    for job in jobs if isinstance(jobs, list) else ():
        identity = str(job.get("id")) if isinstance(job, Mapping) else ""
        if identity.startswith("table:") and job.get("state") == "failed":
            message = f"has not read all rows of {job.get('table')}: {job.get('reason') or 'its backfill failed'}"
            yield Reason("capture", message, f"Go on: millrace backfill --resume {identity}")


def _sink(name: str, facts: Mapping[str, object]) -> Iterator[Reason]:
    if gap := nested(facts, "gap"):
        yield Reason(f"sink {name}", str(gap["message"]), str(gap["remedy"]))
    yield from _losses(name, nested(facts, "losses"))
    if facts.get("state") == "paused":
        yield Reason(f"sink {name}", "is paused", f"Let it go on: millrace resume {name}")
    elif facts.get("state") == "stopped":
        again = f"Then let it go on: millrace pause {name} && millrace resume {name}"
        yield Reason(f"sink {name}", f"stopped: {facts.get('error')}", again)
    elif facts.get("state") != "running":
        message = str(facts.get("error") or f"is {facts.get('state', 'starting')}")
        yield Reason(f"sink {name}", message)
    yield from _tables(f"sink {name}", facts)
    for table in nested(facts, "tables_refilling"):
        said = nested(facts, "tables_refilling", table)
        yield Reason(f"sink {name}", str(said.get("message", "")), str(said.get("remedy", "")))
    held = facts.get("held")
    for table in held if isinstance(held, list) else ():
        yield Reason(f"sink {name}", f"holds back {table}, which is paused", f"Let it go on: millrace resume {table}")


def _losses(name: str, losses: Mapping[str, object]) -> Iterator[Reason]:
    """What a store lost, in one sentence for the tables that it happened to alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for table in losses:
        said = nested(losses, table)
        alike.setdefault((str(said.get("message")), str(said.get("remedy"))), []).append(table)
    for (message, remedy), tables in alike.items():
        yield Reason(f"sink {name}", f"{', '.join(tables)}: {message}", remedy)


def nested(facts: Facts, *path: str) -> Mapping[str, object]:
    """A nested object, empty where it is missing or something else."""
    here: object = facts
    for name in path:
        here = here.get(name) if isinstance(here, Mapping) else None
    return here if isinstance(here, Mapping) else {}


def has_reached(wanted: Lsn, reached: Lsn, head: Lsn, watermark: Lsn) -> bool:
    """Whether a sink holds everything committed up to an LSN.

    Either it applied an entry that ends there or beyond, or it applied all that the log has and the reader knows that
    the source sent nothing else up to there (most LSNs end no captured transaction).
    """
    wanted = _before_page_header(wanted)
    return reached >= wanted or (reached >= head and watermark >= wanted)


def _before_page_header(lsn: Lsn) -> Lsn:
    """At a page's end Postgres names the place behind the next page's header, where no stream gets before more is
    written. Nothing lies in a header, so the page's end means the same."""
    return Lsn(lsn - lsn % _PAGE) if lsn % _PAGE in _HEADERS else lsn
