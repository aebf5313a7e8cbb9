"""A slot read through SQL: real pgoutput messages without a replication connection."""

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.rows.types import SESSION
from cdc.capture.source import catalog
from cdc.model import PgType, parse_lsn
from tests.corpus.pgoutput_encoder import frame
from tests.corpus.registry import Registry

Connection = psycopg.Connection[tuple[Any, ...]]
PINNED = " ".join(f"-c {name}={value}" for name, value in SESSION.items())

_QUERY = "select lsn::text, data from pg_logical_slot_get_binary_changes('feed', null, null, variadic %s)"


class Feed:
    """A publication and a slot of one's own, read with pinned settings."""

    def __init__(self, connection: Connection, tables: Sequence[str], **options: str) -> None:
        self.connection = connection
        self._options = {"proto_version": "1", "publication_names": "feed", "messages": "on", **options}
        named = sql.SQL(", ").join(sql.SQL(name) for name in tables)
        connection.execute(sql.SQL("create publication feed for table {}").format(named))
        connection.execute("select pg_create_logical_replication_slot('feed', 'pgoutput')")

    def frames(self, query: str = _QUERY, **options: str) -> list[bytes]:
        """Everything since the last call, as the replication connection would have brought it."""
        arguments = [text for pair in {**self._options, **options}.items() for text in pair]
        found = self.connection.execute(query.encode(), (arguments,))
        return [frame(data, parse_lsn(lsn)) for lsn, data in found]

    def decoder(self, **options: Any) -> Decoder:
        """A decoder that asks this database."""
        return Decoder(Registry(), self._type, self._key, **options)

    def _type(self, oid: int) -> PgType:
        return catalog.types(self.connection, [oid])[oid]

    def _key(self, oid: int) -> list[str]:
        query = (
            "select attname::text from pg_index join pg_attribute on attrelid = indrelid and attnum = any(indkey)"
            " where indrelid = %s and indisprimary"
        )
        return [name for (name,) in self.connection.execute(query, (oid,))]
