"""`verify` against real servers: equal stores pass, each kind of difference is found, writers do not confuse it."""

import json
import random
import threading

import pytest

from cdc.config.settings import TableSettings
from cdc.model import Lsn, TableId
from sinks import memory
from snapshots.backfill.requests import Request
from snapshots.verify.comparison import Differences, verify_table
from tests.fix_capture import Following, Rig
from tests.fix_servers import unique
from tests.scenes.backfill import backfilling
from tests.scenes.snapshot import Applied

ITEMS = "create table items (id int primary key, label text, amount numeric, doc jsonb)"
FILL = "insert into items select g, 'l' || g, g / 7.0, jsonb_build_object('g', g) from generate_series(1, 300) g"
TABLE = TableSettings(name=TableId("public", "items"))


@pytest.fixture
def filled(rig: Rig) -> Rig:
    """A captured table with rows, snapshot taken."""
    rig.capture_tables(ITEMS, FILL, snapshot="initial")
    rig.begin()
    return rig


def verified(rig: Rig, store: Applied, following: Following | None = None, looks: int = 12) -> Differences:
    def wait(lsn: Lsn) -> None:
        if following is not None:
            following.reaches(lsn)
        store.catch_up(lsn)

    return verify_table(rig.settings.source, TABLE, store.sink, wait, looks)


def test_a_store_filled_from_the_snapshot_is_equal(filled: Rig) -> None:
    found = verified(filled, Applied(filled.settings, unique("store")))
    assert found.equal
    assert found.rows == 300
    assert found.undecided == 0


def test_each_kind_of_difference_is_found_and_only_keys_are_shown(filled: Rig) -> None:
    store = Applied(filled.settings, unique("store"))
    store.catch_up()
    filled.database.execute(
        "update items set label = 'marker-value' where id = 1",
        "delete from items where id = 2",
        "insert into items values (1000, 'marker-value')",
    )
    found = verified(filled, store)
    assert not found.equal
    assert (found.missing, found.extra, found.different) == (1, 1, 1)
    assert found.examples == {"missing": ('{"id":1000}',), "extra": ('{"id":2}',), "different": ('{"id":1}',)}
    assert "marker-value" not in json.dumps(found.facts())


def test_writers_at_full_speed_are_no_difference(filled: Rig) -> None:
    store = Applied(filled.settings, unique("store"))
    stop = threading.Event()
    with filled.following() as following:
        writers = [threading.Thread(target=write, args=(filled, seed, stop)) for seed in range(2)]
        for writer in writers:
            writer.start()
        try:
            for _ in range(3):
                found = verified(filled, store, following)
                assert (found.missing, found.extra, found.different) == (0, 0, 0)
        finally:
            stop.set()
            for writer in writers:
                writer.join()
        assert verified(filled, store, following).undecided == 0


def test_a_real_difference_is_found_while_writers_run(filled: Rig) -> None:
    store = Applied(filled.settings, unique("store"))
    store.catch_up()
    lose(store)
    stop = threading.Event()
    with filled.following() as following:
        writer = threading.Thread(target=write, args=(filled, 1, stop))
        writer.start()
        try:
            found = verified(filled, store, following)
        finally:
            stop.set()
            writer.join()
    assert found.missing == 1
    assert found.examples == {"missing": ('{"id":300}',)}


def test_a_row_that_a_store_lost_is_brought_back_by_a_backfill(filled: Rig) -> None:
    store = Applied(filled.settings, unique("store"))
    store.catch_up()
    lose(store)
    with backfilling(filled) as scene:
        assert verified(filled, store, scene.following).missing == 1
        scene.wait(scene.ask(Request(TABLE.name, keys=(("300",),))))
        assert verified(filled, store, scene.following).equal


def lose(store: Applied) -> None:
    """Have the store forget one row that the writers never touch."""
    del memory._STORES[store.sink.name]["public.items"].rows['{"id":300}']


def write(rig: Rig, seed: int, stop: threading.Event) -> None:
    """Few keys, so that collisions are common."""
    rng = random.Random(seed)
    with rig.database.connect() as connection:
        while not stop.is_set():
            key = rng.randint(1, 50)
            connection.execute("update items set label = %s where id = %s", (str(rng.random()), key))
            if rng.random() < 0.2:
                connection.execute("delete from items where id = %s", (rng.randint(51, 60),))
                connection.execute("insert into items values (%s) on conflict do nothing", (rng.randint(51, 60),))
