"""What a position does not cover: tables that wait or were skipped, dead letters, rows not read yet. Pure.

Promise: whoever says that a sink has reached an LSN says with it what the sink lacks even so. A table that waits keeps
the sink from reaching anything, unless the question leaves it out; everything else is said and does not.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cdc.model import ZERO_LSN, Lsn
from cdc.service.observe.health import has_reached, nested
from cdc.service.state.sink_positions import NOWHERE, SinkPosition
from cdc.service.state.status import Facts


@dataclass(frozen=True, slots=True)
class Asked:
    """What is waited for: these sinks, and of them these tables (none named: all) or all tables but those that wait."""

    sinks: tuple[str, ...]
    tables: frozenset[str] = frozenset()
    except_waiting: bool = False

    def about(self, table: str) -> bool:
        """Whether a table is concerned."""
        return not self.tables or table in self.tables


@dataclass(frozen=True, slots=True)
class Excepted:
    """Something that is lacking. `sink` is empty where it concerns every sink, and `table` where every table."""

    kind: str
    sink: str
    table: str
    message: str
    remedy: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class Standing:
    """How far everybody is: what the parts said, the sinks' places, the log's head, up to where the reader knows that
    the log misses nothing, and the dead letters by sink and table."""

    capture: Facts
    apply: Facts
    places: Mapping[str, SinkPosition]
    head: Lsn = ZERO_LSN
    watermark: Lsn = ZERO_LSN
    letters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)

    def behind(self, wanted: Lsn, asked: Asked) -> list[str]:
        """Those of the asked sinks that do not yet hold everything up to an LSN."""
        return [name for name in asked.sinks if not self._reached(wanted, asked, self.places.get(name, NOWHERE))]

    def _reached(self, wanted: Lsn, asked: Asked, place: SinkPosition) -> bool:
        waiting = nested(self.capture, "tables_waiting")
        not_followed = [table for table in waiting if place.given(table) and asked.about(table)]
        if not_followed and not asked.except_waiting:
            return False
        return has_reached(wanted, place.of(asked.tables, asked.except_waiting), self.head, self.watermark)

    def excepted(self, asked: Asked) -> list[Excepted]:
        """Everything that the asked sinks lack, of the asked tables, whatever their positions say."""
        found = [
            *_not_followed(self.capture),
            *_unread(self.capture),
            *(item for name in asked.sinks for item in self._lacking(name)),
        ]
        return [item for item in found if not item.table or asked.about(item.table)]

    def _lacking(self, name: str) -> Iterator[Excepted]:
        yield from _of_sink(name, self.places.get(name, NOWHERE), self.apply)
        yield from _letters(name, self.letters.get(name, {}))


def _letters(name: str, counts: Mapping[str, int]) -> Iterator[Excepted]:
    for table, count in sorted(counts.items()):
        message = f"{count} dead letter{'s' if count > 1 else ''} of {table}"
        yield Excepted("dead letters", name, table, message, "See: millrace dlq list", count)


def _of_sink(name: str, place: SinkPosition, apply: Facts) -> Iterator[Excepted]:
    facts = nested(apply, "sinks", name)
    waiting = nested(facts, "tables_waiting")
    for table in sorted({*place.held, *waiting} - set(nested(facts, "losses"))):
        said = nested(waiting, table)
        why = str(said.get("message") or "it is held back: paused, or catching up")
        remedy = str(said.get("remedy") or f"If it is paused: millrace resume {table}")
        yield Excepted("waiting", name, table, f"{table} waits: {why.rstrip('.')}", remedy)
    for table in _texts(facts.get("tables_skipped")):
        remedy = f"Have it filled again: millrace resume {table} --sink {name}"
        yield Excepted("skipped", name, table, f"{table} is skipped", remedy)
    for kind, section in (("refilling", "tables_refilling"), ("lost", "losses")):
        for table in nested(facts, section):
            said = nested(facts, section, table)
            yield Excepted(kind, name, table, str(said.get("message", "")), str(said.get("remedy", "")))
    if gap := nested(facts, "gap"):
        for table in _texts(gap.get("tables")):
            yield Excepted("gap", name, table, str(gap.get("message")), str(gap.get("remedy", "")))


def _not_followed(capture: Facts) -> Iterator[Excepted]:
    for table in sorted(nested(capture, "tables_waiting")):
        said = nested(capture, "tables_waiting", table)
        message = f"{table} is not followed: {said.get('message', '')}".rstrip(".")
        yield Excepted("waiting", "", table, message, str(said.get("remedy", "")))


def _unread(capture: Facts) -> Iterator[Excepted]:
    """Tables of which rows have yet to be read from the source, or never were."""
    if capture.get("history_exact_from") == "":
        yield Excepted("first snapshot", "", "", "the first snapshot is not whole yet", "Progress: millrace status")
    for job in unfinished(capture):
        table, identity, state = str(job.get("table")), str(job.get("id")), job.get("state")
        message = f"the rows of {table} are not all read: backfill {identity} is {state}"
        again = {"failed": f"Go on: millrace backfill --resume {identity}", "running": "Progress: millrace backfill"}
        remedy = again.get(str(state), f"Read it again: millrace backfill {table}")
        yield Excepted("backfill", "", table, message, remedy)


def unfinished(capture: Facts) -> list[Mapping[str, object]]:
    """Backfills that leave a table incomplete: those in place of a first snapshot that are not done, and any that
    failed; unless a later one has read the whole table since."""
    jobs = capture.get("backfills")
    found = [job for job in jobs if isinstance(job, Mapping)] if isinstance(jobs, list) else []
    return [job for at, job in enumerate(found) if _lacking(job) and not _made_good(job, found[at + 1 :])]


def _lacking(job: Mapping[str, object]) -> bool:
    first = str(job.get("id", "")).startswith("table:")
    return job.get("state") == "failed" or (first and job.get("state") in ("running", "paused", "cancelled"))


def _made_good(job: Mapping[str, object], later: Sequence[Mapping[str, object]]) -> bool:
    wanted = ("done", True, job.get("table"))
    return any((one.get("state"), one.get("whole"), one.get("table")) == wanted for one in later)


def _texts(value: object) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else []
