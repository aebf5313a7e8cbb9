"""Real servers for tests: started when the first test of the session asks, gone when pytest is gone.

Session-scoped: `postgres_server`, `redis_server`, `opensearch_server`, `kafka_server`, `connect_server` (Kafka
Connect with Debezium). Per test: `database`,
`redis_url`, `redis_prefix`, `index_prefix`, `topic_prefix`, `state_dir`. Factories for servers of a test's own:
`private_postgres`, `private_redis`, `private_opensearch`, `private_kafka`. A test that stops a server need not start it
again: whoever asks next finds it running.
"""

import base64
import contextlib
import hashlib
import hmac
import itertools
import json
import os
import shutil
import signal
import subprocess
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psycopg
import pytest
from psycopg import sql

from cdc.artifacts.folders import cache_folder, make
from deploy.local import ports, postgres
from deploy.local.connect import Connect
from deploy.local.kafka import Kafka
from deploy.local.opensearch import OpenSearch
from deploy.local.postgres import Postgres
from deploy.local.process import Identity, alive, identify
from deploy.local.redis import Redis
from deploy.local.server import Running, Server
from deploy.local.servers import Servers

_FAST = {"fsync": "off", "max_connections": "300"}
"""A killed process loses nothing that is in the page cache: fsync would only cost time."""
_MEMORY = Path("/dev/shm")
_ENOUGH_MEMORY = 8 << 30
_MODES = {"smart": signal.SIGTERM, "fast": signal.SIGINT, "immediate": signal.SIGQUIT}


class LocalServer:
    """One server under test. Every action is on its own process only; the port stays the same over restarts.

    The trap: start it from the main thread, since it dies with the thread that started it.
    """

    def __init__(self, servers: Servers, name: str) -> None:
        self._servers = servers
        self._name = name
        self._last = self.start()

    def start(self) -> Running:
        """Start it unless it runs (paused ones go on); returns when it answers."""
        if self._name in (running := self._servers.status()):
            os.kill(running[self._name].pid, signal.SIGCONT)
        self._last = self._servers.up([self._name])[self._name]
        return self._last

    def stop(self) -> None:
        """Ask it to end, and wait."""
        self._servers.down([self._name])

    def kill(self) -> None:
        """kill -9."""
        self._servers.down([self._name], signal.SIGKILL)

    def restart(self) -> None:
        """Stop tidily and start again."""
        self.stop()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def unpause(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    @property
    def host(self) -> str:
        """Loopback."""
        return self._last.host

    @property
    def port(self) -> int:
        """Where clients connect."""
        return self._last.port

    @property
    def pid(self) -> int:
        """The server's main process."""
        return self._last.pid

    @property
    def log(self) -> Path:
        """What the server said."""
        return self._last.log

    @property
    def data(self) -> Path:
        """Its data folder."""
        return self._last.data

    @property
    def url(self) -> str:
        """What a client needs to connect."""
        return self._last.address


class PostgresServer(LocalServer):
    """Postgres under test. Connection strings name a password file, so they hold no secret."""

    def __init__(self, servers: Servers) -> None:
        self._passfile = postgres.passfile(servers.private())
        super().__init__(servers, "postgres")

    def dsn(self, dbname: str = "postgres", port: int | None = None) -> str:
        """A connection string for the superuser; `port` to go through a proxy."""
        return postgres.dsn(port or self.port, self._passfile, dbname)

    @property
    def admin_dsn(self) -> str:
        """The superuser in the database `postgres`."""
        return self.dsn()

    @property
    def password(self) -> str:
        """The superuser's, for clients that know no password files."""
        return postgres.password(self._passfile.parent).reveal()

    def stop(self, mode: str = "fast") -> None:
        """`smart`, `fast` or `immediate`, as pg_ctl calls them."""
        self._servers.down(["postgres"], _MODES[mode])

    def restart(self, mode: str = "fast") -> None:
        """Stop in that mode and start again; the data stays."""
        self.stop(mode)
        self.start()

    def connect(self, dbname: str = "postgres", **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """An autocommit connection."""
        return psycopg.connect(self.dsn(dbname), autocommit=True, **options)

    def execute(self, statement: str, dbname: str = "postgres") -> None:
        """Run one statement of the superuser."""
        with self.connect(dbname) as connection:
            connection.execute(statement.encode())


@dataclass(frozen=True, slots=True)
class Database:
    """A database of the test's own."""

    server: PostgresServer
    name: str

    @property
    def dsn(self) -> str:
        """The superuser in this database."""
        return self.server.dsn(self.name)

    def dsn_at(self, port: int) -> str:
        """The same through a proxy on loopback."""
        return self.server.dsn(self.name, port)

    def connect(self, **options: Any) -> psycopg.Connection[tuple[Any, ...]]:
        """An autocommit connection, unless told otherwise."""
        return psycopg.connect(self.dsn, **{"autocommit": True, **options})

    def execute(self, *statements: str) -> None:
        """Each in its own transaction."""
        with self.connect() as connection:
            for statement in statements:
                connection.execute(statement.encode())

    def drop(self) -> None:
        """Slots first, then the database with whoever is still connected."""
        self.server.start()
        with self.server.connect() as connection:
            _drop_slots(connection, self.name)
            connection.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(self.name)))


