"""`deploy.local` with real servers: found again, healed, stopped without a trace."""

import json
import os
import shutil
import signal
import socket
import subprocess
import textwrap
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
import redis

from cdc.artifacts import java
from cdc.artifacts.folders import cache_folder
from cdc.errors import ConfigError, EnvironmentFault
from deploy.local import postgres
from deploy.local.opensearch import OpenSearch
from deploy.local.postgres import Postgres
from deploy.local.process import Identity, alive, inside
from deploy.local.redis import Redis
from deploy.local.server import Launch, Running, Server, Site
from deploy.local.servers import Servers
from tests.fix_processes import RunProgram, wait_until
from tests.fix_servers import Database, LocalServer, MakePostgres, opensearch_request

_DEPLOY = Path(__file__).parents[3] / "deploy"
BOTH = ("postgres", "redis")


@pytest.fixture
def home(session_home: Path, tmp_path: Path) -> Iterator[Path]:
    """A state folder that the servers' user can enter; whatever a test leaves running there is ended."""
    folder = session_home / tmp_path.name
    folder.mkdir(parents=True)
    yield folder
    Servers(folder).down()


def identities(running: dict[str, Running]) -> set[Identity]:
    return {Identity(each.pid, each.started) for each in running.values()}


def test_second_up_finds_the_running_servers(home: Path) -> None:
    first = Servers(home).up(BOTH)
    assert Servers(home).up(BOTH) == first
    assert Servers(home).status() == first


def test_killed_servers_come_back_with_their_data_on_the_same_ports(home: Path) -> None:
    servers = Servers(home)
    first = servers.up(BOTH)
    redis.Redis(port=first["redis"].port).set("k", "v")
    with psycopg.connect(first["postgres"].address, autocommit=True) as connection:
        connection.execute("create table t as select 7 as a")
    for running in first.values():
        os.kill(running.pid, signal.SIGKILL)
    wait_until(lambda: not servers.status())
    second = servers.up(BOTH)
    assert {name: it.port for name, it in second.items()} == {name: it.port for name, it in first.items()}
    assert redis.Redis(port=second["redis"].port).get("k") == b"v"
    with psycopg.connect(second["postgres"].address) as connection:
        assert connection.execute("select a from t").fetchall() == [(7,)]


def test_down_leaves_no_process_and_keeps_the_data(home: Path) -> None:
    servers = Servers(home)
    running = servers.up(BOTH)
    assert servers.down() == ["redis", "postgres"]
    assert not any(alive(identity) for identity in identities(running))
    assert list(inside(home)) == []
    assert (home / "postgres" / "cluster" / "PG_VERSION").exists()
    assert servers.down() == []


def test_down_stops_a_server_of_which_only_the_caller_of_up_knew(home: Path) -> None:
    running = Servers(home, {"redis-2": Redis(name="redis-2")}).up(["redis-2"])
    assert Servers(home).down() == ["redis-2"]
    assert not any(alive(identity) for identity in identities(running))


def test_down_finds_a_server_whose_record_was_never_written(home: Path) -> None:
    servers = Servers(home)
    running = servers.up(["redis"])
    (home / "records" / "redis.json").unlink()
    assert servers.down() == []
    assert not any(alive(identity) for identity in identities(running))


