"""The reader into the segment log, on a real server, in the common and the odd cases."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence

import psycopg
import pytest

from cdc.capture.pgoutput.events import LogicalMessage
from cdc.capture.replication.captured_tables import waiting_tables
from cdc.capture.replication.stream import NoListener
from cdc.capture.source.schema_policy import CheckedSchemas, Policy
from cdc.capture.transactions.assembly import SpilledTransaction
from cdc.errors import MillraceError
from cdc.log.guarded import GuardedLog
from cdc.model import LOG_SCHEMA, Entry, Op, TableId
from tests.fix_capture import MakeRig, Rig
from tests.fix_processes import wait_until
from tests.fix_servers import Database, PostgresServer, unique

ITEMS = "create table items (id int primary key, label text, amount numeric(12,2), big text)"


@pytest.fixture
def items(rig: Rig) -> Rig:
    """A captured table, empty."""
    rig.capture_tables(ITEMS)
    rig.begin()
    return rig


def test_every_kind_of_change_is_in_the_log_once_and_folds_to_the_source(items: Rig) -> None:
    items.follow(
        "insert into items select g, 'l' || g, g / 7.0, 'x' from generate_series(1, 500) g",
        "update items set label = 'changed' where id % 3 = 0",
        "delete from items where id % 5 = 0",
        "update items set id = id + 10000 where id % 7 = 0",
    )
    items.assert_equal()
    items.assert_once_in_order()


def test_a_reader_that_starts_late_finds_everything_committed_meanwhile(items: Rig) -> None:
    items.database.execute("insert into items select g, 'a' from generate_series(1, 50) g")
    with items.following() as following:
        following.reaches(items.now())
    items.database.execute("update items set label = 'b'", "insert into items values (99)")
    with items.following() as following:
        following.reaches(items.now())
    items.assert_equal()
    items.assert_once_in_order()


def test_a_rolled_back_transaction_and_savepoint_leave_nothing(items: Rig) -> None:
    items.follow(
        "begin; insert into items values (1, 'kept'); savepoint a; insert into items values (2, 'gone');"
        " rollback to a; insert into items values (3, 'kept'); commit",
        "begin; insert into items values (4, 'gone'); rollback",
    )
    assert sorted(items.folded("public.items")) == ['{"id":1}', '{"id":3}']
    assert len(items.rows("public.items")) == 2


def test_an_update_keeps_the_large_column_it_did_not_send(items: Rig) -> None:
    items.follow(
        "alter table items alter big set storage external",
        "insert into items values (1, 'a', 1, repeat('y', 10000))",
        "update items set label = 'b'",
    )
    last = items.rows("public.items")[-1]
    assert last["unchanged"] == ["big"]
    items.assert_equal()


def test_insert_delete_insert_of_one_key_ends_with_the_last(items: Rig) -> None:
    items.follow(
        "begin; insert into items values (1, 'a'); delete from items; insert into items values (1, 'b');"
        " delete from items; insert into items values (1, 'c'); commit"
    )
    items.assert_equal()
    assert [row["op"] for row in items.rows("public.items")] == ["c", "d", "c", "d", "c"]


def test_keys_swapped_inside_a_transaction_end_up_swapped(items: Rig) -> None:
    items.database.execute("insert into items values (1, 'one'), (2, 'two')")
    items.follow(
        "begin; update items set id = 3 where id = 1; update items set id = 1 where id = 2;"
        " update items set id = 2 where id = 3; commit"
    )
    items.assert_equal()


def test_several_rows_of_one_copy_share_an_lsn_and_all_arrive(items: Rig) -> None:
    with items.following() as following:
        with items.database.connect() as connection, connection.cursor().copy("copy items (id) from stdin") as copy:
            for number in range(500):
                copy.write_row((number,))
        following.reaches(items.now())
    rows = items.rows("public.items")
    assert len(rows) == 500
    assert len({row["version"] for row in rows}) < 500
    items.assert_once_in_order()


@pytest.mark.parametrize("budget", [64 << 20, 50_000])
def test_a_streamed_transaction_with_aborted_savepoints_keeps_only_survivors(
    items: Rig, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In memory, and spilled to disk."""
    monkeypatch.setattr("cdc.capture.replication.loop._OPEN_BYTES", budget)
    items.database.execute(
        f"alter role postgres in database {items.database.name} set logical_decoding_work_mem = '64kB'"
    )
    with items.following() as following, items.database.connect(autocommit=False) as writer:
        writer.execute("insert into items select g, 'top', g, repeat('x', 100) from generate_series(1, 3000) g")
        for number in range(5):
            writer.execute("savepoint a")
            first = 10_000 * (number + 1)
            writer.execute(
                "insert into items select g, 'sub', g, repeat('x', 100) from generate_series(%s::int, %s::int) g",
                (first, first + 999),
            )
            items.database.execute(f"insert into items values ({100_000 + number}, 'beside')")
            writer.execute("rollback to a" if number % 2 else "release a")
        writer.commit()
        following.reaches(items.now())
    items.assert_equal()
    items.assert_once_in_order()
    assert len(items.rows("public.items")) == 3000 + 3 * 1000 + 5
    streamed = "select coalesce(max(stream_txns), 0) from pg_stat_replication_slots where slot_name = %s"
    wait_until(lambda: items.ask(streamed, items.source["slot"]), 10, "the server's count of streamed transactions")