def _drop_slots(connection: psycopg.Connection[tuple[Any, ...]], dbname: str) -> None:
    connection.execute(
        "select pg_terminate_backend(active_pid, 5000) from pg_replication_slots"
        " where database = %s and active_pid is not null",
        (dbname,),
    )
    connection.execute(
        "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s", (dbname,)
    )


# -- one folder per session


@pytest.fixture(scope="session")
def session_home() -> Iterator[Path]:
    """Where this session's servers keep their data: quick to reach for the servers' user, swept if pytest is killed."""
    own = identify(os.getpid())
    assert own is not None
    base = _base_folder()
    make(base, 0o711)
    _sweep(base)
    home = base / f"{own.pid}-{own.started}"
    yield home
    shutil.rmtree(home, ignore_errors=True)


def _base_folder() -> Path:
    """In memory, if there is enough: the suite makes and drops a thousand databases of 300 files each, and ext4 without
    a journal spends a fifth of all CPU on inodes that are free but were deleted too recently."""
    if _MEMORY.is_dir():
        found = os.statvfs(_MEMORY)
        if found.f_bavail * found.f_frsize > _ENOUGH_MEMORY and not found.f_flag & os.ST_NOEXEC:
            return _MEMORY / f"millrace-tests-{os.getuid()}"
    make(cache_folder(), 0o755)
    return cache_folder() / "tests"


def _sweep(base: Path) -> None:
    """Remove what sessions left that were killed; their servers died with them."""
    for left in base.iterdir():
        pid, _, started = left.name.partition("-")
        if pid.isdigit() and started.isdigit() and not alive(Identity(int(pid), int(started))):
            with contextlib.suppress(OSError):
                Servers(left).down()
            shutil.rmtree(left, ignore_errors=True)


@pytest.fixture(scope="session")
def session_servers(session_home: Path) -> Iterator[Servers]:
    """The shared servers; each is started by the fixture that asks for it."""
    every: tuple[Server, ...] = (Postgres(_FAST), Redis({"databases": "64"}), OpenSearch(), Kafka(), Connect())
    servers = Servers(session_home, {server.name: server for server in every}, tied=True)
    yield servers
    servers.down()


@pytest.fixture(scope="session")
def shared_postgres(session_servers: Servers) -> PostgresServer:
    """Not for tests: see `postgres_server`."""
    server = PostgresServer(session_servers)
    with server.connect() as connection:
        connection.execute(sql.SQL("alter role postgres password {}").format(_quick_verifier(server.password)))
    return server


def _quick_verifier(password: str) -> str:
    """A password as Postgres stores it, hashed once instead of 4096 times: tests connect thousands of times, and each
    connection would cost both sides 5 ms of CPU."""
    salt = os.urandom(16)
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, 1)
    client = hmac.digest(salted, b"Client Key", "sha256")
    stored, server = hashlib.sha256(client).digest(), hmac.digest(salted, b"Server Key", "sha256")
    return "SCRAM-SHA-256$1:{}${}:{}".format(*(base64.b64encode(part).decode() for part in (salt, stored, server)))


@pytest.fixture(scope="session")
def shared_redis(session_servers: Servers) -> LocalServer:
    """Not for tests: see `redis_server`."""
    return LocalServer(session_servers, "redis")


@pytest.fixture(scope="session")
def shared_opensearch(session_servers: Servers) -> LocalServer:
    """Not for tests: see `opensearch_server`."""
    return LocalServer(session_servers, "opensearch")


