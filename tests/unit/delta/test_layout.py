"""How tables lie in Delta, and how they follow their source."""

import pyarrow as pa
import pytest

from cdc.errors import SinkError
from cdc.model import Column, PgType, TableId, TableSchema
from sinks.delta.schema.layout import KEY_TEXT, LayoutOptions, evolve, folder, new_layout

INT2, INT4, INT8 = PgType(21, "int2"), PgType(23, "int4"), PgType(20, "int8")
TEXT, NUMERIC = PgType(25, "text"), PgType(1700, "numeric")


def table(*columns: Column, identity: str = "d") -> TableSchema:
    return TableSchema(TableId("public", "items"), columns, 1, identity=identity)


ID = Column("id", INT4, key=True)


def test_key_columns_come_first_so_that_their_statistics_exist() -> None:
    wide = [Column(f"c{number}", TEXT) for number in range(40)]
    layout = new_layout(table(*wide, ID))
    assert layout.arrow.names[:2] == ["id", "c0"]
    assert layout.arrow.names[-3:] == ["_millrace_version", "_millrace_deleted", "_millrace_commit_ts"]


def test_a_table_whose_whole_row_is_the_key_is_told_apart_by_text() -> None:
    layout = new_layout(table(Column("a", INT4, key=True), Column("b", TEXT, key=True), identity="f"))
    assert layout.key == (KEY_TEXT,)


def test_a_table_without_a_key_is_refused_with_a_remedy() -> None:
    with pytest.raises(SinkError, match=r"public\.items has no key.*REPLICA IDENTITY FULL"):
        new_layout(table(Column("a", INT4)))


@pytest.mark.parametrize("name", ["_millrace_version", "ID"])
def test_a_name_that_delta_cannot_hold_is_refused_with_a_remedy(name: str) -> None:
    with pytest.raises(SinkError, match=r"Rename the column"):
        new_layout(table(ID, Column(name, INT4)))


def test_new_columns_are_added_and_dropped_ones_stay() -> None:
    stored = new_layout(table(ID, Column("old", TEXT))).arrow
    evolution = evolve(table(ID, Column("new", INT8)), stored)
    assert [field.name for field in evolution.added] == ["new"]
    assert [field.name for field in evolution.layout.leftover] == ["old"]


@pytest.mark.parametrize(
    ("before", "after", "type_"),
    [
        (Column("n", INT2), Column("n", INT8), pa.int64()),
        (Column("n", INT4), Column("n", INT8), pa.int64()),
        (Column("n", NUMERIC, ((10 << 16) | 2) + 4), Column("n", NUMERIC, ((20 << 16) | 4) + 4), pa.decimal128(20, 4)),
    ],
)
def test_a_wider_type_widens_the_stored_column(before: Column, after: Column, type_: pa.DataType) -> None:
    evolution = evolve(table(ID, after), new_layout(table(ID, before)).arrow)
    assert dict(evolution.rewritten) == {"n": pa.field("n", type_)}


def test_a_narrower_type_stays_in_the_wide_column() -> None:
    evolution = evolve(table(ID, Column("n", INT2)), new_layout(table(ID, Column("n", INT8))).arrow)
    assert not evolution.rewritten and not evolution.added
    assert evolution.layout.arrow.field("n").type == pa.int64()


def test_another_kind_of_type_stops_by_default_and_names_the_column_and_the_remedy() -> None:
    stored = new_layout(table(ID, Column("n", INT4))).arrow
    with pytest.raises(SinkError, match=r"column n is integer in Delta and now string.*type_change: new_column"):
        evolve(table(ID, Column("n", TEXT)), stored)


def test_another_kind_of_type_can_go_on_in_a_new_column_and_finds_it_again() -> None:
    stored = new_layout(table(ID, Column("n", INT4))).arrow
    changed = table(ID, Column("n", TEXT))
    first = evolve(changed, stored, LayoutOptions(type_change="new_column"))
    assert [field.name for field in first.added] == ["n__string"]
    again = evolve(changed, first.layout.arrow, LayoutOptions(type_change="new_column"))
    assert not again.added
    assert [(one.column.name, one.name) for one in again.layout.placed] == [("id", "id"), ("n", "n__string")]
    assert [field.name for field in again.layout.leftover] == ["n"]


def test_a_key_never_moves_to_another_column() -> None:
    stored = new_layout(table(ID)).arrow
    with pytest.raises(SinkError, match="column id is integer"):
        evolve(table(Column("id", TEXT, key=True)), stored, LayoutOptions(type_change="new_column"))


def test_a_column_kept_as_text_holds_what_no_type_does() -> None:
    layout = new_layout(table(ID, Column("at", PgType(1184, "timestamptz"))), LayoutOptions(frozenset({"at"})))
    assert layout.arrow.field("at").type == pa.string()


def test_folders_are_safe_and_distinct() -> None:
    tables = [TableId("a", "b"), TableId("a.b", "c"), TableId("a", "b.c"), TableId("..", "/etc"), TableId("ä", "b c")]
    names = [folder(one) for one in tables]
    assert len(set(names)) == len(names)
    assert all("/" not in name and not name.startswith(".") for name in names)
    assert names[0] == "a.b"
