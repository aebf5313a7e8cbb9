"""What the decoder must ask the source for: types that are not Postgres's own, and keys of tables with identity FULL.

Rare, so a connection is opened for each question instead of being kept.
"""

from collections.abc import Collection

from cdc.capture import catalog
from cdc.capture.connect import brief, explained
from cdc.config import SourceSettings
from cdc.model import PgType

_KEY = """
select a.attname::text from pg_catalog.pg_index i
  join pg_catalog.pg_attribute a on a.attrelid = i.indrelid and a.attnum = any(i.indkey)
 where i.indrelid = %s and i.indisprimary order by a.attnum
"""


class Lookups:
    """Asks the source's catalog as it is now: a type that was dropped since is taken for text of that oid."""

    def __init__(self, source: SourceSettings) -> None:
        self._source = source

    def type_of(self, oid: int) -> PgType:
        """A type by oid."""
        with brief(self._source) as connection:
            return catalog.types(connection, [oid]).get(oid) or PgType(oid, f"type {oid}")

    def key_of(self, oid: int) -> Collection[str]:
        """The primary key's columns of a table; empty if it has none."""
        with brief(self._source) as connection, explained("Reading the catalog"):
            return tuple(row[0] for row in connection.execute(_KEY, (oid,)))