@pytest.fixture(scope="session")
def shared_kafka(session_servers: Servers) -> LocalServer:
    """Not for tests: see `kafka_server`."""
    return LocalServer(session_servers, "kafka")


@pytest.fixture(scope="session")
def shared_connect(session_servers: Servers) -> LocalServer:
    """Not for tests: see `connect_server`."""
    return LocalServer(session_servers, "connect")


@pytest.fixture
def connect_server(shared_connect: LocalServer, kafka_server: LocalServer) -> LocalServer:
    """The session's Kafka Connect with Debezium's connector, on `kafka_server`; `.url` is its REST endpoint."""
    kafka_server.start()
    shared_connect.start()
    return shared_connect


@pytest.fixture
def postgres_server(shared_postgres: PostgresServer) -> PostgresServer:
    """The session's Postgres, running, with logical replication."""
    shared_postgres.start()
    return shared_postgres


@pytest.fixture
def redis_server(shared_redis: LocalServer) -> LocalServer:
    """The session's Redis, running."""
    shared_redis.start()
    return shared_redis


@pytest.fixture
def opensearch_server(shared_opensearch: LocalServer) -> LocalServer:
    """The session's OpenSearch, running; `.url` is for the client."""
    shared_opensearch.start()
    return shared_opensearch


@pytest.fixture(scope="module")
def kafka_until_the_end_of_the_file(session_servers: Servers) -> Iterator[None]:
    """Stops it then: clients that tests leave open would keep it at a tenth of a core for the rest of the session."""
    yield
    session_servers.down(["connect", "kafka"])


@pytest.fixture
def kafka_server(shared_kafka: LocalServer, kafka_until_the_end_of_the_file: None) -> LocalServer:
    """The session's Kafka, running; `.url` is the bootstrap server."""
    shared_kafka.start()
    return shared_kafka


# -- per test


def unique(word: str) -> str:
    """A name nobody else uses, good for databases, slots, indexes, topics and keys alike."""
    return f"{word}_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def database(postgres_server: PostgresServer) -> Iterator[Database]:
    """A fresh database; its slots and itself are dropped afterwards."""
    with fresh_database(postgres_server) as made:
        yield made


@contextlib.contextmanager
def fresh_database(server: PostgresServer) -> Iterator[Database]:
    """The same on any server, for tests with a private one."""
    made = Database(server, unique("test"))
    server.execute(f"create database {made.name}")
    yield made
    made.drop()


_redis_numbers = itertools.cycle(range(1, 64))


@pytest.fixture
def redis_url(redis_server: LocalServer) -> Iterator[str]:
    """An empty Redis database of the test's own."""
    with fresh_redis(redis_server) as url:
        yield url


@contextlib.contextmanager
def fresh_redis(server: LocalServer) -> Iterator[str]:
    """The same on any server."""
    import redis

    url = f"redis://{server.host}:{server.port}/{next(_redis_numbers)}"
    client = redis.Redis.from_url(url)
    client.flushdb()
    yield url
    with contextlib.suppress(redis.RedisError):
        client.flushdb()
    client.close()


@pytest.fixture
def redis_prefix() -> str:
    """A key prefix of the test's own."""
    return unique("test") + ":"


@pytest.fixture
def topic_prefix() -> str:
    """A topic prefix of the test's own."""
    return unique("test")


@pytest.fixture
def index_prefix(opensearch_server: LocalServer) -> Iterator[str]:
    """An index prefix of the test's own; whatever begins with it is deleted afterwards."""
    with fresh_indexes(opensearch_server) as prefix:
        yield prefix


@contextlib.contextmanager
def fresh_indexes(server: LocalServer) -> Iterator[str]:
    """The same on any server."""
    prefix = unique("test")
    yield prefix
    server.start()
    for name in opensearch_request(server, "GET", f"/{prefix}*/_alias?expand_wildcards=all"):
        opensearch_request(server, "DELETE", f"/{name}")
    opensearch_request(server, "DELETE", f"/_index_template/{prefix}*")


def opensearch_request(server: LocalServer, method: str, path: str, body: object = None) -> dict[str, Any]:
    """One JSON request, without a client library; 404 is an empty answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return {}
        raise


@pytest.fixture
def state_dir(tmp_path: Path) -> Path:
    """An empty state folder that only we may enter."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o700)
    return folder


