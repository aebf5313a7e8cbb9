"""Servers of a bench's own and the database that it works on, gone afterwards."""

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from cdc.artifacts.folders import cache_folder
from cdc.model import parse_lsn
from deploy.local import postgres
from deploy.local.postgres import Postgres
from deploy.local.server import Running, Server
from deploy.local.servers import Servers

_NAME = "bench"


def roomy_postgres() -> Postgres:
    """No checkpoint in the middle of a measurement."""
    return Postgres(
        {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min", "wal_compression": "off"}
    )


@dataclass(frozen=True, slots=True)
class Database:
    """Where the work is done, as a client names it and as a pipeline does. `source` holds the password."""

    dsn: str
    source: Mapping[str, Any]

    def execute(self, *statements: str) -> None:
        """Each in its own transaction."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def drop_stream(self, name: str) -> None:
        """A slot and the publication of the same name."""
        self.execute(f"select pg_drop_replication_slot('{name}')", f"drop publication {name}")

    def wal_end(self) -> int:
        """Where the WAL ends now."""
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return int(parse_lsn(row[0]))


@dataclass(frozen=True, slots=True)
class Ground:
    """A folder and the servers that may run in it."""

    home: Path
    _servers: Servers

    def up(self, *names: str) -> Mapping[str, Running]:
        """Start those that do not run yet."""
        return self._servers.up(names)

    def database(self) -> Database:
        """Make the one that is measured; call once."""
        running, private = self.up("postgres")["postgres"], self._servers.private()
        passfile = postgres.passfile(private)
        Database(postgres.dsn(running.port, passfile), {}).execute(f"create database {_NAME}")
        source = {"host": running.host, "port": running.port, "database": _NAME, "user": "postgres",
                  "password": postgres.password(private).reveal()}  # fmt: skip
        return Database(postgres.dsn(running.port, passfile, _NAME), source)


@contextlib.contextmanager
def ground(prefix: str, *servers: Server) -> Iterator[Ground]:
    """Nothing runs yet; whatever was started ends with it."""
    home = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=folder()))
    home.chmod(0o711)
    own = Servers(home, {server.name: server for server in servers}, tied=True)
    try:
        yield Ground(home, own)
    finally:
        own.down()
        shutil.rmtree(home, ignore_errors=True)


def folder() -> Path:
    """Below which every bench makes its own."""
    base = cache_folder() / "bench"
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    return base
