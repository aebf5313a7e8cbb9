"""Chunked snapshots beside the stream: the log stays right whatever happens at the same time."""

import contextlib
import json
import random
from typing import Any

import psycopg
import pytest

from cdc.model import TableId
from cdc.service.observe.uncovered import unfinished
from snapshots.backfill import pace
from snapshots.backfill.chunk_reader import TableReader
from snapshots.backfill.coordinator import Backfills
from snapshots.backfill.requests import Request, control_message
from tests.fix_capture import Rig
from tests.fix_processes import wait_until
from tests.scenes.backfill import FILL, ITEM, ITEMS, SAY, assert_right, backfilling, marks, own, write_once, writers
from tests.scenes.seeds import seeds


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "_FIRST", 20)
    monkeypatch.setattr(pace, "_MOST", 40)


@pytest.fixture
def incremental(rig: Rig) -> Rig:
    """A table with rows that nobody has read yet."""
    rig.capture_tables(ITEMS, "alter table items alter big set storage external", FILL, snapshot="incremental")
    rig.begin()
    return rig


def test_an_incremental_table_is_read_in_chunks(incremental: Rig, small_chunks: None) -> None:
    with backfilling(incremental) as scene:
        done = scene.wait(own())
        scene.catch_up()
    assert done["rows"] == 500
    assert_right(incremental)
    assert len({row["commit_lsn"] for row in incremental.rows()}) > 10
    assert {row["schema_id"] for row in incremental.rows()} == {1}


def test_a_finished_backfill_is_not_repeated_after_a_restart(incremental: Rig) -> None:
    for _ in range(2):
        with backfilling(incremental) as scene:
            scene.wait(own())
            scene.catch_up()
    assert len(incremental.rows()) == 500


@pytest.mark.parametrize("seed", seeds(6, 200))
def test_changes_between_the_marks_win_over_the_chunk(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, small_chunks: None, seed: int
) -> None:
    """Scenario 34, with every chunk raced: before its read, after it, and by transactions open meanwhile."""
    fill = FILL.replace("500)", "60)").replace("50)", "3000)")
    rig.capture_tables(ITEMS, "alter table items alter big set storage external", fill, snapshot="incremental")
    rig.begin()
    rng = random.Random(seed)
    read = TableReader._read

    def raced(*arguments: Any) -> Any:
        with rig.database.connect() as now, rig.database.connect(autocommit=False) as later:
            now.execute("set lock_timeout = '20ms'")
            later.execute("set lock_timeout = '20ms'")
            _write_some(later, rng)
            _write_some(now, rng)
            rows = read(*arguments)
            _write_some(now, rng)
            with contextlib.suppress(psycopg.errors.InFailedSqlTransaction):
                later.commit()
        return rows

    monkeypatch.setattr(TableReader, "_read", raced)
    with backfilling(rig) as scene:
        scene.wait(own())
        scene.catch_up()
        assert_right(rig)
        scene.wait(scene.ask(Request(ITEM)))
        scene.catch_up()
        assert_right(rig)


def _write_some(connection: psycopg.Connection[Any], rng: random.Random) -> None:
    with contextlib.suppress(psycopg.errors.LockNotAvailable, psycopg.errors.InFailedSqlTransaction):
        for _ in range(rng.randint(1, 12)):
            write_once(connection, rng, 70)


def test_writers_at_full_speed_and_chunks_end_in_the_same_state(incremental: Rig, small_chunks: None) -> None:
    with writers(incremental, 3, keys=520), backfilling(incremental) as scene:
        scene.wait(own())
    with incremental.following() as following:
        following.reaches(incremental.now())
    assert_right(incremental)


@pytest.fixture
def snapshotted(rig: Rig) -> Rig:
    """A table that the first snapshot has read."""
    rig.capture_tables(ITEMS, FILL, snapshot="initial")
    rig.begin()
    return rig


def reads(rig: Rig, first: int = 500) -> list[int]:
    """The ids that backfills have read, after the rows of the first snapshot."""
    return [json.loads(row["key"])["id"] for row in rig.rows("public.items") if row["op"] == "r"][first:]


def test_a_request_reads_the_whole_table_again(snapshotted: Rig) -> None:
    with backfilling(snapshotted) as scene:
        done = scene.wait(scene.ask(Request(ITEM)))
        scene.catch_up()
    assert done["rows"] == 500
    assert sorted(reads(snapshotted)) == list(range(1, 501))
    assert_right(snapshotted)