class _Peeks(NoListener):
    """Looks at the beginning of each large transaction, as backfills do."""

    def transactions(self, item: Entry | SpilledTransaction) -> None:
        if isinstance(item, SpilledTransaction):
            next(item.parts())


def test_a_transaction_larger_than_memory_is_set_aside_and_published_whole(
    items: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.capture.replication.loop._OPEN_BYTES", 200_000)
    monkeypatch.setattr("cdc.capture.replication.stream._FEED_MESSAGES", 1000)
    with items.following(_Peeks()) as following:
        items.database.execute("insert into items select g, 'l' || g, g, 'x' from generate_series(1, 20000) g")
        items.database.execute("insert into items values (0, 'next')")
        following.reaches(items.now())
    items.assert_equal()
    items.assert_once_in_order()


def test_a_streamed_transaction_that_rolls_back_leaves_nothing(items: Rig) -> None:
    items.database.execute(
        f"alter role postgres in database {items.database.name} set logical_decoding_work_mem = '64kB'"
    )
    with items.following() as following, items.database.connect(autocommit=False) as writer:
        writer.execute("insert into items select g, 'x', g, repeat('x', 100) from generate_series(1, 5000) g")
        writer.rollback()
        items.database.execute("insert into items values (1, 'kept')")
        following.reaches(items.now())
    assert len(items.rows("public.items")) == 1


@pytest.mark.parametrize("survives", [True, False])
def test_columns_added_in_a_streamed_transaction_count_only_if_it_commits(items: Rig, survives: bool) -> None:
    items.database.execute(
        f"alter role postgres in database {items.database.name} set logical_decoding_work_mem = '64kB'",
        "insert into items values (0, 'before')",
    )
    with items.following() as following, items.database.connect(autocommit=False) as writer:
        writer.execute("alter table items add column extra int default 5")
        writer.execute("insert into items select g, 'x', g, repeat('x', 100) from generate_series(1, 5000) g")
        if survives:
            writer.commit()
        else:
            writer.rollback()
        items.database.execute("insert into items (id, label) values (9999, 'after')")
        following.reaches(items.now())
        schemas = following.reader._log.schemas
        names = [column.name for schema in schemas.newest() for column in schema.columns]
    assert ("extra" in names) is survives
    assert {row["schema_id"] for row in items.rows()} == ({1, 2} if survives else {1})
    if survives:  # the rows of before have it too, but no change says so
        items.database.execute("update items set label = 'touched' where id = 0")
        with items.following() as following:
            following.reaches(items.now())
    items.assert_equal()


def test_interleaved_writers_end_in_commit_order(items: Rig) -> None:
    items.database.execute("insert into items select g, 'start' from generate_series(1, 20) g")

    def write(seed: int) -> None:
        with items.database.connect(autocommit=False) as connection:
            for turn in range(30):
                key = (seed * 7 + turn * 3) % 20 + 1
                connection.execute("update items set label = %s where id = %s", (f"{seed}.{turn}", key))
                connection.commit()

    with items.following() as following:
        writers = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        following.reaches(items.now())
    items.assert_equal()
    items.assert_once_in_order()
    versions: dict[str, int] = {}
    for row in items.rows("public.items"):
        assert row["version"] > versions.get(row["key"], 0)
        versions[row["key"]] = row["version"]


def test_truncate_of_several_tables_is_one_change_of_each(rig: Rig) -> None:
    rig.capture_tables(
        "create table a (id int primary key)",
        "create table b (id int primary key, a int references a)",
        "insert into a values (1), (2)",
        "insert into b values (1, 1)",
    )
    rig.begin()
    rig.follow("insert into a values (3)", "truncate a restart identity cascade", "insert into a values (4)")
    assert [row["table"] for row in rig.rows() if row["op"] == Op.TRUNCATE] == ["public.a", "public.b"]
    assert list(rig.folded("public.a")) == ['{"id":4}']


def test_partitions_arrive_as_their_root_also_when_attached_later(rig: Rig) -> None:
    rig.capture_tables(
        "create table events (id int, at date, what text, primary key (id, at)) partition by range (at)",
        "create table events_1 partition of events for values from ('2026-01-01') to ('2026-02-01')",
    )
    rig.begin()
    rig.follow(
        "insert into events values (1, '2026-01-05', 'a')",
        "create table events_2 (what text, at date not null, id int not null, primary key (id, at))",
        "alter table events attach partition events_2 for values from ('2026-02-01') to ('2026-03-01')",
        "insert into events values (2, '2026-02-05', 'b')",
        "update events set at = '2026-02-06' where id = 1",
    )
    assert {row["table"] for row in rig.rows()} == {"public.events"}
    rig.assert_equal()


def test_prepared_transactions_appear_only_when_committed(private_rig: MakeRig) -> None:
    rig = private_rig({"max_prepared_transactions": "10"})
    rig.capture_tables(ITEMS)
    rig.begin()
    with rig.following() as following:
        rig.database.execute("begin; insert into items values (1, 'a'); prepare transaction 'one'")
        rig.database.execute("begin; insert into items values (2, 'b'); prepare transaction 'two'")
        rig.database.execute("insert into items values (3, 'c')")
        following.reaches(rig.now())
        assert list(rig.folded("public.items")) == ['{"id":3}']
        rig.database.execute("commit prepared 'one'", "rollback prepared 'two'")
        following.reaches(rig.now())
    assert sorted(rig.folded("public.items")) == ['{"id":1}', '{"id":3}']


def test_schema_changes_inside_a_transaction_decode_each_row_with_its_own_columns(items: Rig) -> None:
    items.follow(
        "begin; insert into items (id, label) values (1, 'before');"
        " alter table items add column extra text default 'added';"
        " insert into items (id, label) values (2, 'between');"
        " alter table items drop column label; alter table items rename extra to other;"
        " insert into items (id, other) values (3, 'after'); commit",
        "update items set amount = 5 where id = 1",
    )
    rows = items.rows("public.items")
    assert '"label":"before"' in rows[0]["after"] and "extra" not in rows[0]["after"]
    assert '"extra":"added"' in rows[1]["after"]
    assert '"other":"after"' in rows[2]["after"] and "label" not in rows[2]["after"]
    assert '"other":"added"' in rows[3]["after"]


def test_a_replica_identity_that_changes_at_run_time_is_honoured(items: Rig) -> None:
    items.follow(
        "insert into items values (1, 'a')",
        "update items set label = 'b'",
        "alter table items replica identity full",
        "update items set label = 'c'",
        "delete from items",
    )
    rows = items.rows("public.items")
    assert [row["before"] is not None for row in rows] == [False, False, True, True]
    assert {row["key"] for row in rows} == {'{"id":1}'}


def test_a_table_dropped_and_made_again_goes_on_under_its_name(items: Rig) -> None:
    items.follow(
        "insert into items values (1, 'old')",
        "begin; truncate items; drop table items; create table items (id bigint primary key, note jsonb);"
        f" alter publication {items.settings.source.publication} add table items; commit",
        "insert into items values (1, '{\"new\": true}')",
    )
    items.assert_equal()


def test_views_and_unlogged_tables_beside_do_not_disturb(items: Rig) -> None:
    items.follow(
        "create view v as select * from items",
        "create materialized view m as select * from items",
        "create unlogged table u (id int)",
        "insert into u values (1)",
        "insert into items values (1, 'a')",
        "refresh materialized view m",
    )
    assert {row["table"] for row in items.rows()} == {"public.items"}


class _Notes(NoListener):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard_contents: list[bytes] = []
        self.passed_ends: list[int] = []

    def message(self, message: LogicalMessage) -> Sequence[Entry]:
        self.heard_contents.append(message.content)
        return ()


def test_our_messages_reach_the_listener_and_those_of_others_do_not(items: Rig) -> None:
    notes = _Notes()
    with items.following(notes) as following:
        items.database.execute(
            "select pg_logical_emit_message(false, 'millrace', 'plain')",
            "select pg_logical_emit_message(false, 'other', 'not ours')",
            "begin; select pg_logical_emit_message(true, 'millrace', 'committed'); commit",
            "begin; select pg_logical_emit_message(true, 'millrace', 'rolled back'); rollback",
            "insert into items values (1, 'a')",
        )
        following.reaches(items.now())
    assert notes.heard_contents == [b"plain", b"committed"]
    assert len(items.rows()) == 1


def test_an_entry_of_the_listener_lands_between_the_transactions_around_its_message(items: Rig) -> None:
    class Marks(_Notes):
        def message(self, message: LogicalMessage) -> Sequence[Entry]:
            return [Entry(LOG_SCHEMA.empty_table(), message.lsn, {"heard": message.content.decode()})]

    with items.following(Marks()) as following:
        items.database.execute(
            "insert into items values (1, 'a')",
            "select pg_logical_emit_message(false, 'millrace', 'here')",
            "insert into items values (2, 'b')",
        )
        following.reaches(items.now())
        assert following.reader._log.progress().marks["heard"] == "here"
    items.assert_equal()


def test_masked_columns_never_reach_the_log(rig: Rig) -> None:
    rig.capture_tables("create table people (id int primary key, name text, mail text, card text)")
    rig.source["tables"] = [{"name": "public.people", "mask": {"name": "drop", "mail": "hash", "card": "mask"}}]
    rig.source["mask_key"] = "secret key"
    rig.begin()
    rig.follow(
        "alter table people replica identity full",
        "insert into people values (1, 'MARKER-n', 'MARKER-m', 'MARKER-c')",
        "update people set id = 2",
        "delete from people",
    )
    assert len(rig.rows("public.people")) == 4
    assert "MARKER" not in str(rig.rows())
    assert all(b"MARKER" not in path.read_bytes() for path in rig.state.rglob("*") if path.is_file())


@pytest.mark.parametrize("streamed", [False, True], ids=["plain", "streamed"])
def test_a_renamed_table_waits_from_its_first_change_on_also_after_a_restart_and_under_its_old_name(
    items: Rig, streamed: bool
) -> None:
    item, many = TableId("public", "items"), 20_000 if streamed else 2
    items.database.execute(
        f"alter role postgres in database {items.database.name} set logical_decoding_work_mem = '64kB'"
    )
    rename = (
        f"alter table items rename to things; insert into things select g, 'after' from generate_series(3, {many}) g"
    )
    with items.following() as following:
        items.database.execute(
            "insert into items values (1, 'before')",
            f"begin; insert into items values (2, 'before'); {rename}; commit",
            "insert into things values (0, 'after')",
        )
        following.reaches(items.now())
        assert "public.things" in waiting_tables(following.reader._log.progress().marks)[item].remedy
    items.follow("alter table things rename to items", "insert into items values (-1, 'nobody has asked to resume')")
    assert [(row["table"], row["key"]) for row in items.rows()] == [
        ("public.items", '{"id":1}'),
        ("public.items", '{"id":2}'),
    ]


@pytest.mark.parametrize(("policy", "end"), [("lenient", "commit"), ("exception", "rollback")])
def test_a_change_of_columns_in_a_streamed_transaction_has_the_table_wait_and_stops_nothing_if_rolled_back(
    items: Rig, policy: Policy, end: str
) -> None:
    items.database.execute(
        f"alter role postgres in database {items.database.name} set logical_decoding_work_mem = '64kB'"
    )
    fill = "insert into items select g, 'x' from generate_series({}, {}) g"
    with items.following(wrap=lambda log: GuardedLog(log, CheckedSchemas(log.schemas, policy))) as following:
        items.database.execute(
            "insert into items values (0, 'before')",
            f"begin; {fill.format(1, 3000)}; alter table items drop column big; {fill.format(3001, 6000)}; {end}",
            "insert into items values (-1, 'after')",
        )
        following.reaches(items.now())
        waits = waiting_tables(following.reader._log.progress().marks)
    assert list(waits) == ([TableId("public", "items")] if end == "commit" else [])
    assert len(items.rows()) == (3001 if end == "commit" else 2)


def test_types_origins_and_messages_of_others_pass_by(rig: Rig) -> None:
    rig.capture_tables(
        "create type mood as enum ('good', 'bad')",
        "create domain positive as int check (value > 0)",
        "create table items (id int primary key, mood mood, moods mood[], size positive)",
    )
    rig.begin()
    rig.follow(
        "select pg_replication_origin_create('elsewhere')",
        "select pg_replication_origin_session_setup('elsewhere');"
        " insert into items values (1, 'good', '{good,bad}', 5)",
        "alter type mood add value 'odd'",
        "insert into items values (2, 'odd', '{odd}', 6)",
        "select pg_replication_origin_session_reset()",
        "select pg_replication_origin_drop('elsewhere')",
    )
    rig.assert_equal()


@pytest.mark.parametrize(
    ("identity", "keys"),
    [
        ("default", {"id"}),
        ("full", {"id"}),
        ("using index items_code", {"code"}),
    ],
)
def test_every_replica_identity_folds_to_the_source(rig: Rig, identity: str, keys: set[str]) -> None:
    rig.capture_tables(
        "create table items (id int primary key, code text not null, label text)",
        "create unique index items_code on items (code)",
        f"alter table items replica identity {identity}",
    )
    rig.begin()
    rig.follow(
        "insert into items select g, 'c' || g, 'a' from generate_series(1, 20) g",
        "update items set label = 'b' where id > 10",
        "update items set code = 'd' || id where id > 15",
        "update items set id = id + 100 where id < 5",
        "delete from items where id = 7",
    )
    rig.assert_equal()
    assert {tuple(json.loads(row["key"])) for row in rig.rows()} == {tuple(keys)}


def test_a_table_without_a_key_under_full_identity_is_its_own_key(rig: Rig) -> None:
    rig.capture_tables("create table items (a int, b text)", "alter table items replica identity full")
    rig.begin()
    rig.follow(
        "insert into items values (1, 'x'), (2, 'y'), (3, null)",
        "update items set b = 'z' where a = 2",
        "delete from items where a = 1",
    )
    rig.assert_equal()


@pytest.fixture
def encoded(postgres_server: PostgresServer, make_rig: Callable[[Database], Rig]) -> Iterator[Callable[[str], Rig]]:
    """A captured table in a database of another encoding."""
    with contextlib.ExitStack() as made:

        def make(encoding: str) -> Rig:
            name = unique("encoded")
            postgres_server.execute(f"create database {name} encoding '{encoding}' locale 'C' template template0")
            database = Database(postgres_server, name)
            made.callback(database.drop)
            rig = make_rig(database)
            rig.capture_tables("create table items (id int primary key, label text)")
            rig.begin()
            return rig

        yield make


def test_a_database_in_another_encoding_arrives_as_utf8(encoded: Callable[[str], Rig]) -> None:
    rig = encoded("LATIN1")
    rig.follow("insert into items values (1, U&'caf\\00e9')")
    assert json.loads(rig.rows()[0]["after"])["label"] == "café"


def test_bytes_that_are_no_text_in_any_encoding_are_a_clear_error(encoded: Callable[[str], Rig]) -> None:
    rig = encoded("SQL_ASCII")
    with rig.following() as following:
        rig.database.execute("insert into items values (1, 'good')")
        following.reaches(rig.now())
        with psycopg.connect(rig.database.dsn, client_encoding="SQL_ASCII", autocommit=True) as connection:
            connection.execute(b"insert into items values (2, E'bad \\xff')")
        error = following.error()
    assert isinstance(error, MillraceError) and not error.transient
    assert "bad" not in str(error)
    assert len(rig.rows()) == 1


def test_a_row_of_sixty_megabytes_arrives_whole_beside_small_ones(items: Rig) -> None:
    items.follow(
        "insert into items values (1, 'small')",
        "insert into items values (2, 'large', 1, repeat('0123456789', 6000000))",
        "insert into items values (3, 'small')",
    )
    rows = items.rows("public.items")
    assert [len(row["after"]) > 60_000_000 for row in rows] == [False, True, False]
    assert json.loads(rows[1]["after"])["big"] == "0123456789" * 6_000_000
