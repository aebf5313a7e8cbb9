"""A table whose primary key is replaced begins again: no store keeps a row under the old key."""

import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import cdc.log
from cdc import failpoint
from cdc.capture.source import publication
from cdc.capture.source.publication import Publication
from cdc.ports import Sink
from cdc.service.apply.reselect import SourceRows
from cdc.service.capture.table_changes import publish
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.settings import DeltaSettings
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from sinks.memory import MemorySink, Store
from sinks.redis import settings
from sinks.redis import sink as redis
from snapshots.backfill import pace
from snapshots.verify.comparison import verify_table
from tests.fix_capture import Rig
from tests.fix_processes import Program, wait_until
from tests.integration.capture.test_tables_live import backfilled, facts
from tests.scenes.backfill import backfilling, own

TABLE = "public.items"
ITEMS = "create table items (tenant int, id int, label text, big text, primary key (id))"
FILL = "insert into items select g % 3, g, 'first', repeat('x', 3000) from generate_series(1, 300) g"


def _itself(sink: Sink) -> Sink:
    return sink


class Stores:
    """Sinks fed from the log, entry by entry."""

    def __init__(self, rig: Rig, sinks: list[Sink]) -> None:
        self._rig = rig
        self._reader = cdc.log.open_reader(rig.settings)
        self._offset = self._reader.start()
        self._sinks = sinks
        self._appliers = [
            Applier(sink.name, open_sink=partial(_itself, sink), log=self._reader,
                    letters=DeadLetters(rig.state / f"letters-{sink.name}"), stop=threading.Event(),
                    reselect=SourceRows(rig.settings.source))
            for sink in sinks
        ]  # fmt: skip

    def assert_equal(self) -> None:
        pieces = list(self._reader.read(self._offset))
        for piece in pieces:
            for applier in self._appliers:
                applier.apply(gather(ranked(piece.rows), self._reader.schemas))
        self._offset = pieces[-1].offset if pieces else self._offset
        source = self._rig.settings.source
        for sink in self._sinks:
            found = verify_table(source, source.tables[0], sink)
            assert found.equal and found.rows == self._rig.ask("select count(*) from items"), found


@pytest.fixture
def stores(rig: Rig, redis_url: str, tmp_path: Path) -> Iterator[Stores]:
    rig.capture_tables(ITEMS, FILL, snapshot="initial", heartbeat_seconds=0.5)
    lake = delta.open_sink(DeltaSettings(name="delta", path=str(tmp_path / "lake")), SinkContext(rig.state))
    cache = redis.open_sink(settings.RedisSettings(name="redis", url=redis_url), SinkContext(rig.state))
    memory = MemorySink("memory", Store())
    cdc.log.open_writer(rig.settings).close()
    yield Stores(rig, [memory, cache, lake])
    lake.close()
    cache.close()


def begun_again(rig: Rig, program: Program, times: int) -> None:
    """The log has dropped what the table held so often, and has read it anew."""
    wait_until(lambda: [row["op"] for row in rig.rows(TABLE)].count("t") >= times, 60, "the truncate in the log")
    backfilled(rig, program, TABLE)
    rig.wait_caught_up(program)


@pytest.mark.parametrize("identity", ["default", "full"])
def test_no_store_keeps_a_row_under_a_key_that_was_replaced(rig: Rig, stores: Stores, identity: str) -> None:
    rig.database.execute(f"alter table items replica identity {identity}")
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute("update items set label = 'streamed' where id < 50")
    rig.wait_caught_up(program)
    stores.assert_equal()
    rig.database.execute(
        "begin; alter table items drop constraint items_pkey; alter table items add primary key (tenant, id); commit",
        "update items set label = 'under the new key' where id = 1",
        "insert into items select 7, id, 'same id, other tenant', 'y' from items where id < 20",
    )
    begun_again(rig, program, 1)
    rig.database.execute("update items set label = 'again' where id = 2", "delete from items where id = 3")
    rig.wait_caught_up(program)
    stores.assert_equal()
    rig.database.execute("delete from items where tenant = 7")  # leaves tombstones that the next key would confuse
    rig.wait_caught_up(program)
    stores.assert_equal()
    assert facts(rig, program) and program.terminate() == 0
    rig.database.execute(
        "begin; alter table items drop constraint items_pkey; alter table items add primary key (id); commit",
        "update items set label = 'while stopped' where id = 10",
        "update items set tenant = 99 where id = 11",
    )
    program = rig.start()
    begun_again(rig, program, 2)
    rig.database.execute("update items set label = 'last' where id < 12", "delete from items where id > 290")
    rig.wait_caught_up(program)
    stores.assert_equal()
    assert program.terminate() == 0


