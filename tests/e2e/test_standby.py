"""A frozen machine wakes up after a standby has taken its place: the stores stay right."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import redis

from cdc.service.daemon.process import settings_from
from cdc.service.inspect.verification import differences
from cdc.service.standby.lease import current
from tests.fix_processes import RunProgram, wait_until
from tests.fix_servers import Database
from tests.integration.service.test_daemon import Daemon
from tests.scenes.frozen import family

pytestmark = pytest.mark.spark
_ROWS = 20


class Counters:
    """Rows that only ever count up, in the source and in the cache."""

    def __init__(self, database: Database, redis_url: str) -> None:
        self._database = database
        self._cache = redis.Redis.from_url(redis_url)
        self.seen = dict.fromkeys(range(1, _ROWS + 1), 0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Count in the source, and check the cache, until the block ends."""
        stop = threading.Event()

        def count() -> None:
            with self._database.connect() as connection:
                while not stop.wait(0.3):
                    connection.execute("update items set n = n + 1")

        thread = threading.Thread(target=count)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(30)

    def look(self) -> int:
        """The lowest counter in the cache. None may ever go back."""
        for key, before in self.seen.items():
            row = self._cache.get(f"public.items:{key}")
            now = json.loads(row)["n"] if isinstance(row, bytes) else 0
            assert now >= before, f"row {key} went back from {before} to {now}"
            self.seen[key] = now
        return min(self.seen.values())

    def move(self) -> None:
        """Wait until every counter in the cache is greater than any is now."""
        self.look()
        least = max(self.seen.values())
        wait_until(lambda: self.look() > least, 120, f"counters beyond {least}")


def test_a_frozen_daemon_that_wakes_up_puts_no_row_back(
    database: Database, redis_url: str, state_dir: Path, tmp_path: Path, run_program: RunProgram
) -> None:
    database.execute(
        "create table items (id int primary key, n int)",
        f"insert into items select g, 0 from generate_series(1, {_ROWS}) g",
    )
    sinks = [{"kind": "redis", "url": redis_url}, {"kind": "delta", "path": str(tmp_path / "lake")}]
    first, second = (_daemon(name, database, state_dir, tmp_path, run_program, sinks) for name in ("one", "two"))
    counters = Counters(database, redis_url)
    active = first.start()
    with counters.at_work():
        counters.move()
        standby = run_program("-m", "cdc.cli.main", "run", "--standby", "--config", str(second.config))
        wait_until(lambda: first.facts("daemon")["lease"]["standbys"], 60, "a standby")
        frozen = list(family(active.pid))
        _send(frozen, signal.SIGSTOP)
        wait_until(lambda: (lease := current(state_dir)) and lease.holder.pid == standby.pid, 30, "the lease")
        counters.move()  # by the second daemon
        _send(reversed(frozen), signal.SIGCONT)
        assert active.wait(30) == 4
        counters.move()
    found = list(differences(settings_from(second.config), (), (), 60))
    assert [item.facts() for item in found if not item.equal] == []
    assert len(found) == 2
    assert standby.terminate() == 0


def _daemon(
    name: str, database: Database, state: Path, folder: Path, run_program: RunProgram, sinks: list[dict[str, str]]
) -> Daemon:
    (folder / name).mkdir()
    made = Daemon(database, state, folder / name, run_program)
    made.write(sinks=sinks, http={"port": made.port})
    return made


def _send(pids: Iterator[int] | list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
