"""Writing into the source's WAL: the way by which marks and requests reach the stream in their place."""

from typing import Any

import psycopg

from cdc.capture.source.connect import explained
from cdc.model import Lsn, parse_lsn

Connection = psycopg.Connection[tuple[Any, ...]]
PREFIX = "millrace"

_SAY = """
select set_config('synchronous_commit', 'local', true), pg_logical_emit_message(%s, %s, %s)::text,
       pg_current_xact_id()
"""
"""The transaction id makes the commit flush what was said; `local` keeps it from waiting for a standby, which would
stretch a chunk over that wait."""


def say(connection: Connection, content: str, transactional: bool = True, prefix: str = PREFIX) -> Lsn:
    """Write a message and have it flushed; returns its LSN, which the stream tells with it.

    A transactional one comes with its commit; the other kind has its place at its own LSN.
    """
    with explained("Writing a message into the WAL"):
        row = connection.execute(_SAY, [transactional, prefix, content]).fetchone()
    assert row is not None
    return parse_lsn(row[1])
