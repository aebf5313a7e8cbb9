"""What happens to single partitions without being published: attached, detached, dropped, truncated.

Through the root Postgres sends the changes of rows and nothing else. A partition that comes with rows, or goes with
them, is noticed here from the side and said by name; the policy of its table decides what follows. Capture goes on.
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
    """A partition with rows. `file` changes when it is truncated or rewritten; `born` says that it was made as a
    partition, so that no row can have been in it before (its type and its place in the tree are of one transaction).

    `joined` are the transactions that put it and what is above it into the tree: others, if it was attached again.
    `bounds` is the text of its range, or why it has none: after a DROP nobody can be asked.
    """

    name: str
    file: int
    born: bool = True
    joined: str = ""
    bounds: str = ""


Leaves = Mapping[str, Mapping[int, LeafPartition]]
"""Root's name to its leaves by oid."""


class PartitionChange(StrEnum):
    """What became of a partition."""

    REMOVED = "was detached from {root} or dropped"
    ATTACHED = "was attached to {root}"
    REWRITTEN = "of {root} was truncated or rewritten"
    MOVED = "was detached from {root} and attached again"


@dataclass(frozen=True, slots=True)
class PartitionEvent:
    """One partition and what became of it. `before` and `now` are the leaf as it was and is; None: not there."""

    root: str
    happening: PartitionChange
    before: LeafPartition | None
    now: LeafPartition | None

    @property
    def leaf(self) -> LeafPartition:
        """The newest that is known of it."""
        found = self.now or self.before
        assert found is not None
        return found

    @property
    def subject(self) -> str:
        """The beginning of a sentence."""
        return f"Partition {self.leaf.name} {self.happening.format(root=self.root)}"


@dataclass(frozen=True, slots=True)
class Notice:
    """What no change in the log will ever say."""

    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


@dataclass(frozen=True, slots=True)
class PartitionRefill:
    """Rows of a table to be read again, and ranges of which everything else is to go."""

    table: TableId
    conditions: tuple[str, ...]
    removed: tuple[str, ...]


def read(connection: Connection, tables: Sequence[TableId]) -> Leaves:
    """The leaves of those of these tables that are partitioned, as the catalog has them; without their bounds."""
    keys = {"schemas": [table.schema for table in tables], "names": [table.name for table in tables]}
    with explained("Reading the partitions"):
        rows = connection.execute(_LEAVES, keys).fetchall()
    found: dict[str, dict[int, LeafPartition]] = {}
    for schema, name, leaf_schema, leaf, oid, file, born, joined in rows:
        leaves = found.setdefault(str(TableId(schema, name)), {})
        if oid is not None:
            leaves[oid] = LeafPartition(str(TableId(leaf_schema, leaf)), file, bool(born), joined or "")
    return found


def bounded(connection: Connection, now: Leaves, before: Leaves) -> Leaves:
    """The same leaves with their bounds: those of before, and for what is new those that the catalog has."""
    known = {(oid, leaf.joined): leaf.bounds for leaves in before.values() for oid, leaf in leaves.items()}
    asked = [oid for leaves in now.values() for oid, leaf in leaves.items() if not known.get((oid, leaf.joined))]
    told = partition_bounds.read(connection, asked) if asked else {}
    return {
        root: {
            oid: replace(leaf, bounds=known.get((oid, leaf.joined)) or told.get(oid, ""))
            for oid, leaf in leaves.items()
        }
        for root, leaves in now.items()
    }


def events(before: Leaves, now: Leaves) -> Iterator[PartitionEvent]:
    """What happened to the leaves of the roots that were known before. Pure."""
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
class PartitionAnswer:
    """What follows from an event: what is said, what is read again, and which range of rows goes."""

    notice: Notice
    condition: str = ""
    removed: str = ""


_STAY = "See them with millrace verify; millrace resync removes them."
_FOLLOW = "Follow it with: millrace backfill"


