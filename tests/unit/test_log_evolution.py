"""Schema policies: pure."""

import pytest

from cdc.log.evolution import ChangeKind, decide, differences
from cdc.model import Column, PgType, TableId, TableSchema, TypeKind

INT2, INT4, INT8 = PgType(21, "int2"), PgType(23, "int4"), PgType(20, "int8")
TEXT, VARCHAR, NUMERIC = PgType(25, "text"), PgType(1043, "varchar"), PgType(1700, "numeric")
ID = Column("id", INT4, key=True)
NAME = Column("name", VARCHAR, 4 + 20)
POLICIES = ("evolve", "lenient", "ignore", "exception")


def schema(*columns: Column) -> TableSchema:
    return TableSchema(TableId("public", "items"), columns, oid=1)


def numeric(precision: int, scale: int) -> int:
    return (precision << 16 | scale) + 4


OLD = schema(ID, NAME)
MORE = schema(ID, NAME, Column("note", TEXT))
FEWER = schema(ID)
WIDER = schema(ID, Column("name", TEXT))
NARROWER = schema(ID, Column("name", VARCHAR, 4 + 5))
OTHER = schema(ID, Column("name", INT4))
NEW_KEY = schema(ID, Column("name", VARCHAR, 24, key=True))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_table_never_seen_and_a_table_unchanged_pass_every_policy(policy: str) -> None:
    for old in (None, OLD):
        decision = decide(policy, old, OLD)  # type: ignore[arg-type]
        assert (decision.schema, decision.changes, decision.refused) == (OLD, (), "")


@pytest.mark.parametrize("new", [MORE, FEWER, WIDER, NARROWER, OTHER, NEW_KEY])
def test_evolve_follows_everything_and_exception_refuses_everything(new: TableSchema) -> None:
    assert decide("evolve", OLD, new).schema == new
    assert not decide("evolve", OLD, new).refused
    assert decide("exception", OLD, new).refused


def test_the_refusal_names_column_and_change() -> None:
    assert decide("exception", OLD, FEWER).refused == "column 'name' dropped"


@pytest.mark.parametrize("new", [MORE, WIDER])
def test_lenient_follows_what_loses_nothing(new: TableSchema) -> None:
    decision = decide("lenient", OLD, new)
    assert (decision.schema, decision.refused) == (new, "")


@pytest.mark.parametrize("new", [NARROWER, OTHER, NEW_KEY, schema(NAME)])
def test_lenient_refuses_what_loses_something(new: TableSchema) -> None:
    assert decide("lenient", OLD, new).refused


def test_lenient_keeps_a_dropped_column() -> None:
    assert decide("lenient", OLD, FEWER).schema.columns == (ID, NAME)


def test_ignore_keeps_the_old_columns_but_not_a_lost_key() -> None:
    assert decide("ignore", OLD, MORE).schema.columns == OLD.columns
    assert decide("ignore", OLD, OTHER).schema.columns == OLD.columns
    assert decide("ignore", OLD, schema(NAME)).refused
    assert decide("ignore", OLD, NEW_KEY).refused


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        (Column("c", INT2), Column("c", INT8), ChangeKind.WIDENED),
        (Column("c", INT8), Column("c", INT4), ChangeKind.NARROWED),
        (Column("c", INT8), Column("c", NUMERIC), ChangeKind.WIDENED),
        (Column("c", INT8), Column("c", NUMERIC, numeric(5, 0)), ChangeKind.NARROWED),
        (Column("c", VARCHAR, 9), Column("c", VARCHAR, 10), ChangeKind.WIDENED),
        (Column("c", VARCHAR, 9), Column("c", VARCHAR), ChangeKind.WIDENED),
        (Column("c", VARCHAR), Column("c", VARCHAR, 9), ChangeKind.NARROWED),
        (Column("c", NUMERIC, numeric(10, 2)), Column("c", NUMERIC, numeric(12, 2)), ChangeKind.WIDENED),
        (Column("c", NUMERIC, numeric(10, 2)), Column("c", NUMERIC, numeric(12, 5)), ChangeKind.NARROWED),
        (Column("c", INT4), Column("c", TEXT), ChangeKind.RETYPED),
    ],
)
def test_types_are_compared_by_what_they_can_hold(old: Column, new: Column, kind: ChangeKind) -> None:
    assert [change.kind for change in differences(schema(old), schema(new))] == [kind]


def test_a_type_made_anew_under_another_oid_is_the_same_type() -> None:
    mood = Column("mood", PgType(70001, "mood", TypeKind.ENUM))
    again = Column("mood", PgType(70999, "mood", TypeKind.ENUM))
    assert list(differences(schema(ID, mood), schema(ID, again))) == []


def test_a_new_column_order_is_no_change() -> None:
    assert list(differences(OLD, schema(NAME, ID))) == []
