"""What a sink lacks although its position is past it: waiting or skipped tables, dead letters, unread rows. Pure.

Promise: an answer that a sink has reached an LSN also names what the sink lacks. A held-back table keeps the sink from
reaching an LSN, unless the question leaves such tables out; the other kinds are only named.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cdc.config.settings import VIEW_SCHEMA
from cdc.model import ZERO_LSN, Lsn, TableId
from cdc.service.observe.health import has_reached, nested
from cdc.service.state.sink_positions import NO_POSITION, SinkPosition
from cdc.service.state.status import Facts


@dataclass(frozen=True, slots=True)
class Scope:
    """What a question is about: these sinks, and these of their tables (empty: all), perhaps without held-back ones."""

    sinks: tuple[str, ...]
    tables: frozenset[str] = frozenset()
    except_waiting: bool = False

    def includes(self, table: str) -> bool:
        """Whether the question is about a table."""
        return not self.tables or table in self.tables


@dataclass(frozen=True, slots=True)
class Excepted:
    """Something that a sink lacks. An empty `sink` means every sink, an empty `table` every table."""

    kind: str
    sink: str
    table: str
    message: str
    remedy: str = ""
    count: int = 0


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    """How far the pipeline is: the status of capture and apply, the sinks' positions, the log's head, the LSN up to
    which capture knows the log to be complete (`watermark`), and the number of dead letters by sink and table."""

    capture: Facts
    apply: Facts
    positions: Mapping[str, SinkPosition]
    head: Lsn = ZERO_LSN
    watermark: Lsn = ZERO_LSN
    dead_letters: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    views: Facts = field(default_factory=dict)
    """The status of the views process."""

    def behind(self, wanted: Lsn, scope: Scope) -> list[str]:
        """The sinks in question that do not yet hold everything up to an LSN."""
        return [name for name in scope.sinks if not self._reached(wanted, scope, self._position(name))]

    def _position(self, sink: str) -> SinkPosition:
        return self.positions.get(sink, NO_POSITION)

    def _reached(self, wanted: Lsn, scope: Scope, position: SinkPosition) -> bool:
        waiting = nested(self.capture, "tables_waiting")
        not_followed = [table for table in waiting if position.has_table(table) and scope.includes(table)]
        if not_followed and not scope.except_waiting:
            return False
        reached = [position.reached_for(scope.tables, scope.except_waiting)]
        reached += [
            lsn
            for table, lsn in position.views.items()
            if position.has_table(table)
            and scope.includes(table)
            and not (scope.except_waiting and self._failed(table))
        ]
        return all(has_reached(wanted, lsn, self.head, self.watermark) for lsn in reached)

    def _failed(self, table: str) -> bool:
        """Whether this is the table of a view that has failed."""
        return bool(nested(self.views, "views", TableId.parse(table).name, "error"))

    def excepted(self, scope: Scope) -> list[Excepted]:
        """Everything that the sinks in question lack, whatever their positions are."""
        found = [
            *_not_followed(self.capture),
            *_unread(self.capture),
            *_failed_views(self.views),
            *(item for name in scope.sinks for item in self._lacking(name)),
        ]
        return [item for item in found if not item.table or scope.includes(item.table)]

    def _lacking(self, name: str) -> Iterator[Excepted]:
        yield from _of_sink(name, self._position(name), self.apply)
        yield from _dead_letters(name, self.dead_letters.get(name, {}))


def _dead_letters(name: str, counts: Mapping[str, int]) -> Iterator[Excepted]:
    for table, count in sorted(counts.items()):
        message = f"{count} dead letter{'s' if count > 1 else ''} of {table}"
        yield Excepted("dead letters", name, table, message, "See: millrace dlq list", count)


def _of_sink(name: str, position: SinkPosition, apply: Facts) -> Iterator[Excepted]:
    facts = nested(apply, "sinks", name)
    waiting = nested(facts, "tables_waiting")
    for table in sorted({*position.held_back, *waiting} - set(nested(facts, "losses"))):
        reason = nested(waiting, table)
        why = str(reason.get("message") or "it is held back: paused, or catching up")
        remedy = str(reason.get("remedy") or f"If it is paused: millrace resume {table}")
        yield Excepted("waiting", name, table, f"{table} waits: {why.rstrip('.')}", remedy)
    for table in _texts(facts.get("tables_skipped")):
        remedy = f"To refill it: millrace resume {table} --sink {name}"
        yield Excepted("skipped", name, table, f"{table} is skipped", remedy)
    for kind, section in (("refilling", "tables_refilling"), ("lost", "losses")):
        for table in nested(facts, section):
            reason = nested(facts, section, table)
            yield Excepted(kind, name, table, str(reason.get("message", "")), str(reason.get("remedy", "")))
    if gap := nested(facts, "gap"):
        for table in _texts(gap.get("tables")):
            yield Excepted("gap", name, table, str(gap.get("message")), str(gap.get("remedy", "")))


def _not_followed(capture: Facts) -> Iterator[Excepted]:
    for table in sorted(nested(capture, "tables_waiting")):
        reason = nested(capture, "tables_waiting", table)
        message = f"{table} is not followed: {reason.get('message', '')}".rstrip(".")
        yield Excepted("waiting", "", table, message, str(reason.get("remedy", "")))


def _failed_views(views: Facts) -> Iterator[Excepted]:
    for name in sorted(nested(views, "views")):
        if error := nested(views, "views", name, "error"):
            table, message = f"{VIEW_SCHEMA}.{name}", f"view {name} has failed: {error.get('message', '')}".rstrip(".")
            yield Excepted("view", "", table, message, str(error.get("remedy", "")))


def _unread(capture: Facts) -> Iterator[Excepted]:
    """Tables that have rows which were not read from the source yet."""
    if capture.get("history_exact_from") == "":
        yield Excepted("first snapshot", "", "", "the first snapshot is not complete", "Progress: millrace status")
    for job in unfinished(capture):
        table, identity, state = str(job.get("table")), str(job.get("id")), job.get("state")
        message = f"the rows of {table} are not all read: backfill {identity} is {state}"
        by_state = {"failed": f"Resume it: millrace backfill --resume {identity}", "running": "See: millrace backfill"}
        remedy = by_state.get(str(state), f"Read it again: millrace backfill {table}")
        yield Excepted("backfill", "", table, message, remedy)


def unfinished(capture: Facts) -> list[Mapping[str, object]]:
    """Backfills that leave a table incomplete: failed ones, and unfinished ones in place of a first snapshot; unless a
    later backfill has read the whole table."""
    jobs = capture.get("backfills")
    found = [job for job in jobs if isinstance(job, Mapping)] if isinstance(jobs, list) else []
    return [job for at, job in enumerate(found) if _incomplete(job) and not _repeated(job, found[at + 1 :])]


def _incomplete(job: Mapping[str, object]) -> bool:
    first = str(job.get("id", "")).startswith("table:")
    return job.get("state") == "failed" or (first and job.get("state") in ("running", "paused", "cancelled"))


def _repeated(job: Mapping[str, object], later: Sequence[Mapping[str, object]]) -> bool:
    wanted = ("done", True, job.get("table"))
    return any((one.get("state"), one.get("whole"), one.get("table")) == wanted for one in later)


def _texts(value: object) -> list[str]:
    return list(map(str, value)) if isinstance(value, list) else []
