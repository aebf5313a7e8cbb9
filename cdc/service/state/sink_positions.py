"""How far a sink is, with and without its held-back tables, and the consumer names of those tables. Pure.

A held-back table is one that is paused, or one that waits because its store cannot take it now. It has its own consumer
position in the log.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cdc.model import ZERO_LSN, Lsn, TableId
from cdc.ports import Consumer


@dataclass(frozen=True, slots=True)
class SinkPosition:
    """The LSN up to which a sink has applied the log (`applied`), and that of each held-back table.

    `tables` are the tables of the sink; empty: all.
    """

    applied: Lsn
    held_back: Mapping[str, Lsn] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()
    views: Mapping[str, Lsn] = field(default_factory=dict)
    """By table of a view: the LSN that the sink's rows of it reflect, at least; `applied` says nothing of views."""

    @property
    def reached(self) -> Lsn:
        """The LSN up to which it has every table, held-back ones included."""
        return self.reached_for(())

    def reached_for(self, tables: Collection[str], except_held_back: bool = False) -> Lsn:
        """The LSN up to which it has these tables (empty: all), or those of them that are not held back."""
        concerned = [at for table, at in self.held_back.items() if not tables or table in tables]
        return self.applied if except_held_back else min([self.applied, *concerned])

    def has_table(self, table: str) -> bool:
        """Whether the sink receives a table."""
        return not self.tables or table in self.tables


NO_POSITION = SinkPosition(ZERO_LSN)


def by_name(consumers: Iterable[Consumer]) -> dict[str, Consumer]:
    """The log's consumers by name."""
    return {consumer.name: consumer for consumer in consumers}


def position_of(sink: str, tables: Sequence[TableId], consumers: Iterable[Consumer]) -> SinkPosition:
    """A sink's position. A table that left the pipeline may still have a consumer; it no longer counts."""
    at = {name: consumer.reached for name, consumer in by_name(consumers).items()}
    names = {consumer_name(sink, table): str(table) for table in tables}
    prefix = _prefix(sink)
    found = {names.get(name, name): reached for name, reached in at.items() if name.startswith(prefix)}
    held_back = {table: reached for table, reached in found.items() if not tables or table in names.values()}
    return SinkPosition(at.get(sink, ZERO_LSN), held_back, frozenset(map(str, tables)))


def consumer_name(sink: str, table: TableId) -> str:
    """The consumer of a held-back table. A digest: a table name may contain characters that a consumer name may not."""
    return f"{_prefix(sink)}{hashlib.sha256(str(table).encode()).hexdigest()[:16]}"


def _prefix(sink: str) -> str:
    return f"{sink}.held."