class MakeDisk(Protocol):
    """A folder of that many megabytes."""

    def __call__(self, megabytes: int) -> Path: ...


@pytest.fixture
def small_disk(session_home: Path) -> Iterator[MakeDisk]:
    """Makes a file system so small that it gets full (a tmpfs, so only as root), also usable for `private_postgres`."""
    if os.geteuid() != 0:
        pytest.skip("mounting a tmpfs needs root")
    mounted: list[Path] = []

    def make_disk(megabytes: int) -> Path:
        make(session_home, 0o711)
        place = Path(tempfile.mkdtemp(prefix="disk-", dir=session_home))
        options = f"size={megabytes}m,mode=0711"
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", place], check=True, capture_output=True)
        mounted.append(place)
        return place

    yield make_disk
    for place in mounted:
        subprocess.run(["umount", "--lazy", place], check=True, capture_output=True)


def fill(disk: Path) -> Path:
    """Leave no room on it; returns the file to remove for room again."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    return ballast


# -- servers of a test's own


class MakePostgres(Protocol):
    """`folder` is the home of the server, for a tmpfs; made if None."""

    def __call__(self, settings: Mapping[str, str] | None = None, folder: Path | None = None) -> PostgresServer: ...


class MakeRedis(Protocol):
    """Settings of redis.conf."""

    def __call__(self, settings: Mapping[str, str] | None = None) -> LocalServer: ...


class MakeOpenSearch(Protocol):
    """Settings of opensearch.yml."""

    def __call__(self, settings: Mapping[str, object] | None = None) -> LocalServer: ...


class MakeKafka(Protocol):
    """`advertised` is the port of a proxy in front of it."""

    def __call__(self, settings: Mapping[str, str] | None = None, advertised: int | None = None) -> LocalServer: ...


@pytest.fixture
def private_servers(session_home: Path) -> Iterator[contextlib.ExitStack]:
    """Ends what the factories below have started."""
    make(session_home, 0o711)
    with contextlib.ExitStack() as stack:
        yield stack


def _own_servers(
    stack: contextlib.ExitStack, server: Server, session_home: Path, folder: Path | None = None
) -> Servers:
    home = folder or Path(tempfile.mkdtemp(prefix="private-", dir=session_home))
    servers = Servers(home, {server.name: server}, tied=True)
    if folder is None:
        stack.callback(shutil.rmtree, home, ignore_errors=True)
    stack.callback(servers.down, None, signal.SIGKILL)
    return servers


@pytest.fixture
def private_postgres(private_servers: contextlib.ExitStack, session_home: Path) -> MakePostgres:
    """Makes a Postgres with settings of its own (and a system identifier of its own), for this test only."""

    def make_postgres(settings: Mapping[str, str] | None = None, folder: Path | None = None) -> PostgresServer:
        server = Postgres({**_FAST, **(settings or {})})
        return PostgresServer(_own_servers(private_servers, server, session_home, folder))

    return make_postgres


@pytest.fixture
def private_redis(private_servers: contextlib.ExitStack, session_home: Path) -> MakeRedis:
    """Makes a Redis with settings of its own, for this test only."""

    def make_redis(settings: Mapping[str, str] | None = None) -> LocalServer:
        # by default nodes of a cluster talk at 10000 above their port, where clients of anybody may have theirs
        bus = {"cluster-port": str(ports.pick())} if settings and "cluster-enabled" in settings else {}
        return LocalServer(_own_servers(private_servers, Redis({**(settings or {}), **bus}), session_home), "redis")

    return make_redis


@pytest.fixture
def private_opensearch(private_servers: contextlib.ExitStack, session_home: Path) -> MakeOpenSearch:
    """Makes an OpenSearch with settings of its own, for this test only; it takes half a minute."""

    def make_opensearch(settings: Mapping[str, object] | None = None) -> LocalServer:
        server = OpenSearch(settings or {}, heap="384m")
        return LocalServer(_own_servers(private_servers, server, session_home), "opensearch")

    return make_opensearch


@pytest.fixture
def private_kafka(private_servers: contextlib.ExitStack, session_home: Path) -> MakeKafka:
    """Makes a Kafka with settings of its own, for this test only."""

    def make_kafka(settings: Mapping[str, str] | None = None, advertised: int | None = None) -> LocalServer:
        server = Kafka(settings or {}, advertised)
        return LocalServer(_own_servers(private_servers, server, session_home), "kafka")

    return make_kafka
