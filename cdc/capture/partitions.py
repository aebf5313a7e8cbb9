"""What happens to single partitions without being published: attached, detached, dropped, truncated.

Through the root Postgres sends the changes of rows and nothing else. A partition that comes with rows, or goes with
them, is noticed here from the side and said by name with what to run; capture goes on. See docs/adr/0009-partitions.md.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from cdc.capture.connect import Connection, explained
from cdc.errors import LogFull
from cdc.model import LOG_SCHEMA, Entry, TableId
from cdc.ports import LogWriter

MARK = "partitions"
_MOST_NOTICES = 20

_log = logging.getLogger(__name__)

_LEAVES = """
select n.nspname::text, r.relname::text, ln.nspname::text, l.relname::text, l.oid::bigint, l.relfilenode::bigint,
       (select bool_and(t.xmin = i.xmin) from pg_catalog.pg_partition_ancestors(l.oid) a
          join pg_catalog.pg_class c on c.oid = a.relid join pg_catalog.pg_type t on t.oid = c.reltype
          join pg_catalog.pg_inherits i on i.inhrelid = c.oid
         where c.oid <> r.oid)
  from unnest(%(schemas)s::text[], %(names)s::text[]) as w(schema, name)
  join pg_catalog.pg_namespace n on n.nspname = w.schema
  join pg_catalog.pg_class r on r.relnamespace = n.oid and r.relname = w.name and r.relkind = 'p'
 cross join lateral pg_catalog.pg_partition_tree(r.oid) p
  join pg_catalog.pg_class l on l.oid = p.relid and p.isleaf and l.oid <> r.oid
  join pg_catalog.pg_namespace ln on ln.oid = l.relnamespace
"""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A partition with rows. `file` changes when it is truncated or rewritten; `born` says that it was made as a
    partition, so that no row can have been in it before (its type and its place in the tree are of one transaction)."""

    name: str
    file: int
    born: bool = True


Leaves = Mapping[str, Mapping[int, Leaf]]
"""Root's name to its leaves by oid. A root without leaves is not there."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What no change in the log will ever say."""

    message: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}"


def read(connection: Connection, tables: Sequence[TableId]) -> Leaves:
    """The leaves of these tables as the catalog has them."""
    keys = {"schemas": [table.schema for table in tables], "names": [table.name for table in tables]}
    with explained("Reading the partitions"):
        rows = connection.execute(_LEAVES, keys).fetchall()
    found: dict[str, dict[int, Leaf]] = {}
    for schema, name, leaf_schema, leaf, oid, file, born in rows:
        leaves = found.setdefault(str(TableId(schema, name)), {})
        leaves[oid] = Leaf(str(TableId(leaf_schema, leaf)), file, bool(born))
    return found


def notices(before: Leaves, now: Leaves) -> Iterator[Notice]:
    """What happened to the leaves of the roots that were known before. Pure."""
    for root in sorted(before.keys() & now.keys()):
        old, new = before[root], now[root]
        for oid in old.keys() - new.keys():
            message = f"Partition {old[oid].name} was detached from {root} or dropped: its rows stay in the stores."
            yield Notice(message, "See them with millrace verify; millrace resync removes them.")
        for oid in new.keys() - old.keys():
            if not new[oid].born:
                message = (
                    f"Partition {new[oid].name} was attached to {root}: rows that it had before are not in the log."
                )
                yield Notice(message, f"Read them: millrace backfill {root}")
        for oid in old.keys() & new.keys():
            if old[oid].file != new[oid].file:
                message = (
                    f"Partition {new[oid].name} of {root} was truncated or rewritten: if truncated, its rows stay."
                )
                yield Notice(message, "See them with millrace verify; millrace resync removes them.")


def mark(leaves: Leaves) -> str:
    """As the log keeps it, so that what happened while nobody looked is noticed too."""
    known = {root: {oid: [leaf.name, leaf.file] for oid, leaf in found.items()} for root, found in leaves.items()}
    return json.dumps(known, separators=(",", ":"), sort_keys=True)


def of_mark(text: str) -> Leaves:
    """Read it back."""
    return {
        root: {int(oid): Leaf(str(name), int(file)) for oid, (name, file) in found.items()}
        for root, found in json.loads(text).items()
    }


class Partitions:
    """Looks at the captured tables' partitions, whenever asked, and remembers in the log what it saw."""

    def __init__(self, tables: Callable[[], Sequence[TableId]], log: LogWriter) -> None:
        self._tables = tables
        self._log = log
        self.said: tuple[Notice, ...] = ()
        """The newest notices of this process."""

    def look(self, connection: Connection) -> None:
        """Say what has changed since the last look, whoever looked. A log without room is written at a later one."""
        now = read(connection, self._tables())
        stored = self._log.progress().marks.get(MARK)
        if mark(now) == (stored or "{}"):
            return
        try:
            self._log.append(Entry(LOG_SCHEMA.empty_table(), self._log.progress().end, {MARK: mark(now)}))
        except LogFull:
            return
        for notice in notices(of_mark(stored or "{}"), now):
            _log.warning("%s", notice)
            self.said = (*self.said, notice)[-_MOST_NOTICES:]
