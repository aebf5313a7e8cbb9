"""Random histories under random faults, ended by one verifier. Safety first (faults throughout), then liveness."""

import random
import signal
import threading
from collections.abc import Iterator

import psycopg
import pytest

from tests.fix_capture import Rig
from tests.fix_processes import Program, wait_until

KEYS = 60
ITEMS = "create table items (id int primary key, label text, amount numeric, big text)"


class Writer(threading.Thread):
    """One application at work: few keys, so that writers collide; a seed gives the same choices again."""

    def __init__(self, rig: Rig, seed: int) -> None:
        super().__init__(daemon=True)
        self._rig = rig
        self._random = random.Random(seed)
        self._stopped = threading.Event()
        self.done = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with self._rig.database.connect(autocommit=False) as connection:
                while not self._stopped.is_set():
                    self._transaction(connection)
        except BaseException as error:
            self.failure = error

    def finish(self) -> None:
        """Stop after the transaction under way; nothing but what the source itself refuses may have failed."""
        self._stopped.set()
        self.join(30)
        assert self.failure is None, self.failure

    def _transaction(self, connection: psycopg.Connection[tuple[object, ...]]) -> None:
        try:
            for statement in self._statements():
                connection.execute(statement.encode())
            connection.rollback() if self._random.random() < 0.1 else connection.commit()
            self.done += 1
        except (psycopg.errors.UniqueViolation, psycopg.errors.DeadlockDetected):
            connection.rollback()

    def _statements(self) -> Iterator[str]:
        for _ in range(self._random.randint(1, 4)):
            yield self._statement()
        if self._random.random() < 0.3:
            yield "savepoint s"
            yield self._statement()
            yield "rollback to s" if self._random.random() < 0.5 else "release s"
        if self._random.random() < 0.02:
            keys = f"generate_series({KEYS}, {KEYS * 20}) g"
            yield f"insert into items select g, 'bulk' from {keys} on conflict do nothing"

    def _statement(self) -> str:
        key, word = self._random.randrange(KEYS), f"w{self._random.randrange(1000)}"
        return self._random.choice(
            [
                f"insert into items values ({key}, '{word}', {key}.50, repeat('{word}', 900)) on conflict (id)"
                f" do update set label = '{word}'",
                f"insert into items values ({key}, '{word}') on conflict do nothing",
                f"update items set label = '{word}' where id = {key}",
                f"update items set big = repeat('{word}', 700) where id = {key}",
                f"delete from items where id = {key}",
                f"update items set id = {KEYS + key}, big = '{word}' where id = {key}",
                f"delete from items where id >= {KEYS + key} and id < {KEYS + key + 10}",
            ]
        )


@pytest.mark.parametrize("seed", [1, 2])
def test_any_history_survives_any_moment_of_death(rig: Rig, seed: int) -> None:
    rng = random.Random(seed)
    rig.capture_tables(ITEMS, "alter table items alter big set storage external", snapshot="initial")
    writers = [Writer(rig, 100 * seed + number) for number in range(3)]
    for writer in writers:
        writer.start()
    program: Program | None = None
    for _ in range(5):
        program = rig.start()
        seen = sum(writer.done for writer in writers)
        wanted = seen + rng.randint(200, 2500)
        wait_until(lambda: sum(writer.done for writer in writers) >= wanted, 60, "the writers' progress")  # noqa: B023
        fault = rng.choice(["kill", "kill", "terminate", "cut"])
        if fault == "kill":
            program.kill()
        elif fault == "terminate":
            program.send(signal.SIGTERM)
            assert program.wait(60) in (0, -signal.SIGTERM), program.said()[-2000:]
        else:
            rig.database.execute(
                "select pg_terminate_backend(active_pid) from pg_replication_slots where database = current_database()"
            )
            program.kill()
    for writer in writers:
        writer.finish()
    program = rig.start()
    rig.wait_caught_up(program, 120)
    wait_until(lambda: _no_backfill_open(rig), 60, "the rest of the snapshot")
    assert program.terminate() == 0, program.said()[-2000:]
    rig.assert_equal()
    rig.assert_once_in_order()


def _no_backfill_open(rig: Rig) -> bool:
    return all(item["state"] == "done" for item in rig.status().get("backfills", []))
