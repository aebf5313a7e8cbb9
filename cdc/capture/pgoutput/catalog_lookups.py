"""Catalog queries of the decoder: types that are not built in, and keys of tables with replica identity FULL.

They are rare, so each one opens its own connection.
"""

from collections.abc import Collection

from cdc.capture.source import catalog
from cdc.capture.source.connect import brief
from cdc.config.settings import SourceSettings
from cdc.model import PgType


class CatalogLookups:
    """Reads the source's current catalog: a type that has been dropped since counts as text."""

    def __init__(self, source: SourceSettings) -> None:
        self._source = source

    def type_of(self, oid: int) -> PgType:
        """A type by oid."""
        with brief(self._source) as connection:
            return catalog.types(connection, [oid]).get(oid) or PgType(oid, f"type {oid}")

    def key_of(self, oid: int) -> Collection[str]:
        """The key columns of a table with identity FULL; empty: the whole row is the key."""
        with brief(self._source) as connection:
            found = catalog.table(connection, oid)
        return () if found is None else found.key
