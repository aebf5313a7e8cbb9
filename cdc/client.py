"""Read your own writes: a program commits, waits until a sink has applied the commit, then reads the store.

Needs only the standard library and the program's own connection to Postgres. See docs/http.md.
"""

import http.client
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self
from urllib.parse import urlencode, urlsplit

from cdc.errors import ConfigError, Lost, MillraceError

_POSITION = (
    "select case when %s or current_setting('synchronous_commit') = 'off' then pg_current_wal_insert_lsn()"
    " else pg_current_wal_lsn() end::text"
)
_MARGIN = 5.0  # the daemon answers at the end of its wait; the connection must not time out before


class Stale(MillraceError):
    """A sink did not apply the write in time: the store may have older data."""

    transient = True


class _Cursor(Protocol):
    def fetchone(self) -> Any: ...  # noqa: ANN401 - the driver's row


class PostgresConnection(Protocol):
    """The required part of a psycopg connection."""

    @property
    def info(self) -> Any: ...  # noqa: ANN401

    def execute(self, query: Any, params: Any = None) -> _Cursor: ...  # noqa: ANN401


class Freshness:
    """Waits for sinks of one daemon (none named: all) to apply tables (none named: all, or with `except_waiting` all
    that are not waiting). Not for two threads at once: it keeps a connection.

    The trap: a sink that has reached a position may still lack changes; `excepted` says which.
    """

    def __init__(
        self, url: str, *sinks: str, token: str = "", tables: Sequence[str] = (), except_waiting: bool = False
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"{parts.scheme or 'The address'} is not http or https.", "http://127.0.0.1:8080")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._daemon = kind(parts.hostname, parts.port)
        self._path = f"{parts.path.rstrip('/')}/v1/wait"
        self.excepted: tuple[Mapping[str, Any], ...] = ()
        """What the last answer does not cover: tables that wait or were skipped, dead letters, rows still to be
        read."""
        self._asked = [*(("sink", name) for name in sinks), *(("table", name) for name in tables)]
        self._asked += [("except_waiting", "true")] if except_waiting else []
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def after(self, connection: PostgresConnection, timeout: float = 10.0, asynchronous: bool = False) -> str:
        """Wait until the sinks have applied everything that this connection has committed; returns the position.

        Raises Stale at the timeout, and ConfigError inside an open transaction, whose writes have no position yet.
        """
        wanted = self.position(connection, asynchronous)
        self.wait(wanted, timeout)
        return wanted

    @staticmethod
    def position(connection: PostgresConnection, asynchronous: bool = False) -> str:
        """The end of the WAL, at or after the connection's last commit. Call it after the commit.

        `asynchronous` takes the insert position, which also covers a commit with `synchronous_commit` off. Postgres may
        flush up to that position only seconds later, so it is not the default.
        """
        idle = 0  # libpq's PQTRANS_IDLE
        if connection.info.transaction_status != idle:
            raise ConfigError("The connection is inside a transaction.", "Commit first, then ask for the position.")
        row = connection.execute(_POSITION, (asynchronous,)).fetchone()
        _end_reading(connection)
        return str(row[0])

    def wait(self, lsn: str, timeout: float = 10.0) -> None:
        """Wait until the sinks have applied everything up to that position, except what `excepted` lists afterwards.

        Raises Stale at the timeout.
        """
        query = urlencode([("lsn", lsn), ("timeout", f"{timeout:g}"), *self._asked])
        status, body = self._get(f"{self._path}?{query}", timeout + _MARGIN)
        self.excepted = tuple(item for item in body.get("except", ()) if isinstance(item, dict))
        if status == 504:
            behind = ", ".join(body.get("behind", ()))
            waiting = "".join(f" {item['message']}." for item in self.excepted if item.get("kind") == "waiting")
            raise Stale(f"{behind or 'A sink'} did not reach {lsn} in {timeout:g} s.{waiting}", "See: millrace status")
        if status != 200:
            raise ConfigError(f"The daemon refused to wait ({status}): {body.get('error', 'no reason given')}.")

    def _get(self, target: str, timeout: float) -> tuple[int, dict[str, Any]]:
        """Send one request. Reconnects once if the daemon has closed the connection."""
        for last in (False, True):
            try:
                self._daemon.timeout = timeout
                if self._daemon.sock is not None:
                    self._daemon.sock.settimeout(timeout)
                self._daemon.request("GET", target, headers=self._headers)
                answer = self._daemon.getresponse()
                return answer.status, _object(answer.read())
            except (http.client.HTTPException, OSError) as error:
                self._daemon.close()
                if last or isinstance(error, TimeoutError):
                    raise Lost(f"The daemon does not answer: {type(error).__name__}.", "Is it running?") from None
        raise AssertionError("unreachable")

    def close(self) -> None:
        """Close the connection."""
        self._daemon.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end_reading(connection: PostgresConnection) -> None:
    """Without autocommit the query has begun a transaction: end it, or the next call is refused."""
    if connection.info.transaction_status != 0:
        connection.execute("commit")


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