@pytest.mark.parametrize(
    ("request_", "ids"),
    [
        (Request(ITEM, where="id % 100 = 7 or label = 'l3'"), [3, 7, 107, 207, 307, 407]),
        (Request(ITEM, since=("id", "498")), [498, 499, 500]),
        (Request(ITEM, keys=(("5",), ("77",), ("9999",))), [5, 77]),
        (Request(ITEM, where="id < 9", keys=(("5",), ("77",))), [5]),
    ],
    ids=["where", "since", "keys", "both"],
)
def test_a_part_of_a_table_is_read_again(snapshotted: Rig, request_: Request, ids: list[int]) -> None:
    with backfilling(snapshotted) as scene:
        scene.wait(scene.ask(request_))
        scene.catch_up()
    assert sorted(reads(snapshotted)) == ids


def test_a_request_without_our_signature_is_not_obeyed(incremental: Rig, small_chunks: None) -> None:
    """Whoever may connect may send messages, of any role: neither a condition, nor a cancelled first snapshot."""
    with backfilling(incremental) as scene:
        wait_until(lambda: scene.job(own())["rows"] >= 40, what="the first chunks")
        incremental.ask(SAY, '{"cancel": "all"}')
        incremental.ask(SAY, control_message("cancel", "all", b"guessed"))
        forged = [scene.ask(Request(ITEM, where=where), key=b"guessed") for where in ("true", "")]
        scene.wait(own())
        scene.catch_up()
        assert [scene.job(identity)["state"] for identity in forged] == ["unknown", "unknown"]
    assert_right(incremental)


def test_a_cancelled_first_snapshot_is_said_to_be_unfinished_and_can_be_resumed(
    incremental: Rig, small_chunks: None
) -> None:
    with backfilling(incremental) as scene:
        wait_until(lambda: scene.job(own())["rows"] >= 40, what="the first chunks")
        scene.tell("cancel", "all")
        scene.wait(own(), "cancelled")
        scene.catch_up()
    with backfilling(incremental) as scene:
        for _ in range(30):
            forgotten = scene.ask(Request(ITEM, keys=(("1",),)))
        scene.wait(forgotten)
        assert [job["id"] for job in unfinished({"backfills": scene.backfills.facts()})] == [own()]
        scene.tell("resume", own())
        wait_until(lambda: not unfinished({"backfills": scene.backfills.facts()}), 20, "the first snapshot is whole")
        scene.catch_up()
    assert_right(incremental)


@pytest.mark.parametrize(
    "content", ["", "nonsense", "[]", "{}", "7", '{"backfill": {}}', '{"backfill": 1}', '{"high": "x"}']
)
def test_messages_that_mean_nothing_are_passed_over(snapshotted: Rig, content: str) -> None:
    with backfilling(snapshotted) as scene:
        snapshotted.ask("select pg_logical_emit_message(false, 'millrace', %s)::text", content)
        snapshotted.ask("select pg_logical_emit_message(true, 'millrace', %s)::text", content)
        snapshotted.database.execute("insert into items values (1000)")
        scene.catch_up()
    assert_right(snapshotted)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request(TableId("public", "nothing")), "not captured"),
        (Request(ITEM, where="no_such_column = 1"), "no_such_column"),
        (Request(ITEM, keys=(("1", "2"),)), "do not match its key (id)"),
    ],
    ids=["table", "condition", "keys"],
)
def test_a_request_that_cannot_be_met_fails_with_its_reason_and_others_go_on(
    snapshotted: Rig, request_: Request, reason: str
) -> None:
    with backfilling(snapshotted) as scene:
        failed = scene.ask(request_)
        assert reason in scene.wait(failed, "failed")["reason"]
        scene.wait(scene.ask(Request(ITEM, keys=(("1",),))))
        scene.catch_up()
    assert json.loads(marks(snapshotted)[f"backfill:{failed}"])["state"] == "failed"


def test_a_backfill_is_paused_resumed_and_cancelled(incremental: Rig, small_chunks: None) -> None:
    with backfilling(incremental) as scene:
        wait_until(lambda: scene.job(own())["rows"] >= 40, what="the first chunks")
        scene.tell("pause", own())
        scene.wait(own(), "paused")
        scene.catch_up()
    with backfilling(incremental) as scene:
        paused = scene.job(own())
        assert paused["state"] == "paused"
        assert 40 <= paused["rows"] < 500
        scene.tell("resume", own())
        scene.wait(own())
        again = scene.ask(Request(ITEM))
        scene.tell("cancel", "all")
        scene.wait(again, "cancelled", "done")
        scene.catch_up()
    assert_right(incremental)


def test_a_restart_goes_on_where_the_last_chunk_ended(incremental: Rig, small_chunks: None) -> None:
    with backfilling(incremental) as scene:
        wait_until(lambda: scene.job(own())["rows"] >= 100, what="some chunks")
    with backfilling(incremental) as scene:
        assert scene.wait(own())["rows"] == 500
        scene.catch_up()
    keys = [row["key"] for row in incremental.rows()]
    assert len(keys) == len(set(keys)) == 500


