"""Keys that two rows hold inside a transaction: the stores end with the rows that the table ends with."""

import pytest

from tests.fix_capture import Rig

DEFERRABLE = "create table items (id int primary key deferrable initially deferred, label text)"
KEYLESS = "create table items (id int)"
FULL = "alter table items replica identity full"

SHIFTS = (
    "update items set id = id + 1",
    "update items set id = 10 - id",
    "begin; update items set id = id + 1; update items set label = '' where id = 4; delete from items where id = 5;end",
    "begin; insert into items values (9, 'nine'); delete from items where id = 9; update items set id = id - 1; commit",
    "begin; delete from items where id = 2; insert into items values (2, 'new'); update items set id = id + 2; commit",
)


@pytest.mark.parametrize("work_mem", ["64MB", "64kB"])
def test_a_deferrable_key_that_is_shifted_keeps_every_row(rig: Rig, work_mem: str) -> None:
    """With little memory Postgres streams the transactions, and their rows are put in order at the commit."""
    fill = "insert into items select g, 'row ' || g from generate_series(1, 6) g"
    rig.capture_tables(DEFERRABLE, FULL, fill, snapshot="initial")
    rig.database.execute(
        f"alter role postgres in database {rig.database.name} set logical_decoding_work_mem = '{work_mem}'"
    )
    rig.begin()
    with rig.following() as following:
        for shift in SHIFTS:
            rig.database.execute(shift)
            following.reaches(rig.now())
            rig.assert_equal()
        rig.database.execute(
            "insert into items select g, repeat('x', 99) from generate_series(99, 3000) g; update items set id = id + 1"
        )
        following.reaches(rig.now())
        rig.assert_equal()


def test_rows_of_a_table_without_a_key_that_take_each_others_place_stay(rig: Rig) -> None:
    rig.capture_tables(KEYLESS, FULL, "insert into items select g from generate_series(1, 6) g", snapshot="initial")
    rig.begin()
    with rig.following() as following:
        for shift in (
            "update items set id = id + 1",
            "begin; insert into items values (3); delete from items where id = 3; commit",
        ):
            rig.database.execute(shift)
            following.reaches(rig.now())
            rig.assert_equal()


def test_a_row_inserted_and_deleted_around_a_change_of_columns_is_gone(rig: Rig) -> None:
    """The delete shows the row with its new column: it is the same row all the same."""
    rig.capture_tables("create table items (id int primary key, label text)", FULL)
    rig.begin()
    rig.follow(
        "begin; insert into items values (1, 'a'), (2, 'b'); alter table items add more int default 7;"
        " delete from items where id = 1; commit",
    )
    assert {image["id"] for image in rig.folded("public.items").values()} == {2}
