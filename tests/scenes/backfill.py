"""A reader with its backfills at work, writers beside them, and what must be true of the log afterwards."""

import contextlib
import json
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import psycopg

import cdc.log
from cdc.capture.pgoutput.events import LogicalMessage
from cdc.capture.transactions.assembly import SpilledTransaction
from cdc.clock import SystemClock
from cdc.model import Entry, TableId, parse_lsn
from cdc.ports import LogWriter
from snapshots.backfill.coordinator import Backfills
from snapshots.backfill.requests import Request, backfill_message, control_message
from snapshots.backfill.signing_key import control_key
from tests.fix_capture import Following, Rig
from tests.fix_processes import wait_until

ITEMS = "create table items (id int primary key, label text, amount numeric, big text)"
FILL = "insert into items select g, 'l' || g, g / 7.0, repeat('x', 50) from generate_series(1, 500) g"
ITEM = TableId("public", "items")
SAY = (
    "select set_config('synchronous_commit', 'local', true), pg_logical_emit_message(true, 'millrace', %s)::text as lsn"
)


class Backfilling:
    """A reader at work with its backfills."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.following: Following
        self.backfills: Backfills

    def attach(self, log: LogWriter) -> LogWriter:
        """Start with the log that the reader is about to get."""
        self.backfills = Backfills(self.rig.settings, log, SystemClock())
        self.backfills.start()
        return log

    def transactions(self, item: Entry | SpilledTransaction) -> None:
        self.backfills.transactions(item)

    def message(self, message: LogicalMessage) -> Sequence[Entry]:
        return self.backfills.message(message)

    def connection_started(self) -> None:
        self.backfills.connection_started()

    def ask(self, request: Request, key: bytes | None = None) -> str:
        """Ask as the command does; returns the backfill's id."""
        signed = backfill_message(request, control_key(self.rig.state) if key is None else key)
        return f"{parse_lsn(self.rig.ask(f'select lsn from ({SAY}) said', signed)):X}"

    def tell(self, verb: str, identity: str) -> None:
        self.rig.ask(SAY, control_message(verb, identity, control_key(self.rig.state)))

    def job(self, identity: str) -> dict[str, Any]:
        return next((dict(job) for job in self.backfills.facts() if job["id"] == identity), {"state": "unknown"})

    def wait(self, identity: str, *states: str) -> dict[str, Any]:
        wanted = states or ("done",)
        wait_until(lambda: self._check() and self.job(identity)["state"] in wanted, 60, f"{identity} is {wanted}")
        return self.job(identity)

    def _check(self) -> bool:
        if self.following.raised:
            raise self.following.raised[0]
        return True

    def catch_up(self) -> None:
        self.following.reaches(self.rig.now())


@contextlib.contextmanager
def backfilling(rig: Rig) -> Iterator[Backfilling]:
    scene = Backfilling(rig)
    with rig.following(scene, wrap=scene.attach) as scene.following:
        try:
            yield scene
        finally:
            scene.backfills.close()


def own(table: str = "public.items") -> str:
    return f"table:{table}"


def marks(rig: Rig) -> dict[str, str]:
    log = cdc.log.open_writer(rig.settings)
    try:
        return dict(log.progress().marks)
    finally:
        log.close()


@contextlib.contextmanager
def writers(rig: Rig, count: int = 2, seed: int = 0, keys: int = 60) -> Iterator[None]:
    """Writers on few keys, up to 200 writes a second each: inserts, updates that leave the large column, deletes, moved
    keys. Faster ones would race no more, and on a busy machine they take the CPU from what they race with."""
    stop = threading.Event()
    threads = [threading.Thread(target=_write, args=(rig, seed * 10 + at, keys, stop)) for at in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


STATEMENTS = (
    "insert into items values (%(key)s, %(text)s, 1, repeat(%(text)s, 300)) on conflict (id) do nothing",
    "update items set label = %(text)s where id = %(key)s",
    "update items set label = %(text)s where id = %(key)s",
    "update items set big = repeat(%(text)s, 300) where id = %(key)s",
    "delete from items where id = %(key)s",
)


def write_once(connection: psycopg.Connection[Any], rng: random.Random, keys: int) -> None:
    """One change of one random key; most leave the large column out of the stream."""
    values = {"key": rng.randint(1, keys), "text": f"{rng.random():.12f}"}
    connection.execute(rng.choice(STATEMENTS).encode(), values)


def _write(rig: Rig, seed: int, keys: int, stop: threading.Event) -> None:
    rng = random.Random(seed)
    with rig.database.connect() as connection:
        while not stop.wait(0.005):
            write_once(connection, rng, keys)


def replayed(rig: Rig, guarded: bool) -> dict[str, dict[str, Any]]:
    """What a consumer makes of the log: one that compares versions, as the stores do, or one for which the last wins.

    Both refuse a partial row that they have nothing to keep from. Of one transaction's changes with the same version
    the last one counts, as in a batch.
    """
    state: dict[str, tuple[int, int, dict[str, Any] | None]] = {}
    for row in rig.rows("public.items"):
        version, commit, held = state.get(row["key"], (-1, -1, None))
        if guarded and row["version"] <= version and (row["version"], row["commit_lsn"]) != (version, commit):
            continue
        image: dict[str, Any] | None = None if row["op"] == "d" else json.loads(row["after"])
        if row["unchanged"]:
            if held is None:
                continue
            image = {**held, **(image or {})}
        state[row["key"]] = (row["version"], row["commit_lsn"], image)
    return {key: image for key, (*_, image) in state.items() if image is not None}


def assert_right(rig: Rig) -> None:
    """By versions and by order alike, the log is the source; and it is in order."""
    with rig.database.connect() as connection:
        wanted = {row["id"]: row for (row,) in connection.execute("select to_jsonb(t) from items t").fetchall()}
    for guarded in (True, False):
        assert {row["id"]: row for row in replayed(rig, guarded).values()} == wanted, f"guarded: {guarded}"
    places = [(row["commit_lsn"], row["ordinal"]) for row in rig.rows()]
    assert places == sorted(set(places))