def test_a_table_without_a_key_is_read_by_pages(rig: Rig, small_chunks: None) -> None:
    rig.capture_tables(
        "create table items (a int, b text)",
        "alter table items replica identity full",
        "insert into items select g, repeat('y', 500) || g from generate_series(1, 300) g",
        snapshot="incremental",
    )
    rig.begin()
    with backfilling(rig) as scene:
        assert scene.wait(own())["rows"] == 300
        scene.catch_up()
    rig.assert_equal()
    assert len({row["commit_lsn"] for row in rig.rows()}) > 3


@pytest.mark.parametrize("restarted", [False, True])
def test_rows_that_vacuum_full_moves_between_two_chunks_are_not_missed(
    rig: Rig, small_chunks: None, restarted: bool
) -> None:
    rig.capture_tables(
        "create table items (a int, b text)",
        "alter table items replica identity full",
        "insert into items select g, repeat('y', 500) || g from generate_series(1, 600) g",
        "delete from items where a <= 300",
        snapshot="incremental",
    )
    rig.begin()
    with backfilling(rig) as scene:
        wait_until(lambda: scene.job(own())["rows"] >= 10, what="some chunks")
        scene.tell("pause", own())
        scene.wait(own(), "paused")
        assert scene.job(own())["rows"] < 250
        if not restarted:
            rig.database.execute("vacuum full items")
            scene.tell("resume", own())
            scene.wait(own())
            scene.catch_up()
    if restarted:
        rig.database.execute("vacuum full items")
        with backfilling(rig) as scene:
            scene.tell("resume", own())
            scene.wait(own())
            scene.catch_up()
    rig.assert_equal()


def test_a_table_that_is_rewritten_while_a_chunk_waits_for_it_is_not_taken_for_empty(
    incremental: Rig, small_chunks: None
) -> None:
    """The chunk's snapshot is older than the new file, in which it sees no row."""
    with incremental.database.connect() as connection, backfilling(incremental) as scene:
        wait_until(lambda: scene.job(own())["rows"] >= 20, what="a chunk")
        connection.execute("begin")
        connection.execute("lock table items in access exclusive mode")
        blocked = "select count(*) from pg_locks where not granted and relation = 'items'::regclass"
        wait_until(lambda: incremental.ask(blocked) > 0, 30, "the backfill to wait for the table")
        assert scene.job(own())["rows"] < 500
        connection.execute("alter table items alter column label type text using label || ''")
        connection.execute("commit")
        assert scene.wait(own())["rows"] == 500
        scene.catch_up()
    assert_right(incremental)


