"""The demo's pipeline: the shop's database, a least-privilege role, the publication and the pipeline file."""

import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

import psycopg
import yaml
from psycopg import sql

from cdc.config.settings import Settings
from cdc.durable_files import replace_unsynced, write_new
from cdc.model import Lsn, parse_lsn
from deploy.demo import shop
from deploy.local import ports, postgres
from deploy.local.servers import Servers

DATABASE = "shop"
_ROLE = "millrace"


def config_path(home: Path) -> Path:
    """The demo's pipeline file."""
    return home / "millrace.yaml"


def connect(servers: Servers, dbname: str = DATABASE) -> psycopg.Connection:
    """A connection as the shop's owner."""
    port = servers.status()["postgres"].port
    return psycopg.connect(postgres.dsn(port, postgres.passfile(servers.private()), dbname), autocommit=True)


def provision(servers: Servers, opensearch_port: int) -> Path:
    """Create the database, role, tables and publication that do not exist yet, and write the pipeline file."""
    password = create_database(servers, DATABASE)
    with connect(servers) as owner:
        shop.create(owner)
        publish(owner, shop.TABLES)
    return _write(servers, password, opensearch_port)


def create_database(servers: Servers, name: str) -> str:
    """Create a database and the pipeline's role, where they do not exist yet; returns the role's password."""
    password = _password(servers.private() / "pipeline")
    with connect(servers, "postgres") as admin:
        if not admin.execute("select 1 from pg_database where datname = %s", (name,)).fetchone():
            admin.execute(sql.SQL("create database {}").format(sql.Identifier(name)))
        _role(admin, password)
    return password


def publish(owner: psycopg.Connection, names: Iterable[str]) -> None:
    """Let the pipeline's role read these tables of schema public, and create their publication."""
    tables = sql.SQL(", ").join(sql.Identifier("public", name) for name in names)
    owner.execute(sql.SQL("grant select on {} to {}").format(tables, sql.Identifier(_ROLE)))
    if not owner.execute("select 1 from pg_publication where pubname = 'millrace'").fetchone():
        owner.execute(
            sql.SQL("create publication millrace for table {} with (publish_via_partition_root = true)").format(tables)
        )


def source_lsn(settings: Settings) -> Lsn:
    """The LSN of the source after everything that was committed before this call."""
    source = settings.source
    with psycopg.connect(
        host=source.host,
        port=source.port,
        dbname=source.database,
        user=source.user,
        password=source.password.reveal(),
        autocommit=True,
    ) as connection:
        row = connection.execute("select pg_current_wal_lsn()").fetchone()
    assert row is not None
    return parse_lsn(str(row[0]))


def opensearch_port(servers: Servers) -> int:
    """The port of OpenSearch, chosen before it runs, so that the pipeline can start at the same time."""
    if running := servers.status().get("opensearch"):
        return running.port
    path = config_path(servers.home)
    if path.exists():
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))["sinks"]
        last = next(int(sink["url"].rpartition(":")[2]) for sink in listed if sink["kind"] == "opensearch")
        if ports.free(last):
            return last
    return ports.pick()


def _password(path: Path) -> str:
    if path.exists():
        return path.read_text(encoding="utf-8")
    word = secrets.token_urlsafe(24)
    write_new(path, word.encode())
    return word


def _role(owner: psycopg.Connection, password: str) -> None:
    verb = "alter" if owner.execute("select 1 from pg_roles where rolname = %s", (_ROLE,)).fetchone() else "create"
    options = sql.SQL(" role {} login replication password {}").format(sql.Identifier(_ROLE), sql.Literal(password))
    owner.execute(sql.SQL(verb) + options)


def _write(servers: Servers, password: str, opensearch_port: int) -> Path:
    running = servers.status()
    lake = servers.home / "lake"
    facts: Mapping[str, object] = {
        "state": str(servers.home / "state"),
        "source": {
            "host": "127.0.0.1",
            "port": running["postgres"].port,
            "database": DATABASE,
            "user": _ROLE,
            "password": password,
            "tables": [f"public.{name}" for name in shop.TABLES],
        },
        "sinks": [
            {"kind": "delta", "path": str(lake)},
            {"kind": "opensearch", "url": f"http://127.0.0.1:{opensearch_port}", "replicas": 0},
            {"kind": "redis", "url": f"redis://127.0.0.1:{running['redis'].port}/0"},
        ],
        "http": {"port": _http_port(config_path(servers.home))},
    }
    path = config_path(servers.home)
    replace_unsynced(path, yaml.safe_dump(facts, sort_keys=False).encode())
    return path


def _http_port(path: Path) -> int:
    if path.exists():
        last = int(yaml.safe_load(path.read_text(encoding="utf-8"))["http"]["port"])
        if ports.free(last):
            return last
    return ports.pick()