def test_requested_port_that_is_taken_is_refused_by_name(home: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(EnvironmentFault, match=f"Port {port}, requested for redis, is in use"):
            Servers(home).up(["redis"], {"redis": port})
    assert Servers(home).status() == {}


def test_remembered_port_that_is_taken_is_replaced(home: Path) -> None:
    servers = Servers(home)
    before = servers.up(["redis"])["redis"].port
    servers.down()
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", before))
        listener.listen()
        assert servers.up(["redis"])["redis"].port != before


def test_unknown_server_is_refused_before_anything_starts(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"no local server `redsi`.*redis"):
        Servers(home).up(["postgres", "redsi"])
    assert Servers(home).status() == {}


def test_failure_of_one_server_stops_the_others_again(home: Path) -> None:
    servers = Servers(home, {"postgres": Postgres({"shared_buffers": "nonsense"}), "redis": _redis()})
    with pytest.raises(EnvironmentFault, match=r"postgres ended while starting.*postgres\.log"):
        servers.up(BOTH)
    assert servers.status() == {}
    assert list(inside(home)) == []


def test_server_robbed_of_its_port_gets_another(home: Path) -> None:
    class Robbed(Postgres):
        """Somebody takes the port between the choice and the start, once."""

        def prepare(self, site: Site) -> Launch:
            launch = super().prepare(site)
            if not thieves:
                thief = socket.create_server(("127.0.0.1", site.port))
                thieves.append(thief)
            return launch

    thieves: list[socket.socket] = []
    running = Servers(home, {"postgres": Robbed()}).up(["postgres"])["postgres"]
    assert running.port != thieves[0].getsockname()[1]
    thieves[0].close()


def _redis() -> Server:
    from deploy.local.redis import Redis

    return Redis()


def test_interrupted_up_leaves_nothing_running(home: Path, run_program: RunProgram) -> None:
    code = f"""
        from pathlib import Path
        from deploy.local.postgres import Postgres
        from deploy.local.redis import Redis
        from deploy.local.servers import Servers
        class Never(Redis):
            def ready(self, site):
                return False
        servers = Servers(Path({str(home)!r}), {{"postgres": Postgres(), "redis": Never()}}, report=print)
        servers.up(["postgres", "redis"])
    """
    program = run_program("-c", textwrap.dedent(code))
    wait_until(lambda: "postgres is ready" in program.said())
    program.send(signal.SIGINT)
    assert program.wait(20) != 0
    assert list(inside(home)) == []


def test_up_that_was_killed_is_completed_by_the_next_one(home: Path, run_program: RunProgram) -> None:
    code = f"""
        import os, signal
        from pathlib import Path
        from deploy.local.servers import Servers
        def report(line):
            if line == "starting redis":
                os.kill(os.getpid(), signal.SIGKILL)
        Servers(Path({str(home)!r}), report=report).up(["postgres", "redis"])
    """
    run_program("-c", textwrap.dedent(code)).wait(30)
    left = Servers(home).status()
    assert list(left) == ["postgres"]
    running = Servers(home).up(BOTH)
    assert running["postgres"].pid == left["postgres"].pid
    with psycopg.connect(running["postgres"].address) as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_password_is_ours_alone_and_in_no_address(home: Path) -> None:
    servers = Servers(home)
    running = servers.up(["postgres"])["postgres"]
    word = postgres.password(servers.private()).reveal()
    assert postgres.passfile(servers.private()).stat().st_mode & 0o777 == 0o600
    assert len(word) > 20
    assert word not in running.address
    assert word not in (home / "records" / "postgres.json").read_text()
    assert not (running.data / "password").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look for servers that run as root")
def test_servers_do_not_run_as_root(home: Path) -> None:
    for running in Servers(home).up(BOTH).values():
        assert Path(f"/proc/{running.pid}").stat().st_uid != 0


def test_postgres_of_the_wheel_streams_logical_changes(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_system_folders", list)
    running = Servers(home).up(["postgres"])["postgres"]
    with psycopg.connect(running.address, autocommit=True) as connection:
        found = connection.execute("select pg_create_logical_replication_slot('s', 'pgoutput') is not null").fetchone()
        assert found == (True,)
        assert connection.info.server_version // 10000 == 16


def test_opensearch_keeps_documents_over_a_crash(opensearch_server: LocalServer, index_prefix: str) -> None:
    opensearch_request(opensearch_server, "PUT", f"/{index_prefix}/_doc/1", {"name": "miller"})
    opensearch_server.kill()
    opensearch_server.start()
    found = wait_until(lambda: opensearch_request(opensearch_server, "GET", f"/{index_prefix}/_doc/1"))
    assert found["_source"] == {"name": "miller"}


def test_opensearch_runs_scripts_percolator_and_reindex(opensearch_server: LocalServer, index_prefix: str) -> None:
    def ask(method: str, path: str, body: object = None) -> dict[str, object]:
        return opensearch_request(opensearch_server, method, f"/{index_prefix}{path}", body)

    mapping = {"properties": {"query": {"type": "percolator"}, "name": {"type": "text"}, "n": {"type": "long"}}}
    ask("PUT", "_a", {"mappings": mapping})
    ask("PUT", "_a/_doc/1?refresh=true", {"query": {"match": {"name": "miller"}}, "n": 1})
    ask("POST", "_a/_update/1?refresh=true", {"script": {"source": "ctx._source.n += params.by", "params": {"by": 4}}})
    matched = ask("POST", "_a/_search", {"query": {"percolate": {"field": "query", "document": {"name": "a miller"}}}})
    assert '"n": 5' in json.dumps(matched)
    copy = {"source": {"index": f"{index_prefix}_a"}, "dest": {"index": f"{index_prefix}_b"}}
    assert opensearch_request(opensearch_server, "POST", "/_reindex", copy)["total"] == 1


def test_opensearch_runs_on_the_java_of_the_wheel(
    home: Path, monkeypatch: pytest.MonkeyPatch, session_servers: Servers
) -> None:
    session_servers.down(["opensearch"])
    real = java.find
    monkeypatch.setattr(java, "find", lambda oldest: None if oldest >= 21 else real(oldest))
    server = LocalServer(Servers(home, {"opensearch": OpenSearch()}, tied=True), "opensearch")
    assert Path(f"/proc/{server.pid}/exe").readlink().is_relative_to(cache_folder())
    opensearch_request(server, "PUT", "/a/_doc/1?refresh=true", {"name": "miller"})
    assert opensearch_request(server, "GET", "/a/_search?q=name:miller")["hits"]["total"]["value"] == 1
    server.stop()


@pytest.mark.skipif(shutil.which("psql") is None, reason="psql is not on this machine")
def test_composition_prepares_an_empty_database(private_postgres: MakePostgres, tmp_path: Path) -> None:
    server = private_postgres()
    server.execute("create database shop")
    for file in ("demo/shop.sql", "postgres/role.sql"):
        shutil.copy(_DEPLOY / file, tmp_path)
    given = {"POSTGRES_USER": "postgres", "POSTGRES_DB": "shop", "MILLRACE_PASSWORD": "it's", "SQL": str(tmp_path)}
    reached = {"PGHOST": server.host, "PGPORT": str(server.port), "PGPASSWORD": server.password}
    subprocess.run(["bash", _DEPLOY / "docker/postgres-init.sh"], env={**os.environ, **given, **reached}, check=True)
    with psycopg.connect(server.dsn("shop"), user="millrace", password="it's") as connection:
        published = connection.execute("select count(*) from pg_publication_tables where pubname = 'millrace'")
        assert published.fetchone() == (6,)
        assert connection.execute("select count(*) from orders").fetchone() == (0,)


@pytest.mark.kafka
def test_debezium_writes_a_row_of_our_postgres_to_our_kafka(
    connect_server: LocalServer, kafka_server: LocalServer, database: Database, topic_prefix: str
) -> None:
    database.execute("create table t (id int primary key)", "insert into t values (7)")
    config = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "database.hostname": database.server.host,
        "database.port": str(database.server.port),
        "database.user": "postgres",
        "database.password": database.server.password,
        "database.dbname": database.name,
        "topic.prefix": topic_prefix,
        "plugin.name": "pgoutput",
        "slot.name": topic_prefix,
        "topic.creation.default.replication.factor": "1",
        "topic.creation.default.partitions": "1",
    }
    put_json(f"{connect_server.url}/connectors/{topic_prefix}/config", config)
    try:
        message = first_message(kafka_server.url, f"{topic_prefix}.public.t")
    finally:
        delete(f"{connect_server.url}/connectors/{topic_prefix}")
    assert json.loads(message)["after"] == {"id": 7}


def put_json(url: str, body: object) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="PUT")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


def delete(url: str) -> None:
    request = urllib.request.Request(url, method="DELETE")
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60).close()


def first_message(bootstrap: str, topic: str) -> bytes:
    from confluent_kafka import Consumer

    settings = {"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest"}
    consumer = Consumer({**settings, "topic.metadata.refresh.interval.ms": 500})
    consumer.subscribe([topic])

    def poll() -> bytes | None:
        message = consumer.poll(0.5)
        return None if message is None or message.error() else message.value()

    value = wait_until(poll, 60)
    consumer.close()
    assert value is not None
    return value
