"""Writes logical messages into the source's WAL: marks and requests reach the stream at their position in it."""

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
"""The transaction id makes the commit flush the message; `local` avoids waiting for a standby, which would prolong a
chunk."""


def write_message(connection: Connection, content: str, transactional: bool = True, prefix: str = PREFIX) -> Lsn:
    """Write a message and flush it; returns its LSN, which the stream sends with it.

    A transactional message arrives with its commit, any other at its own LSN.
    """
    with explained("Writing a message into the WAL"):
        row = connection.execute(_SAY, [transactional, prefix, content]).fetchone()
    assert row is not None
    return parse_lsn(row[1])