ARRAYS = """('{a,b}', '{1}', ''), ('{"a,b"}', '{1}', ''), ('{}', '{}', ''), ('{NULL}', '{1}', ''),
('{"NULL"}', '{1}', ''), ('{a}', '[2:3]={1,2}', ''), ('{a}', '{1,2}', ''), ('{{a},{b}}', '{1}', ''),
('{a:b}', '{1}', ''), ('{a;b}', '{1}', '')"""


@pytest.mark.parametrize("key", ["tags, ns", "ns"])
def test_rows_keyed_by_arrays_are_told_apart_in_every_store(
    rig: Rig, stores: Stores, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "_FIRST", 20)  # so that the table is walked in several chunks
    rig.database.execute(
        "drop table items",
        f"create table items (tags text[], ns int[], v text, primary key ({key}))",
        f"insert into items values {ARRAYS} on conflict do nothing",
        "insert into items select array['g', g::text], array[g, g], 'walked' from generate_series(1, 300) g",
    )
    rig.source["tables"][0]["snapshot"] = "incremental"
    rig.begin()
    with backfilling(rig) as scene:
        scene.wait(own(TABLE))
        scene.catch_up()
        stores.assert_equal()
        rig.database.execute(
            "update items set v = 'changed' where ns = '{1}'",
            "delete from items where tags = '{NULL}' or tags = '{a,b}' or ns = '{7,7}'",
            "update items set tags = '{moved}' where tags = '{}'",
            "update items set ns = '{0,0}' where tags = '{a}' and ns = '{1,2}'",
        )
        scene.catch_up()
        stores.assert_equal()
        rig.database.execute("truncate items", f"insert into items values {ARRAYS} on conflict do nothing")
        scene.catch_up()
        stores.assert_equal()


def test_a_key_that_is_replaced_while_the_table_is_first_read_has_it_read_from_the_beginning(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read so far lies under the old key, and so does the place where the backfill would go on."""
    monkeypatch.setattr(pace, "_FIRST", 10)
    rig.capture_tables(
        "create table items (tenant int, id int primary key)",
        "insert into items select g % 3, g from generate_series(1, 2000) g",
        snapshot="incremental",
    )
    rig.begin()
    chunks, held, released, done = [0], threading.Event(), threading.Event(), threading.Event()

    def reached(point: str) -> None:
        chunks[0] += point == "backfill.after_low"
        if point == "backfill.after_low" and chunks[0] == 3:
            held.set()
            assert released.wait(60)

    monkeypatch.setattr(failpoint, "reached", reached)
    with backfilling(rig) as scene:
        assert held.wait(60)
        rig.database.execute(
            "alter table items drop constraint items_pkey, add primary key (tenant, id)",
            "insert into items values (7, 1), (7, 2)",
        )
        log = scene.following.reader._log

        def change() -> None:  # as cdc.service.capture.table_changes does it
            stored = Publication.of_mark(log.progress().marks[publication.MARK])
            publish(rig.settings.source, stored, log)
            scene.backfills.set_tables(rig.settings, log)
            done.set()

        scene.following.reader.run_between_connections(change)
        assert done.wait(60)
        released.set()
        scene.wait(own(TABLE))
        scene.catch_up()
    assert [row["op"] for row in rig.rows(TABLE)].count("t") == 1
    assert {tuple(json.loads(key)) for key in rig.folded(TABLE)} == {("tenant", "id")}
    rig.assert_equal()
