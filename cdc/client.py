"""Reading your own writes: a program commits, waits until a store holds the commit, then reads the store.

Needs nothing but the standard library and the program's own connection to Postgres. See docs/http.md.
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
_MARGIN = 5.0  # the daemon answers at the end of its own wait; only then has the connection a reason to be silent


class Stale(MillraceError):
    """The store was not there in time: what it holds may be older than the write."""

    transient = True


class _Cursor(Protocol):
    def fetchone(self) -> Any: ...  # noqa: ANN401 - the driver's row


class PostgresConnection(Protocol):
    """What is needed of a connection: psycopg's has it."""

    @property
    def info(self) -> Any: ...  # noqa: ANN401

    def execute(self, query: Any, params: Any = None) -> _Cursor: ...  # noqa: ANN401


class Freshness:
    """Waits on one daemon for some of its sinks (none named: for all), and for some tables (none named: for all, or
    with `except_waiting` for all but those that wait). One thread at a time: it keeps a connection.

    The trap: a store that has reached a position may lack something even so; `excepted` says what.
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
        """What the last answer does not cover: tables that wait or were skipped, dead letters, rows not read yet."""
        self._asked = [*(("sink", name) for name in sinks), *(("table", name) for name in tables)]
        self._asked += [("except_waiting", "true")] if except_waiting else []
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    def after(self, connection: PostgresConnection, timeout: float = 10.0, asynchronous: bool = False) -> str:
        """Return once the sinks hold everything that this connection has committed; returns the position.

        Raises Stale when out of time, and ConfigError inside an open transaction, whose writes no position covers yet.
        """
        wanted = self.position(connection, asynchronous)
        self.wait(wanted, timeout)
        return wanted

    @staticmethod
    def position(connection: PostgresConnection, asynchronous: bool = False) -> str:
        """Where the WAL ends, at or behind the connection's last commit. Call it after the commit.

        `asynchronous` takes the insert position, which covers a commit that was not waited for (`synchronous_commit`
        off for that transaction). It may lie behind bytes that nobody flushes for some seconds, so it is not the rule.
        """
        idle = 0  # libpq's PQTRANS_IDLE
        if connection.info.transaction_status != idle:
            raise ConfigError("The connection is inside a transaction.", "Commit first, then ask for the position.")
        row = connection.execute(_POSITION, (asynchronous,)).fetchone()
        _end_reading(connection)
        return str(row[0])

    def wait(self, lsn: str, timeout: float = 10.0) -> None:
        """Return once the sinks hold everything up to that position, but for what `excepted` says then.

        Raises Stale when out of time.
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
        """One request; a connection that the daemon closed meanwhile is opened again, once."""
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
        """Let the connection go."""
        self._daemon.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _end_reading(connection: PostgresConnection) -> None:
    """A connection without autocommit has begun a transaction with our question; end it, or the next is refused."""
    if connection.info.transaction_status != 0:
        connection.execute("commit")


def _object(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
