"""Detects what Postgres does not publish of single partitions: ATTACH, DETACH, DROP, TRUNCATE.

Through the root Postgres publishes only row changes. Partitions that were attached with rows, or removed with them, are
found in the catalog and reported by name; the table's partition policy decides what follows. Capture continues.
See docs/adr/0016-partition-lifecycle.md.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from cdc.capture.source import partition_bounds
from cdc.capture.source.connect import Connection, explained
from cdc.config.settings import PartitionSettings
from cdc.errors import LogFull
from cdc.key_range import KeyRange
from cdc.model import LOG_SCHEMA, Entry, TableId, TableSchema
from cdc.ports import LogWriter

MARK = "partitions"
_MOST_NOTICES = 20

_log = logging.getLogger(__name__)

_LEAVES = """
select n.nspname::text, r.relname::text, ln.nspname::text, l.relname::text, l.oid::bigint, l.relfilenode::bigint,
       (select bool_and(t.xmin = i.xmin) from pg_catalog.pg_partition_ancestors(l.oid) a
          join pg_catalog.pg_class c on c.oid = a.relid join pg_catalog.pg_type t on t.oid = c.reltype
          join pg_catalog.pg_inherits i on i.inhrelid = c.oid
         where c.oid <> r.oid),
       (select string_agg(i.xmin::text, '.' order by a.at) from pg_catalog.pg_partition_ancestors(l.oid)
          with ordinality as a(relid, at) join pg_catalog.pg_inherits i on i.inhrelid = a.relid
         where a.relid <> r.oid)
  from unnest(%(schemas)s::text[], %(names)s::text[]) as w(schema, name)
  join pg_catalog.pg_namespace n on n.nspname = w.schema
  join pg_catalog.pg_class r on r.relnamespace = n.oid and r.relname = w.name and r.relkind = 'p'
  left join lateral pg_catalog.pg_partition_tree(r.oid) p on p.isleaf and p.relid <> r.oid
  left join pg_catalog.pg_class l on l.oid = p.relid
  left join pg_catalog.pg_namespace ln on ln.oid = l.relnamespace
