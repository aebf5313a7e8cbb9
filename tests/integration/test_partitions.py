"""Partitions: one logical table, whatever happens to its parts; and what Postgres does not say is noticed by name."""

import json

from cdc.capture.connect import connect
from cdc.capture.partitions import Leaf, Partitions, mark, notices, of_mark
from cdc.model import TableId
from tests.fix_capture import Rig
from tests.fix_processes import wait_until

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
    rig.capture_tables(*EVENTS)
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
    rig.database.execute("drop table events_1")
    program = rig.start()
    assert "public.events_1 was detached" in wait_until(lambda: _notices(rig), 30, "the notice")[0]
    assert program.terminate() == 0


def test_a_subtree_that_is_attached_is_no_newborn(rig: Rig) -> None:
    rig.capture_tables(*EVENTS)
    rig.begin()
    with connect(rig.settings.source) as connection, rig.following() as following:
        partitions = Partitions(lambda: [TableId("public", "events")], following.reader._log)
        partitions.look(connection)
        rig.database.execute(
            "create table tree (id int not null, at date not null, what text) partition by range (at)",
            "create table leaf partition of tree for values from ('2026-06-01') to ('2026-07-01')",
            "alter table events attach partition tree for values from ('2026-06-01') to ('2027-01-01')",
            "alter table events_1 rename to renamed",
        )
        partitions.look(connection)
        partitions.look(connection)
    assert [notice.message[:32] for notice in partitions.said] == ["Partition public.leaf was attach"]


def test_a_root_that_is_new_or_no_longer_captured_is_no_news() -> None:
    leaves = {1: Leaf("public.a_1", 10)}
    assert list(notices({"public.a": leaves}, {"public.b": leaves})) == []
    assert of_mark(mark({"public.a": leaves})) == {"public.a": leaves}


def _marks(rig: Rig) -> str:
    return "".join(path.read_bytes().decode("latin-1") for path in (rig.state / "log" / "hot").iterdir())


def _notices(rig: Rig) -> list[str]:
    found = rig.status().get("notices", [])
    return found if isinstance(found, list) else []
