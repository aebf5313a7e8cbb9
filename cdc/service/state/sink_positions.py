"""The names under which held tables keep their place in the log, and how far a sink is with and without them. Pure."""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cdc.model import ZERO_LSN, Lsn, TableId
from cdc.ports import Consumer


@dataclass(frozen=True, slots=True)
class SinkPosition:
    """Up to where a sink has applied the log (`flowing`), and each table that is held back from it.

    `tables` are those that it is given; none: all.
    """

    flowing: Lsn
    held: Mapping[str, Lsn] = field(default_factory=dict)
    tables: frozenset[str] = frozenset()

    @property
    def reached(self) -> Lsn:
        """Up to where it has everything, tables that are held back included."""
        return self.of(())

    def of(self, tables: Collection[str], except_held: bool = False) -> Lsn:
        """Up to where it has these tables (none named: all), or all of them that are not held back."""
        concerned = [at for table, at in self.held.items() if not tables or table in tables]
        return self.flowing if except_held else min([self.flowing, *concerned])

    def given(self, table: str) -> bool:
        """Whether it is to hold a table."""
        return not self.tables or table in self.tables


NOWHERE = SinkPosition(ZERO_LSN)


def by_name(consumers: Iterable[Consumer]) -> dict[str, Consumer]:
    """The log's consumers by their names."""
    return {consumer.name: consumer for consumer in consumers}


def place_of(sink: str, tables: Sequence[TableId], consumers: Iterable[Consumer]) -> SinkPosition:
    """A sink's place. The trap: one that left the pipeline may have a place yet, and counts no more."""
    at = {name: consumer.reached for name, consumer in by_name(consumers).items()}
    names = {consumer_name(sink, table): str(table) for table in tables}
    prefix = _prefix(sink)
    held = {names.get(name, name): reached for name, reached in at.items() if name.startswith(prefix)}
    known = held if not tables else {table: reached for table, reached in held.items() if table in names.values()}
    return SinkPosition(at.get(sink, ZERO_LSN), known, frozenset(map(str, tables)))


def consumer_name(sink: str, table: TableId) -> str:
    """Of a table held back from a sink. A digest, since a table may be called anything and a consumer may not."""
    return f"{_prefix(sink)}{hashlib.sha256(str(table).encode()).hexdigest()[:16]}"


def _prefix(sink: str) -> str:
    return f"{sink}.held."
