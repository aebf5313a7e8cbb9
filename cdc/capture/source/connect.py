"""Connections to the source, and the meaning of their errors.

Every session sets TimeZone, DateStyle and the like, which change the text that Postgres sends, and `row_security=off`,
which turns a silently filtered read into an error. No message ever contains a password or a DSN.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import pq

from cdc.capture.rows.types import SESSION
from cdc.config.loopback import is_loopback
from cdc.config.settings import SourceSettings
from cdc.errors import SlotBusy, SlotLost, SourceError, SourceLost, SourceRefused

Connection = psycopg.Connection[tuple[Any, ...]]

CONNECT_SECONDS = 10
BRIEF_SECONDS = 20.0
_SESSION = {
    "row_security": "off",
    **SESSION,
    "idle_in_transaction_session_timeout": "0",
    "statement_timeout": "0",
}
"""Otherwise a role's own settings (ALTER ROLE … SET) could change the text of values, or end a long snapshot."""


def is_local(host: str) -> bool:
    """Whether traffic to this host stays on the machine: loopback, or a Unix socket's folder."""
    return host.startswith("/") or is_loopback(host)


def parameters(source: SourceSettings, application: str = "millrace", replication: bool = False) -> dict[str, Any]:
    """libpq's keywords for this source. They contain the password: pass them to `psycopg.connect` only."""
    found: dict[str, Any] = {
        "host": source.host,
        "port": source.port,
        "dbname": source.database,
        "user": source.user,
        "application_name": application,
        "sslmode": source.sslmode or ("prefer" if is_local(source.host) else "verify-full"),
        "client_encoding": "UTF8",
        "connect_timeout": CONNECT_SECONDS,
        # These detect a dead server in about half a minute; the default takes minutes, and the slot stays in use.
        "keepalives_idle": 10,
        "keepalives_interval": 5,
        "keepalives_count": 3,
        "tcp_user_timeout": 30_000,
        "options": " ".join(f"-c {name}={value}" for name, value in _SESSION.items()),
    }
    if source.password:
        found["password"] = source.password.reveal()
    if source.sslrootcert:
        found["sslrootcert"] = source.sslrootcert
    if replication:
        found["replication"] = "database"
    return found


def connect(source: SourceSettings, application: str = "millrace", replication: bool = False) -> Connection:
    """Open an autocommit session. Raises SourceLost if a retry may help, SourceRefused if it cannot."""
    with explained(f"Connecting to {address(source)}"):
        return psycopg.connect(**parameters(source, application, replication), autocommit=True)


@contextmanager
def brief(
    source: SourceSettings, application: str = "millrace", seconds: float = BRIEF_SECONDS
) -> Iterator[Connection]:
    """A session for a few quick queries: after `seconds` the connection is cut, and the query raises SourceLost.

    TCP detects a dead server, but not one that is stalled behind a proxy.
    """
    with connect(source, application) as connection, cut_after(connection, seconds):
        yield connection


@contextmanager
def cut_after(connection: Connection, seconds: float) -> Iterator[None]:
    """Cut the connection if the block takes longer than so many seconds."""
    link = socket.socket(fileno=os.dup(connection.fileno()))
    timer = threading.Timer(seconds, _cut, [link])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        link.close()


def _cut(link: socket.socket) -> None:
    with suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def address(source: SourceSettings) -> str:
    """The source's name in messages."""
    return f"database {source.database} at {source.host}:{source.port}"


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn psycopg's errors into those of `cdc.errors`, by SQLSTATE."""
    try:
        yield
    except psycopg.Error as error:
        raise explain(error, doing) from None


def explain(error: psycopg.Error, doing: str) -> SourceError:
    """The error of `cdc.errors` for one of psycopg's; `doing` begins the sentence."""
    if error.sqlstate is None:
        return _unreachable(error, doing)
    return explain_state(error.sqlstate, error.diag.message_primary or "", doing)


def explain_result(result: pq.abc.PGresult, doing: str) -> SourceError:
    """The error for a failed command of the replication protocol."""
    state = (result.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    primary = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
    return explain_state(state, primary, doing)


def explain_state(state: str, primary: str, doing: str) -> SourceError:
    """Decide by SQLSTATE. `primary` is the server's primary message: it names objects, never rows."""
    message = f"{doing} failed: {primary.strip() or 'no reason given'} [{state or 'no SQLSTATE'}]."
    for states, kind, remedy in _MEANINGS:
        if (state or "08").startswith(states):  # no SQLSTATE: the connection was lost
            return kind(message, remedy)
    return SourceRefused(message, "See the server's log; then run: millrace doctor")


_MEANINGS: tuple[tuple[tuple[str, ...], type[SourceError], str], ...] = (
    (("55006",), SlotBusy, "Another process uses this slot; stop it, or configure another source.slot."),
    (("58P01",), SlotLost, "The WAL it needs was removed. Start over with: millrace resync"),
    (("53300",), SourceLost, "The server has no free connection: raise max_connections or max_wal_senders."),
    (("53400",), SourceRefused, "Raise max_replication_slots (needs a restart), or drop an unused slot."),
    (("28", "42501"), SourceRefused, "Check user, password, pg_hba.conf and privileges; then run: millrace doctor"),
    (("3D000",), SourceRefused, "Check source.database."),
    (("22021", "22P05"), SourceRefused, "A stored value is not valid in the database's encoding; repair it there."),
    (("08", "40", "53", "57P", "58", "XX"), SourceLost, "It is retried automatically."),
)
"""SQLSTATE prefixes in order. 57014 (cancelled) is not among them: a cancel is deliberate."""

_REFUSALS = (
    "FATAL:  password authentication",
    "FATAL:  no pg_hba",
    "FATAL:  role ",
    "FATAL:  database ",
    "SSL",
    "certificate",
)


def _unreachable(error: psycopg.Error, doing: str) -> SourceError:
    """libpq has no SQLSTATE for a failed connection attempt: only its text tells the reason."""
    raw = str(error).strip().splitlines()
    lines = [line.strip() for line in raw if line.strip() and "Is the server running" not in line]
    last = lines[-1].rpartition(" failed: ")[2].removeprefix("FATAL:").strip() if lines else "no reason given"
    needs_password = error.pgconn is not None and error.pgconn.needs_password
    if needs_password or any(refusal in line for refusal in _REFUSALS for line in raw):
        remedy = "Check source.user, source.password, source.sslmode and the server's pg_hba.conf."
        if any("FATAL:  database " in line for line in raw):
            remedy = "Check source.database."
        return SourceRefused(f"{doing} failed: {last}.", remedy)
    return SourceLost(f"{doing} failed: {last}.", "Check that the server runs and can be reached from here.")
