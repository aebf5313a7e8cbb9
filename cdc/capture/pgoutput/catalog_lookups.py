"""What the decoder must ask the source for: types that are not Postgres's own, and keys of tables with identity FULL.

Rare, so a connection is opened for each question instead of being kept.
"""

from collections.abc import Collection

from cdc.capture.source import catalog
from cdc.capture.source.connect import brief
from cdc.config.settings import SourceSettings
from cdc.model import PgType


class CatalogLookups:
    """Asks the source's catalog as it is now: a type that was dropped since is taken for text of that oid."""

    def __init__(self, source: SourceSettings) -> None:
        self._source = source

    def type_of(self, oid: int) -> PgType:
        """A type by oid."""
        with brief(self._source) as connection:
            return catalog.types(connection, [oid]).get(oid) or PgType(oid, f"type {oid}")

    def key_of(self, oid: int) -> Collection[str]:
        """The key's columns of a table with identity FULL; empty where its whole row is its key."""
        with brief(self._source) as connection:
            found = catalog.table(connection, oid)
        return () if found is None else found.key