"""


@dataclass(frozen=True, slots=True)
class LeafPartition:
    """A leaf partition. `file` changes when it is truncated or rewritten. `born`: it was created as a partition, so it
    had no rows before (the same transaction created its type and attached it).

    `joined` are the transactions that attached it and its ancestors: different ones if it was attached again. `bounds`
    is the text of its range, or why it has none: after a DROP the catalog no longer has it.
    """

    name: str
    file: int
    born: bool = True
    joined: str = ""
    bounds: str = ""


Leaves = Mapping[str, Mapping[int, LeafPartition]]
"""The leaves by root name and oid."""


class PartitionChange(StrEnum):
    """What happened to a partition."""

    REMOVED = "was detached from {root} or dropped"
    ATTACHED = "was attached to {root}"
    REWRITTEN = "of {root} was truncated or rewritten"
    MOVED = "was detached from {root} and attached again"


@dataclass(frozen=True, slots=True)
class PartitionEvent:
    """One partition and what happened to it. `before` and `now` are the leaf before and after; None: not there."""

    root: str
    change: PartitionChange
    before: LeafPartition | None
    now: LeafPartition | None

    @property
    def leaf(self) -> LeafPartition:
        """The newest known state of it."""
        found = self.now or self.before
        assert found is not None
        return found

    @property
    def subject(self) -> str:
        """The beginning of a sentence."""
        return f"Partition {self.leaf.name} {self.change.format(root=self.root)}"


@dataclass(frozen=True, slots=True)
class Notice:
    """A message about changes that the stream does not contain."""

    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


@dataclass(frozen=True, slots=True)
class PartitionRefill:
    """Rows of a table to read again, and key ranges whose other rows are to be removed."""

    table: TableId
    conditions: tuple[str, ...]
    removed: tuple[str, ...]


def read(connection: Connection, tables: Sequence[TableId]) -> Leaves:
    """The leaves, without bounds, of those tables that are partitioned, from the catalog."""
    keys = {"schemas": [table.schema for table in tables], "names": [table.name for table in tables]}
    with explained("Reading the partitions"):
        rows = connection.execute(_LEAVES, keys).fetchall()
    found: dict[str, dict[int, LeafPartition]] = {}
    for schema, name, leaf_schema, leaf, oid, file, born, joined in rows:
        leaves = found.setdefault(str(TableId(schema, name)), {})
        if oid is not None:
            leaves[oid] = LeafPartition(str(TableId(leaf_schema, leaf)), file, bool(born), joined or "")
    return found


def with_bounds(connection: Connection, now: Leaves, before: Leaves) -> Leaves:
    """The leaves with their bounds: known ones from `before`, those of new leaves from the catalog."""
    known = {(oid, leaf.joined): leaf.bounds for leaves in before.values() for oid, leaf in leaves.items()}
    unknown = [oid for leaves in now.values() for oid, leaf in leaves.items() if not known.get((oid, leaf.joined))]
    found = partition_bounds.read(connection, unknown) if unknown else {}
    return {
        root: {
            oid: replace(leaf, bounds=known.get((oid, leaf.joined)) or found.get(oid, ""))
            for oid, leaf in leaves.items()
        }
        for root, leaves in now.items()
    }


def events(before: Leaves, now: Leaves) -> Iterator[PartitionEvent]:
    """What happened to the leaves of roots that are in both. Pure."""
    for root in sorted(before.keys() & now.keys()):
        old, new = before[root], now[root]
        for oid in sorted(old.keys() - new.keys()):
            yield PartitionEvent(root, PartitionChange.REMOVED, old[oid], None)
        for oid in sorted(new.keys() - old.keys()):
            if not new[oid].born:
                yield PartitionEvent(root, PartitionChange.ATTACHED, None, new[oid])
        for oid in sorted(old.keys() & new.keys()):
            if old[oid].joined and old[oid].joined != new[oid].joined:
                yield PartitionEvent(root, PartitionChange.MOVED, old[oid], new[oid])
            elif old[oid].file != new[oid].file:
                yield PartitionEvent(root, PartitionChange.REWRITTEN, old[oid], new[oid])


@dataclass(frozen=True, slots=True)
class PartitionResponse:
    """What follows from an event: the notice, the rows to read again, and the key range to remove."""

    notice: Notice
    condition: str = ""
    removed: str = ""


_STAY = "List them with millrace verify; millrace resync removes them."
_FOLLOW = "See the progress with: millrace backfill"


def respond(event: PartitionEvent, policy: PartitionSettings, schema: TableSchema | None) -> PartitionResponse:
    """What a table's policy requires after an event. Pure; `schema` is the table's newest in the log."""
    if event.change is PartitionChange.ATTACHED:
        return _attached(event, policy)
    lost = event.before.bounds if event.before is not None else ""
    if policy.removed == "delete":
        why_not = "the log has no row of it" if schema is None else partition_bounds.unfit(lost, schema)
        if not why_not:
            return PartitionResponse(
                Notice(f"{event.subject}: the rows that it no longer has are removed from the stores.", _FOLLOW),
                _condition(event, lost),
                lost,
            )
        kept = Notice(f"{event.subject}: its rows stay in the stores, because {why_not}.", _STAY)
    elif event.change is PartitionChange.REWRITTEN:
        kept = Notice(f"{event.subject}: if truncated, its rows stay.", _STAY)
    else:
        kept = Notice(f"{event.subject}: its rows stay in the stores.", _STAY)
    reads = event.change is PartitionChange.MOVED and policy.attached == "backfill"
    return PartitionResponse(kept, _condition(event) if reads else "")


def _attached(event: PartitionEvent, policy: PartitionSettings) -> PartitionResponse:
    if policy.attached == "backfill":
        return PartitionResponse(
            Notice(f"{event.subject}: the rows that it had before are read.", _FOLLOW), _condition(event)
        )
    message = f"{event.subject}: the rows that it had before are not in the log."
    return PartitionResponse(Notice(message, f"Read them: millrace backfill {event.root}"))


def _condition(event: PartitionEvent, lost: str = "") -> str:
    """The rows to read: those in the range that was lost, and those of the partition as it is now."""
    ranges = [KeyRange.parse(lost).condition()] if lost else []
    now = event.now.bounds if event.now is not None else ""
    if now.startswith("["):
        ranges += [KeyRange.parse(now).condition()] if now != lost else []
    elif event.now is not None:
        ranges.append(f"tableoid = {_relation(event.now.name)}::pg_catalog.regclass")
    return " or ".join(f"({one})" for one in ranges)


def _relation(name: str) -> str:
    table = TableId.parse(name)
    quoted = ".".join('"' + part.replace('"', '""') + '"' for part in (table.schema, table.name))
    return "'" + quoted.replace("'", "''") + "'"


def refill(table: TableId, responses: Sequence[PartitionResponse]) -> PartitionRefill | None:
    """One refill for all partitions of a table; None: nothing to read or remove."""
    conditions = tuple(dict.fromkeys(one.condition for one in responses if one.condition))
    removed = tuple(dict.fromkeys(one.removed for one in responses if one.removed))
    return PartitionRefill(table, conditions, removed) if conditions or removed else None


def mark(leaves: Leaves) -> str:
    """The text of the log's mark: with it, what happened while capture was down is detected too."""
    known = {
        root: {oid: [leaf.name, leaf.file, leaf.joined, leaf.bounds] for oid, leaf in found.items()}
        for root, found in leaves.items()
    }
    return json.dumps(known, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def of_mark(text: str) -> Leaves:
    """Parse a mark; older ones have only name and file."""
    return {
        root: {int(oid): LeafPartition(str(facts[0]), int(facts[1]), True, *facts[2:]) for oid, facts in found.items()}
        for root, found in json.loads(text).items()
    }


class Partitions:
    """Compares the captured tables' partitions with the log's mark, and records them in it.

    `request` asks for rows to be read again and ranges to be removed. It is called before the mark is written: after a
    crash in between it is called again, which changes nothing.
    """

    def __init__(
        self,
        tables: Callable[[], Mapping[TableId, PartitionSettings]],
        log: LogWriter,
        request: Callable[[Connection, PartitionRefill], None],
    ) -> None:
        self._tables = tables
        self._log = log
        self._request = request
        self._requested = ""
        self.notices: tuple[Notice, ...] = ()
        """The newest notices of this process."""

    def check(self, connection: Connection) -> None:
        """Report what changed since the last check, also of an earlier process. If the log is full, at a later
        check."""
        tables = self._tables()
        before = of_mark(self._log.progress().marks.get(MARK, "{}"))
        now = with_bounds(connection, read(connection, list(tables)), before)
        if mark(now) == mark(before):
            return
        responses = self._responses(before, now, tables)
        if self._requested != mark(now):
            for root, found in responses.items():
                if (wanted := refill(root, found)) is not None:
                    self._request(connection, wanted)
            self._requested = mark(now)
        try:
            self._log.append(Entry(LOG_SCHEMA.empty_table(), self._log.progress().end, {MARK: mark(now)}))
        except LogFull:
            return
        for notice in (one.notice for found in responses.values() for one in found):
            _log.warning("%s", notice)
            self.notices = (*self.notices, notice)[-_MOST_NOTICES:]

    def _responses(
        self, before: Leaves, now: Leaves, policies: Mapping[TableId, PartitionSettings]
    ) -> Mapping[TableId, Sequence[PartitionResponse]]:
        schemas = {schema.table: schema for schema in self._log.schemas.newest()}
        found: dict[TableId, list[PartitionResponse]] = {}
        for event in events(before, now):
            root = TableId.parse(event.root)
            found.setdefault(root, []).append(respond(event, policies[root], schemas.get(root)))
        return found
