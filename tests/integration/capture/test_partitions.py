"""Partitions: one logical table, whatever happens to its parts; and what Postgres does not say is noticed by name."""

import json
from pathlib import Path
from typing import Any

import cdc.log
from cdc.capture.source.connect import connect
from cdc.capture.source.partitions import LeafPartition, Partitions, events, mark, of_mark
from cdc.config.settings import PartitionSettings
from cdc.model import TableId
from cdc.service.apply.replay import ReplayRange, replay
from cdc.service.inspect import why
from sinks.context import SinkContext
from sinks.delta.settings import DeltaSettings
from sinks.delta.sink import open_sink as open_delta
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import open_sink as open_redis
from tests.fix_capture import Rig
from tests.fix_processes import Program, wait_until

EVENTS = (
    "create table events (id int, at date, what text, primary key (id, at)) partition by range (at)",
    "create table events_1 partition of events for values from ('2026-01-01') to ('2026-02-01')",
    "create table events_2 partition of events for values from ('2026-02-01') to ('2026-03-01')",
)


def test_nested_partitions_with_columns_in_another_order_are_one_table(rig: Rig) -> None:
    rig.capture_tables(
        "create table sales (id int, region text, at date, amount numeric, primary key (id, region, at))"
        " partition by list (region)",
        "create table sales_north partition of sales for values in ('north') partition by range (at)",
        "create table sales_north_1 partition of sales_north for values from ('2026-01-01') to ('2026-02-01')",
        "create table sales_south (amount numeric, gone int, at date not null, region text not null, id int not null)",
        "alter table sales_south drop column gone",
        "alter table sales attach partition sales_south for values in ('south')",
    )
    rig.begin()
    rig.follow(
        "insert into sales values (1, 'north', '2026-01-05', 1.50), (2, 'south', '2026-01-06', 2.50)",
        "create table sales_north_2 (at date not null, amount numeric, id int not null, region text not null)",
        "alter table sales_north attach partition sales_north_2 for values from ('2026-02-01') to ('2026-03-01')",
        "insert into sales values (3, 'north', '2026-02-05', 3.50)",
        "update sales set region = 'south' where id = 3",
        "update sales set amount = amount * 2",
        "delete from sales where id = 1",
    )
    assert {row["table"] for row in rig.rows()} == {"public.sales"}
    rig.assert_equal()


def test_a_truncate_of_the_root_empties_the_whole_table(rig: Rig) -> None:
    rig.capture_tables(*EVENTS)
    rig.begin()
    rig.follow(
        "insert into events values (1, '2026-01-05', 'a'), (2, '2026-02-05', 'b')",
        "truncate events",
        "insert into events values (3, '2026-02-06', 'c')",
    )
    assert [row["op"] for row in rig.rows("public.events")].count("t") == 1
    rig.assert_equal()


def test_what_happens_to_single_partitions_is_said_by_name_and_capture_goes_on(rig: Rig) -> None:
    rig.capture_tables(*EVENTS, partitions={"attached": "notice"})
    program = rig.start()
    rig.wait_caught_up(program)
    wait_until(lambda: "partitions" in _marks(rig), 30, "the first look")
    rig.database.execute(
        "insert into events values (1, '2026-01-05', 'a'), (2, '2026-02-05', 'b')",
        "create table born partition of events for values from ('2026-03-01') to ('2026-04-01')",
        "create table old (id int not null, at date not null, what text)",
        "insert into old values (4, '2026-04-05', 'before')",
        "alter table events attach partition old for values from ('2026-04-01') to ('2026-05-01')",
        "truncate events_1",
        "alter table events detach partition events_2",
    )
    wait_until(lambda: len(_notices(rig)) >= 3, 30, "the notices")
    said = _notices(rig)
    assert len(said) == 3
    assert any("public.old was attached" in text and "millrace backfill public.events" in text for text in said)
    assert any("public.events_1 of public.events was truncated" in text for text in said)
    assert any("public.events_2 was detached" in text and "millrace resync" in text for text in said)
    rig.database.execute("insert into events values (5, '2026-04-06', 'after')")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    # As documented: rows that left without a delete stay, rows that came without an insert are missing until read.
    assert sorted(json.loads(key)["id"] for key in rig.folded("public.events")) == [1, 2, 5]