def answer(event: PartitionEvent, policy: PartitionSettings, schema: TableSchema | None) -> PartitionAnswer:
    """What the policy of a table makes of an event. Pure; `schema` is what the log knows of the table."""
    if event.happening is PartitionChange.ATTACHED:
        return _attached(event, policy)
    lost = event.before.bounds if event.before is not None else ""
    if policy.removed == "delete":
        why_not = "the log knows no row of it" if schema is None else partition_bounds.unfit(lost, schema)
        if not why_not:
            return PartitionAnswer(
                Notice(f"{event.subject}: rows that it does not hold any more are removed from the stores.", _FOLLOW),
                _condition(event, lost),
                lost,
            )
        kept = Notice(f"{event.subject}: its rows stay in the stores, because {why_not}.", _STAY)
    elif event.happening is PartitionChange.REWRITTEN:
        kept = Notice(f"{event.subject}: if truncated, its rows stay.", _STAY)
    else:
        kept = Notice(f"{event.subject}: its rows stay in the stores.", _STAY)
    reads = event.happening is PartitionChange.MOVED and policy.attached == "backfill"
    return PartitionAnswer(kept, _condition(event) if reads else "")


def _attached(event: PartitionEvent, policy: PartitionSettings) -> PartitionAnswer:
    if policy.attached == "backfill":
        return PartitionAnswer(
            Notice(f"{event.subject}: rows that it had before are read.", _FOLLOW), _condition(event)
        )
    message = f"{event.subject}: rows that it had before are not in the log."
    return PartitionAnswer(Notice(message, f"Read them: millrace backfill {event.root}"))


def _condition(event: PartitionEvent, lost: str = "") -> str:
    """The rows to read: those within the range that was lost, and those of the partition as it is now."""
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


def refill(table: TableId, answers: Sequence[PartitionAnswer]) -> PartitionRefill | None:
    """One for all partitions of a table; None if nothing is to be read or removed."""
    conditions = tuple(dict.fromkeys(one.condition for one in answers if one.condition))
    removed = tuple(dict.fromkeys(one.removed for one in answers if one.removed))
    return PartitionRefill(table, conditions, removed) if conditions or removed else None


def mark(leaves: Leaves) -> str:
    """As the log keeps it, so that what happened while nobody looked is noticed too."""
    known = {
        root: {oid: [leaf.name, leaf.file, leaf.joined, leaf.bounds] for oid, leaf in found.items()}
        for root, found in leaves.items()
    }
    return json.dumps(known, separators=(",", ":"), sort_keys=True, ensure_ascii=False)


def of_mark(text: str) -> Leaves:
    """Read it back; older ones know name and file only."""
    return {
        root: {int(oid): LeafPartition(str(facts[0]), int(facts[1]), True, *facts[2:]) for oid, facts in found.items()}
        for root, found in json.loads(text).items()
    }


class Partitions:
    """Looks at the captured tables' partitions, whenever asked, and remembers in the log what it saw.

    `ask` has rows read again and ranges removed; it is called before the look is remembered, so that a crash in
    between asks once more, which changes nothing.
    """

    def __init__(
        self,
        tables: Callable[[], Mapping[TableId, PartitionSettings]],
        log: LogWriter,
        ask: Callable[[Connection, PartitionRefill], None],
    ) -> None:
        self._tables = tables
        self._log = log
        self._ask = ask
        self._asked = ""
        self.said: tuple[Notice, ...] = ()
        """The newest notices of this process."""

    def look(self, connection: Connection) -> None:
        """Say what has changed since the last look, whoever looked. A log without room is written at a later one."""
        tables = self._tables()
        before = of_mark(self._log.progress().marks.get(MARK, "{}"))
        now = bounded(connection, read(connection, list(tables)), before)
        if mark(now) == mark(before):
            return
        answers = self._answers(before, now, tables)
        if self._asked != mark(now):
            for root, found in answers.items():
                if (wanted := refill(root, found)) is not None:
                    self._ask(connection, wanted)
            self._asked = mark(now)
        try:
            self._log.append(Entry(LOG_SCHEMA.empty_table(), self._log.progress().end, {MARK: mark(now)}))
        except LogFull:
            return
        for notice in (one.notice for found in answers.values() for one in found):
            _log.warning("%s", notice)
            self.said = (*self.said, notice)[-_MOST_NOTICES:]

    def _answers(
        self, before: Leaves, now: Leaves, policies: Mapping[TableId, PartitionSettings]
    ) -> Mapping[TableId, Sequence[PartitionAnswer]]:
        schemas = {schema.table: schema for schema in self._log.schemas.newest()}
        found: dict[TableId, list[PartitionAnswer]] = {}
        for event in events(before, now):
            root = TableId.parse(event.root)
            found.setdefault(root, []).append(answer(event, policies[root], schemas.get(root)))
        return found