def test_a_query_is_interrupted_only_when_its_backfill_counts_as_cancelled(
    incremental: Rig, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted query of a running backfill would be a failed one."""
    interrupt, states = Backfills._interrupt, list[str]()

    def noting(backfills: Backfills, identity: str = "") -> None:
        states.extend(job.state.value for job in backfills.jobs() if job.id == identity)
        interrupt(backfills, identity)

    monkeypatch.setattr(Backfills, "_interrupt", noting)
    with incremental.database.connect(autocommit=False) as connection, backfilling(incremental) as scene:
        connection.execute("lock table items in access exclusive mode")
        blocked = "select count(*) from pg_locks where not granted and relation = 'items'::regclass"
        wait_until(lambda: incremental.ask(blocked) > 0, 30, "the backfill to wait for the table")
        scene.tell("cancel", "all")
        wait_until(lambda: not incremental.ask(blocked), 30, "its query to end")
        assert (scene.job(own())["state"], states) == ("cancelled", ["cancelled"])


def test_partitions_and_keys_of_several_columns_are_walked_in_order(rig: Rig, small_chunks: None) -> None:
    rig.capture_tables(
        "create table items (note text, b text, a int, primary key (a, b)) partition by hash (a)",
        "create table items_0 partition of items for values with (modulus 2, remainder 0)",
        "create table items_1 partition of items for values with (modulus 2, remainder 1)",
        "insert into items select 'n', chr(97 + g % 26) || '''x', g / 26 from generate_series(1, 300) g",
        snapshot="incremental",
    )
    rig.begin()
    with backfilling(rig) as scene:
        assert scene.wait(own())["rows"] == 300
        scene.catch_up()
    rig.assert_equal("public.items")
    assert {row["table"] for row in rig.rows()} == {"public.items"}


def test_masked_keys_never_stand_in_the_marks(rig: Rig, small_chunks: None) -> None:
    rig.capture_tables(
        "create table items (mail text primary key, v int)",
        "insert into items select 'someone' || g || '@example.org', g from generate_series(1, 100) g",
        snapshot="incremental",
    )
    rig.source["tables"][0]["mask"] = {"mail": "hash"}
    rig.source["mask_key"] = "a key"
    rig.begin()
    with backfilling(rig) as scene:
        scene.wait(own())
        scene.catch_up()
    assert len({row["key"] for row in rig.rows()}) == 100
    for path in (rig.state / "log").rglob("*"):
        assert not path.is_file() or b"someone" not in path.read_bytes()


def test_a_table_added_later_has_the_rows_of_before_and_those_of_open_transactions(snapshotted: Rig) -> None:
    """Scenario 18: a transaction that wrote before the table was published is not in the stream."""
    snapshotted.database.execute("create table more (id int primary key)", "insert into more values (1)")
    with snapshotted.database.connect(autocommit=False) as straddling:
        straddling.execute("insert into more values (2)")
        snapshotted.database.execute("alter publication millrace add table more")
        snapshotted.source["tables"].append({"name": "public.more", "snapshot": "initial"})
        with backfilling(snapshotted) as scene:
            wait_until(lambda: scene.job(own("public.more")).get("waiting"), what="waiting for the open transaction")
            snapshotted.database.execute("insert into more values (3)")
            straddling.commit()
            scene.wait(own("public.more"))
            scene.catch_up()
    snapshotted.assert_equal("public.more")


def test_columns_added_during_a_backfill_are_in_the_rows_read_afterwards(incremental: Rig, small_chunks: None) -> None:
    with backfilling(incremental) as scene:
        wait_until(lambda: scene.job(own())["rows"] >= 40, what="the first chunks")
        incremental.database.execute(
            "alter table items add column extra int default 7", "update items set label = 'new' where id in (1, 499)"
        )
        scene.wait(own())
        scene.wait(scene.ask(Request(ITEM)))
        scene.catch_up()
    incremental.assert_equal("public.items")


def test_a_transaction_too_large_for_memory_between_the_marks_wins(
    incremental: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.capture.replication.loop._OPEN_BYTES", 10_000)
    read, once = TableReader._read, iter([True])

    def raced(*arguments: Any) -> Any:
        rows = read(*arguments)
        if next(once, False):
            incremental.database.execute(
                "begin; update items set label = repeat('large', 100) where id < 300;"
                " delete from items where id > 450; commit"
            )
        return rows

    monkeypatch.setattr(TableReader, "_read", raced)
    with backfilling(incremental) as scene:
        scene.wait(own())
        scene.catch_up()
    assert_right(incremental)


@pytest.mark.parametrize("mode", ["initial", "incremental"])
def test_writers_from_before_the_slot_to_the_end_see_an_equal_log(rig: Rig, mode: str) -> None:
    rig.capture_tables(ITEMS, "alter table items alter big set storage external", FILL, snapshot=mode)
    with writers(rig, 2, keys=100):
        rig.begin()
        with backfilling(rig) as scene:
            if mode == "incremental":
                scene.wait(own())
            scene.wait(scene.ask(Request(ITEM)))
    with backfilling(rig) as scene:
        scene.catch_up()
    assert_right(rig)


def test_a_table_that_wants_no_snapshot_has_only_its_changes(rig: Rig) -> None:
    rig.capture_tables(ITEMS, FILL, snapshot="never")
    rig.begin()
    with backfilling(rig) as scene:
        assert scene.backfills.facts() == []
        rig.database.execute("update items set label = 'new' where id = 1")
        scene.catch_up()
    assert [(row["op"], row["key"]) for row in rig.rows()] == [("u", '{"id":1}')]


@pytest.mark.parametrize("victim", ["millrace backfill", "millrace capture"])
def test_a_chunk_whose_connection_or_stream_is_cut_is_read_again(
    incremental: Rig, monkeypatch: pytest.MonkeyPatch, small_chunks: None, victim: str
) -> None:
    read, cuts = TableReader._read, iter([3, 7])

    def cut(*arguments: Any) -> Any:
        rows = read(*arguments)
        counted[0] += 1
        if counted[0] == due[0]:
            due[0] = next(cuts, 0)
            incremental.ask(
                "select count(pg_terminate_backend(pid, 5000)) from pg_stat_activity"
                " where datname = current_database() and application_name = %s",
                victim,
            )
        return rows

    counted, due = [0], [next(cuts)]
    monkeypatch.setattr(TableReader, "_read", cut)
    with backfilling(incremental) as scene:
        assert scene.wait(own())["rows"] == 500
        scene.catch_up()
    assert_right(incremental)
    assert due == [0]
