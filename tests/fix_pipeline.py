"""Fixtures around a whole pipeline's settings."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

import cdc.log
import views.registry
from cdc.config.pipeline_file import check
from cdc.config.settings import Settings
from cdc.errors import LogLost
from cdc.model import Lsn, parse_lsn
from cdc.service.daemon.process import settings_from
from cdc.service.inspect.verification import differences
from cdc.service.observe.positions import Positions
from cdc.service.state import status
from deploy.demo import shop
from deploy.local import ports
from sinks import registry
from tests.fix_processes import Program, RunProgram, programs, wait_until
from tests.fix_servers import (
    Database,
    LocalServer,
    PostgresServer,
    fresh_database,
    fresh_indexes,
    fresh_redis,
)
from tests.fork_server import ForkServer


@pytest.fixture
def settings_of(state_dir: Path) -> Callable[..., Settings]:
    """Makes checked settings from plain sections, with this test's state folder."""

    def make(**sections: object) -> Settings:
        data = {"state": str(state_dir), **sections}
        return check(
            data,
            cdc.log.settings_kinds(),
            registry.settings_kinds(),
            "the test's settings",
            views=views.registry.settings_kinds(),
        )

    return make


class Pipeline:
    """`millrace run` on a shop of the test's own, into all three stores."""

    def __init__(self, config: Path, database: Database, run_program: RunProgram) -> None:
        self.config = config
        self.database = database
        self.settings = settings_from(config)
        self.positions = Positions(self.settings)
        self._run = run_program
        self.daemon: Program | None = None

    def reopen(self) -> None:
        """After the file was changed: what it says now."""
        self.settings = settings_from(self.config)
        self.positions = Positions(self.settings)

    def start(self, **env: str) -> Program:
        """Start the daemon; `env` may carry fail points."""
        self.daemon = self._run("-m", "cdc.cli.main", "run", "--config", str(self.config), env=env)
        return self.daemon

    def part(self, name: str) -> int:
        """The pid of a running part: `capture` or `apply`."""
        return int(str(status.read(self.settings.state, name)["pid"]))

    def kill(self, name: str) -> None:
        """kill -9 of a part; the supervisor starts it again."""
        os.kill(self.part(name), signal.SIGKILL)

    def settle(self, deadline: float = 240) -> None:
        """Wait until every store holds what the source holds now."""
        with self.database.connect() as connection:
            row = connection.execute("select pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        wanted = parse_lsn(row[0])
        try:
            wait_until(lambda: self._reached(wanted), deadline, f"every store at {row[0]}")
        except AssertionError as error:
            error.add_note(self._said())
            raise

    def _reached(self, wanted: Lsn) -> bool:
        """Not, while the log's server does not answer: a test may have killed it."""
        try:
            return not self.positions.behind(wanted)
        except LogLost:
            return False

    def assert_equal(self) -> None:
        """Every row of every table of every store equals the source."""
        found = list(differences(self.settings, (), (), 60))
        assert [item.facts() for item in found if not item.equal] == []
        assert len(found) == len(self.settings.sinks) * len(self.settings.source.tables)

    def _said(self) -> str:
        return self.daemon.said()[-2000:] if self.daemon else ""


@pytest.fixture
def pipeline(
    database: Database,
    redis_url: str,
    opensearch_server: LocalServer,
    index_prefix: str,
    state_dir: Path,
    tmp_path: Path,
    run_program: RunProgram,
) -> Pipeline:
    """A shop with its first rows, and a pipeline file for it; not started yet."""
    stores = (redis_url, opensearch_server.url, index_prefix)
    return _shop_pipeline(database, stores, state_dir, tmp_path, run_program)


@pytest.fixture(scope="module")
def shared_pipeline(
    shared_postgres: PostgresServer,
    shared_redis: LocalServer,
    shared_opensearch: LocalServer,
    forks: ForkServer,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pipeline]:
    """The same for all tests of a file, which leave it as they found it: a start takes 25 seconds of CPU."""
    folder = tmp_path_factory.mktemp("pipeline")
    state = folder / "state"
    state.mkdir(mode=0o700)
    for server in (shared_postgres, shared_redis, shared_opensearch):
        server.start()
    with ExitStack() as stack:
        database = stack.enter_context(fresh_database(shared_postgres))
        redis_url = stack.enter_context(fresh_redis(shared_redis))
        prefix = stack.enter_context(fresh_indexes(shared_opensearch))
        run_program = stack.enter_context(programs(folder / "programs", forks))
        yield _shop_pipeline(database, (redis_url, shared_opensearch.url, prefix), state, folder, run_program)


def _shop_pipeline(
    database: Database, stores: tuple[str, str, str], state: Path, folder: Path, run_program: RunProgram
) -> Pipeline:
    redis_url, opensearch_url, prefix = stores
    with database.connect() as owner:
        shop.create(owner)
    sections = {
        "state": str(state),
        "source": {
            "host": database.server.host,
            "port": database.server.port,
            "database": database.name,
            "user": "postgres",
            "password": database.server.password,
            "slot": database.name,
            "tables": [f"public.{name}" for name in shop.TABLES],
        },
        "sinks": [
            {"kind": "delta", "path": str(folder / "lake")},
            {"kind": "opensearch", "url": opensearch_url, "prefix": prefix, "replicas": 0},
            {"kind": "redis", "url": redis_url},
        ],
        "http": {"port": ports.pick()},
    }
    config = folder / "millrace.yaml"
    config.write_text(yaml.safe_dump(sections), encoding="utf-8")
    return Pipeline(config, database, run_program)
