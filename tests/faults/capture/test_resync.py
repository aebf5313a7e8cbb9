"""After a lost slot: a resync brings the log, and so every store, back to the source, deletes of the gap included."""

import pytest

from cdc.errors import LogFenced
from cdc.service.capture import resync
from tests.fix_capture import Rig
from tests.fix_processes import wait_until

ITEMS = "create table items (id int primary key, label text)"


def _captured(rig: Rig) -> None:
    """Some rows in the log, then a slot that is lost and changes that nobody saw."""
    rig.capture_tables(ITEMS, "insert into items select g, 'old' from generate_series(1, 20) g", snapshot="initial")
    rig.begin()
    rig.follow("update items set label = 'seen' where id < 5")
    rig.database.execute(
        f"select pg_drop_replication_slot('{rig.source['slot']}')",
        "delete from items where id between 3 and 8",
        "update items set label = 'in the gap' where id > 15",
        "insert into items values (100, 'in the gap')",
    )


def test_a_resync_after_a_lost_slot_restores_equality_with_deletes_made_in_the_gap(rig: Rig) -> None:
    _captured(rig)
    program = rig.start()
    assert program.wait(60) == 1
    assert "millrace resync" in rig.status()["error"]["remedy"]
    resync.request(rig.settings)
    program = rig.start()
    rig.wait_caught_up(program)
    rig.database.execute("insert into items values (101, 'after')")
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal()
    rig.follow("delete from items where id = 1")
    rig.assert_equal()


def test_a_resync_that_is_cut_short_begins_again(rig: Rig) -> None:
    _captured(rig)
    resync.request(rig.settings)
    program = rig.start(fail="snapshot.after_append:kill@1")
    assert program.wait(60) < 0
    rig.database.execute("delete from items where id = 2", "insert into items values (102, 'between')")
    program = rig.start()
    rig.wait_caught_up(program)
    assert program.terminate() == 0
    rig.assert_equal()


def test_a_resync_is_refused_while_the_pipeline_runs(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    rig.begin()
    program = rig.start()
    wait_until(lambda: rig.status().get("state") == "streaming", 60)
    with pytest.raises(LogFenced):
        resync.request(rig.settings)
    assert program.terminate() == 0