def test_what_happens_to_partitions_while_nobody_looks_is_noticed_at_the_next_start(rig: Rig) -> None:
    rig.capture_tables(*EVENTS)
    program = rig.start()
    rig.wait_caught_up(program)
    wait_until(lambda: "partitions" in _marks(rig), 30, "the first look")
    assert program.terminate() == 0
    rig.database.execute("drop table events_1", "drop table events_2")
    program = rig.start()
    said = wait_until(lambda: _notices(rig), 30, "the notice")
    assert "public.events_1 was detached" in said[0], "also where no partition is left"
    assert program.terminate() == 0


def test_a_subtree_that_is_attached_is_no_newborn(rig: Rig) -> None:
    rig.capture_tables(*EVENTS)
    rig.begin()
    with connect(rig.settings.source) as connection, rig.following() as following:
        tables = {TableId("public", "events"): PartitionSettings(attached="notice")}
        partitions = Partitions(lambda: tables, following.reader._log, lambda _connection, _refill: None)
        partitions.check(connection)
        rig.database.execute(
            "create table tree (id int not null, at date not null, what text) partition by range (at)",
            "create table leaf partition of tree for values from ('2026-06-01') to ('2026-07-01')",
            "alter table events attach partition tree for values from ('2026-06-01') to ('2027-01-01')",
            "alter table events_1 rename to renamed",
        )
        partitions.check(connection)
        partitions.check(connection)
    assert [notice.message[:32] for notice in partitions.notices] == ["Partition public.leaf was attach"]


def test_a_root_that_is_new_or_no_longer_captured_is_no_news() -> None:
    leaves = {1: LeafPartition("public.a_1", 10)}
    assert list(events({"public.a": leaves}, {"public.b": leaves})) == []
    assert of_mark(mark({"public.a": leaves})) == {"public.a": leaves}
    assert of_mark('{"public.a":{"1":["public.a_1",10]}}') == {"public.a": leaves}, "as older versions wrote it"


SHAPES = (
    *EVENTS,
    "create table events_3 partition of events for values from ('2026-03-01') to ('2026-04-01')",
    "create table events_rest partition of events default",
    "create table sales (id int, region text, at timestamptz, primary key (id, region, at)) partition by list (region)",
    "create table sales_north partition of sales for values in ('north', 'it''s') partition by range (at)",
    "create table sales_north_1 partition of sales_north for values from ('2026-01-01') to ('2026-02-01')",
    "create table sales_north_2 partition of sales_north for values from ('2026-02-01') to (maxvalue)",
    "create table sales_south partition of sales for values in ('south')",
    "create table pairs (a int, b numeric, c text, primary key (a, b)) partition by range (a, b)",
    "create table pairs_1 partition of pairs for values from (minvalue, minvalue) to (10, -5.5)",
    "create table pairs_2 partition of pairs for values from (10, -5.5) to (20, maxvalue)",
    "create table loose (id int, kind text) partition by list (kind)",
    "create table loose_1 partition of loose for values in ('a', null)",
    "create table loose_2 partition of loose for values in ('b')",
    "alter table loose replica identity full",
    "alter table loose_1 replica identity full",
    "alter table loose_2 replica identity full",
    "create table hashed (id int primary key) partition by hash (id)",
    "create table hashed_1 partition of hashed for values with (modulus 2, remainder 0)",
    "create table hashed_2 partition of hashed for values with (modulus 2, remainder 1)",
)
FILLED = (
    "insert into events select n, date '2026-01-01' + n, 'x' from generate_series(0, 80) n",
    "insert into sales select n, r, timestamptz '2026-01-20 00:00Z' + n * interval '12 hours'"
    " from generate_series(0, 40) n, unnest('{north,it''s,south}'::text[]) r",
    "insert into pairs select a, b, 'x' from generate_series(-3, 20, 1) a, unnest('{-9,-5.50,-5.4,7}'::numeric[]) b",
    "insert into loose select n, (array['a', 'b', null])[1 + n % 3] from generate_series(1, 9) n",
    "insert into hashed select generate_series(1, 20)",
)
GONE = (
    "drop table events_1",
    "alter table events detach partition events_2",
    "begin; drop table events_3;"
    " create table events_4 partition of events for values from ('2026-03-10') to ('2026-04-01');"
    " insert into events values (100, '2026-03-11', 'new'), (70, '2026-03-12', 'again'); commit",
    "insert into events values (3, '2026-01-04', 'into the default partition')",
    "drop table sales_north_1",
    "truncate sales_south",
    "insert into sales values (1, 'south', '2026-01-20 12:00Z')",
    "drop table pairs_1",
    "alter table pairs detach partition pairs_2",
    "delete from pairs_2 where b > 0",
    "alter table pairs attach partition pairs_2 for values from (10, -5.5) to (20, maxvalue)",
    "drop table loose_1",
)


