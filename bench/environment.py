"""The servers and the database of a benchmark, removed afterwards."""

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


def benchmark_postgres() -> Postgres:
    """Postgres with enough WAL that no checkpoint runs during a measurement."""
    return Postgres(
        {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min", "wal_compression": "off"}
    )


@dataclass(frozen=True, slots=True)
class Database:
    """The measured database: its DSN, and `source`, the section of a pipeline file, which contains the password."""

    dsn: str
    source: Mapping[str, Any]

    def execute(self, *statements: str) -> None:
        """Run each statement in its own transaction."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def drop_stream(self, name: str) -> None:
        """Drop a slot and the publication of the same name."""
        self.execute(f"select pg_drop_replication_slot('{name}')", f"drop publication {name}")

    def wal_end(self) -> int:
        """The end of the WAL now."""
        with psycopg.connect(self.dsn) as connection:
            row = connection.execute("select pg_current_wal_insert_lsn()::text").fetchone()
        assert row is not None
        return int(parse_lsn(row[0]))


@dataclass(frozen=True, slots=True)
class Workspace:
    """A temporary folder and its servers."""

    home: Path
    _servers: Servers

    def up(self, *names: str) -> Mapping[str, Running]:
        """Start the servers that do not run yet."""
        return self._servers.up(names)

    def private(self) -> Path:
        """The folder with the servers' secrets."""
        return self._servers.private()

    def database(self) -> Database:
        """Create the measured database; call it once."""
        running, private = self.up("postgres")["postgres"], self.private()
        passfile = postgres.passfile(private)
        Database(postgres.dsn(running.port, passfile), {}).execute(f"create database {_NAME}")
        source = {"host": running.host, "port": running.port, "database": _NAME, "user": "postgres",
                  "password": postgres.password(private).reveal()}  # fmt: skip
        return Database(postgres.dsn(running.port, passfile, _NAME), source)


@contextlib.contextmanager
def workspace(prefix: str, *servers: Server) -> Iterator[Workspace]:
    """A workspace whose servers are not started yet; stops them and removes the folder at the end."""
    home = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=folder()))
    home.chmod(0o711)
    own = Servers(home, {server.name: server for server in servers}, tied=True)
    try:
        yield Workspace(home, own)
    finally:
        own.down()
        shutil.rmtree(home, ignore_errors=True)


def folder() -> Path:
    """The folder for the temporary folders of benchmarks."""
    base = cache_folder() / "bench"
    base.mkdir(mode=0o711, parents=True, exist_ok=True)
    return base
