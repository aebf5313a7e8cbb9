"""The names under which held tables keep their place in the log. Pure."""

import hashlib
from collections.abc import Iterable

from cdc.model import Lsn, TableId
from cdc.ports import Consumer


def consumer_name(sink: str, table: TableId) -> str:
    """Of a table held back from a sink. A digest, since a table may be called anything and a consumer may not."""
    return f"{sink}.held.{hashlib.sha256(str(table).encode()).hexdigest()[:16]}"


def held_from(sink: str, consumers: Iterable[Consumer]) -> Lsn | None:
    """The LSN up to which a sink has everything of the tables held back from it; None if none is held."""
    return min((item.reached for item in consumers if item.name.startswith(f"{sink}.held.")), default=None)