def test_rows_of_partitions_that_went_are_deleted_in_the_log_and_in_the_stores(
    rig: Rig, redis_url: str, tmp_path: Path
) -> None:
    rig.capture_tables(*SHAPES, partitions={"removed": "delete"})
    stores: list[Any] = [RedisSettings(url=redis_url), DeltaSettings(path=str(tmp_path / "lake"))]
    program = rig.start()
    rig.wait_caught_up(program)
    wait_until(lambda: "partitions" in _marks(rig), 30, "the first look")
    rig.database.execute(*FILLED)
    rig.wait_caught_up(program)
    replay(rig.settings, stores, ReplayRange(), lambda _progress: None, dry_run=False)
    rig.database.execute(*GONE, "drop table hashed_1")
    _wait_refilled(rig, program, {"public.events", "public.sales", "public.pairs", "public.loose"})
    rig.database.execute("insert into events values (101, '2026-03-13', 'after')", "vacuum full sales_south")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal("public.events", "public.pairs", "public.loose")
    told = why.events(cdc.log.open_reader(rig.settings), "public.events", '{"id":5,"at":"2026-01-06"}', 60)
    assert [event.op for event in told] == ["c", "p"]
    said = [text for text in _notices(rig) if "public.hashed_1" in text]
    assert "its rows stay in the stores, because it is a HASH partition" in said[0]
    for _ in range(2):
        replay(rig.settings, stores, ReplayRange(), lambda _progress: None, dry_run=False)
        for table in ("public.events", "public.sales", "public.pairs", "public.loose"):
            _assert_held(rig, redis_url, tmp_path / "lake", table)


def _assert_held(rig: Rig, redis_url: str, lake: Path, table: str) -> None:
    """Both stores have the source's rows and no other."""
    schemas = {str(schema.table): schema for schema in cdc.log.open_reader(rig.settings).schemas.newest()}
    wanted = rig.ask(f"select count(*) from {table}")
    assert len(rig.folded(table)) == wanted
    redis = open_redis(RedisSettings(url=redis_url), SinkContext(rig.state))
    delta = open_delta(DeltaSettings(path=str(lake)), SinkContext(rig.state))
    assert [redis.stored(schemas[table]).num_rows, delta.stored(schemas[table]).num_rows] == [wanted, wanted], table


def _wait_refilled(rig: Rig, program: Program, tables: set[str]) -> None:
    def done() -> bool:
        assert program.running(), program.said()[-3000:]
        found: Any = rig.status().get("backfills", [])
        return {one["table"] for one in found} >= tables and all(one["state"] == "done" for one in found)

    wait_until(done, 60, "the backfills of what went and came")


def test_rows_of_an_attached_partition_are_read_also_after_a_stop_and_beat_what_its_removal_left(rig: Rig) -> None:
    rig.capture_tables(*EVENTS, partitions={"removed": "delete"})
    program = rig.start()
    rig.wait_caught_up(program)
    wait_until(lambda: "partitions" in _marks(rig), 30, "the first look")
    rig.database.execute("insert into events select n, date '2026-01-01' + n, 'x' from generate_series(0, 50) n")
    rig.database.execute("alter table events detach partition events_2")
    _wait_refilled(rig, program, {"public.events"})
    assert program.terminate() == 0
    rig.assert_equal()
    assert len(rig.folded("public.events")) == 31
    with rig.database.connect() as busy:  # keeps the slot's restart_lsn below everything that follows
        busy.execute("begin; select pg_current_xact_id()")
        rig.database.execute(
            "update events_2 set what = 'changed while detached'",
            "alter table events attach partition events_2 for values from ('2026-02-01') to ('2026-03-01')",
            "create table side (id int not null, at date not null, what text)",
            "insert into side values (90, '2026-07-01', 'came with it')",
            "alter table events attach partition side default",
        )
        program = rig.start()
        wait_until(lambda: len(_notices(rig)) == 2, 60, "the notices")
        _wait_refilled(rig, program, {"public.events"})
        assert program.terminate() == 0
    rig.assert_equal()
    assert len(rig.folded("public.events")) == 52


def _marks(rig: Rig) -> str:
    return "".join(path.read_bytes().decode("latin-1") for path in (rig.state / "log" / "hot").iterdir())


def _notices(rig: Rig) -> list[str]:
    found = rig.status().get("notices", [])
    return found if isinstance(found, list) else []
