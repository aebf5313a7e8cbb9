"""The fixtures that every other test leans on."""

import contextlib
import os
import socket
import subprocess
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from deploy.local.process import identify
from tests.fix_processes import RunProgram, is_stopped, wait_until
from tests.fix_proxy import MakeProxy
from tests.fix_servers import (
    Database,
    LocalServer,
    MakeDisk,
    MakePostgres,
    MakeRedis,
    PostgresServer,
    fresh_database,
    opensearch_request,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_database_takes_logical_slots_and_is_gone_afterwards(postgres_server: PostgresServer) -> None:
    with fresh_database(postgres_server) as database, database.connect() as connection:
        connection.execute("select pg_create_logical_replication_slot(%s, 'pgoutput')", (database.name,))
    with postgres_server.connect() as connection:
        left = connection.execute("select 1 from pg_database where datname = %s", (database.name,)).fetchone()
        slot = connection.execute(
            "select 1 from pg_replication_slots where slot_name = %s", (database.name,)
        ).fetchone()
    assert (left, slot) == (None, None)


def test_immediate_restart_keeps_committed_rows_and_the_port(database: Database) -> None:
    database.execute("create table t (a int)", "insert into t values (1)")
    port, pid = database.server.port, database.server.pid
    database.server.restart("immediate")
    assert (database.server.port, database.server.pid == pid) == (port, False)
    with database.connect() as connection:
        assert connection.execute("select a from t").fetchall() == [(1,)]


def test_a_wrong_password_is_refused(postgres_server: PostgresServer) -> None:
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        psycopg.connect(host=postgres_server.host, port=postgres_server.port, user="postgres", password="wrong")


def test_private_postgres_has_its_own_settings_and_identity(
    private_postgres: MakePostgres, postgres_server: PostgresServer
) -> None:
    private = private_postgres({"wal_level": "replica"})
    query = "select current_setting('wal_level'), system_identifier from pg_control_system()"
    with private.connect() as one, postgres_server.connect() as other:
        (level, identity), (shared_level, shared_identity) = (
            one.execute(query).fetchone() or ("", 0),
            other.execute(query).fetchone() or ("", 0),
        )
    assert (level, shared_level) == ("replica", "logical")
    assert identity != shared_identity


def test_redis_keeps_its_keys_over_a_crash(private_redis: MakeRedis) -> None:
    server = private_redis({"maxmemory": "50mb"})
    client = redis.Redis(port=server.port)
    client.set("k", "v")
    server.kill()
    server.start()
    assert client.get("k") == b"v"


def test_redis_databases_of_two_tests_are_apart(redis_url: str, redis_server: LocalServer) -> None:
    redis.Redis.from_url(redis_url).set("k", "v")
    assert redis.Redis(port=redis_server.port, db=0).get("k") is None


def test_opensearch_indexes_and_finds(opensearch_server: LocalServer, index_prefix: str) -> None:
    path = f"/{index_prefix}_a/_doc/1?refresh=true&version=7&version_type=external"
    opensearch_request(opensearch_server, "PUT", path, {"name": "miller"})
    found = opensearch_request(opensearch_server, "GET", f"/{index_prefix}_a/_search?q=name:miller")
    assert found["hits"]["total"]["value"] == 1


@pytest.mark.kafka
def test_kafka_gives_back_what_was_produced(kafka_server: LocalServer, topic_prefix: str) -> None:
    from confluent_kafka import Consumer, Producer
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    admin = AdminClient({"bootstrap.servers": kafka_server.url})
    admin.create_topics([NewTopic(topic_prefix, 1)])[topic_prefix].result(30)
    producer = Producer({"bootstrap.servers": kafka_server.url, "enable.idempotence": True})
    producer.produce(topic_prefix, b"v", b"k")
    assert producer.flush(30) == 0
    consumer = Consumer(
        {"bootstrap.servers": kafka_server.url, "group.id": topic_prefix, "auto.offset.reset": "earliest"}
    )
    consumer.subscribe([topic_prefix])
    message = wait_until(lambda: consumer.poll(0.5))
    consumer.close()
    assert message is not None
    assert (message.key(), message.value()) == (b"k", b"v")


@pytest.mark.spark
def test_spark_writes_and_reads_a_delta_table(spark: "SparkSession", tmp_path: Path) -> None:
    spark.range(5).write.format("delta").save(str(tmp_path / "t"))
    assert spark.read.format("delta").load(str(tmp_path / "t")).count() == 5


@pytest.mark.spark
def test_spark_leaves_nothing_in_the_current_folder(spark: "SparkSession") -> None:
    before = set(Path.cwd().iterdir())
    spark.sql("create table if not exists left_behind (a int) using delta")
    spark.sql("drop table left_behind")
    left = {path.name for path in set(Path.cwd().iterdir()) - before}
    assert not left & {"spark-warehouse", "metastore_db", "derby.log"}


def test_small_disk_gets_full(small_disk: MakeDisk) -> None:
    folder = small_disk(1)
    with pytest.raises(OSError, match="No space left"):
        (folder / "file").write_bytes(b"x" * 2_000_000)


def test_private_postgres_lives_on_the_disk_it_was_given(private_postgres: MakePostgres, small_disk: MakeDisk) -> None:
    server = private_postgres(folder=small_disk(200))
    told = subprocess.run(["stat", "-f", "-c", "%T", server.data], capture_output=True, text=True, check=True)
    assert told.stdout == "tmpfs\n"


def test_paused_server_goes_on_for_the_next_test(private_postgres: MakePostgres) -> None:
    server = private_postgres()
    server.pause()
    server.start()
    with server.connect() as connection:
        assert connection.execute("select 1").fetchone() == (1,)


def test_paused_server_can_be_stopped(private_postgres: MakePostgres) -> None:
    server = private_postgres()
    server.pause()
    server.stop()
    assert identify(server.pid) is None


# -- proxy


def test_proxy_passes_then_cuts_then_passes_again(postgres_server: PostgresServer, proxy: MakeProxy) -> None:
    between = proxy(postgres_server.port)
    with contextlib.closing(psycopg.connect(postgres_server.dsn(port=between.port), autocommit=True)) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
        between.cut()
        with pytest.raises(psycopg.OperationalError):
            connection.execute("select 1")
    with pytest.raises(psycopg.OperationalError, match="refused"):
        psycopg.connect(postgres_server.dsn(port=between.port))
    between.pass_on()
    with psycopg.connect(postgres_server.dsn(port=between.port)) as again:
        assert again.execute("select 1").fetchone() == (1,)


def test_stalled_proxy_holds_back_the_answer_until_it_passes(postgres_server: PostgresServer, proxy: MakeProxy) -> None:
    between = proxy(postgres_server.port)
    with psycopg.connect(postgres_server.dsn(port=between.port), autocommit=True) as connection:
        between.stall()
        answers: list[object] = []
        asking = threading.Thread(target=lambda: answers.append(connection.execute("select 1").fetchone()))
        asking.start()
        asking.join(0.3)
        assert answers == []
        between.pass_on()
        asking.join(10)
        assert answers == [(1,)]


def test_deaf_proxy_neither_accepts_nor_refuses(postgres_server: PostgresServer, proxy: MakeProxy) -> None:
    between = proxy(postgres_server.port)
    between.deaf()
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        psycopg.connect(postgres_server.dsn(port=between.port), connect_timeout=2)
    between.pass_on()
    psycopg.connect(postgres_server.dsn(port=between.port), connect_timeout=5).close()


def test_proxy_cuts_after_exactly_so_many_bytes(redis_server: LocalServer, proxy: MakeProxy) -> None:
    between = proxy(redis_server.port)
    with socket.create_connection(("127.0.0.1", between.port), timeout=10) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(100) == b"+PONG\r\n"
        between.cut_after(3, "down")
        connection.sendall(b"PING\r\n")
        received = b""
        with pytest.raises(ConnectionResetError):
            while True:
                received += connection.recv(100)
    assert b"+PO".startswith(received)
    assert between.forwarded["down"] == 10


def test_one_way_proxy_delivers_the_request_but_not_the_answer(redis_url: str, proxy: MakeProxy) -> None:
    direct = redis.Redis.from_url(redis_url)
    number = direct.connection_pool.connection_kwargs
    between = proxy(number["port"])
    through = redis.Redis(port=between.port, db=number["db"], socket_timeout=1, retry=Retry(NoBackoff(), 0))
    through.ping()
    between.one_way("up")
    with pytest.raises(redis.TimeoutError):
        through.set("k", "v")
    assert direct.get("k") == b"v"


def test_slow_proxy_takes_the_time_it_was_told(redis_url: str, proxy: MakeProxy) -> None:
    direct = redis.Redis.from_url(redis_url)
    direct.set("k", b"x" * 10_000)
    number = direct.connection_pool.connection_kwargs
    between = proxy(number["port"])
    between.slow(20_000)
    through = redis.Redis(port=between.port, db=number["db"])
    through.ping()
    began = time.monotonic()
    assert through.get("k") == b"x" * 10_000
    assert time.monotonic() - began > 0.4


# -- processes


def test_program_can_be_paused_and_killed(run_program: RunProgram) -> None:
    program = run_program("-c", "import time\nfor n in range(10**9): print(n); time.sleep(0.01)")
    wait_until(lambda: len(program.said()) > 10)
    program.pause()
    wait_until(lambda: is_stopped(program.pid))
    program.unpause()
    before = len(program.said())
    wait_until(lambda: len(program.said()) > before)
    program.kill()
    assert not program.running()


def test_a_forked_program_is_a_process_of_its_own(run_program: RunProgram, tmp_path: Path) -> None:
    """Session, folder, environment, output and exit code are those of a program that was started plainly."""
    done = run_program("-m", "cdc.cli.main", "version")
    assert done.wait(60) == 0, done.said()
    assert "millrace" in done.output.read_text()
    wrong = run_program("-m", "cdc.cli.main", "validate", env={"MILLRACE_CONFIG": "nowhere.yaml"})
    assert wrong.wait(60) == 2
    assert "nowhere.yaml" in wrong.errors.read_text()
    waiting = run_program("-m", "http.server", "--bind", "127.0.0.1", "0")
    assert os.getsid(waiting.pid) == waiting.pid
    assert Path(f"/proc/{waiting.pid}/cwd").readlink() == tmp_path / "programs"
    waiting.kill()
    assert waiting.wait(30) == -9


def test_servers_die_with_a_pytest_that_is_killed(tmp_path: Path, run_program: RunProgram) -> None:
    code = f"""
        import sys, time
        from pathlib import Path
        from deploy.local.postgres import Postgres
        from deploy.local.redis import Redis
        from deploy.local.servers import Servers
        servers = Servers(Path({str(tmp_path / "home")!r}), {{"postgres": Postgres(), "redis": Redis()}}, tied=True)
        print(*[running.pid for running in servers.up(["postgres", "redis"]).values()], "done", flush=True)
        time.sleep(600)
    """
    program = run_program("-c", textwrap.dedent(code))
    wait_until(lambda: "done" in program.said() or not program.running())
    pids = [int(word) for word in program.said().split() if word.isdigit()]
    assert len(pids) == 2, program.said()
    assert all(identify(pid) for pid in pids)
    program.kill()
    wait_until(lambda: not any(identify(pid) for pid in pids), 15)
