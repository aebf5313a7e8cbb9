"""What each schema policy lets a table do."""

import pytest

from cdc.capture.source.schema_policy import CheckedSchemas, Policy, already_recorded
from cdc.errors import SchemaRefused
from cdc.model import Column, PgType, TableId, TableSchema
from tests.corpus.registry import Registry

INT4, INT8, TEXT, VARCHAR, NUMERIC = (
    PgType(23, "int4"),
    PgType(20, "int8"),
    PgType(25, "text"),
    PgType(1043, "varchar"),
    PgType(1700, "numeric"),
)
TABLE = TableId("public", "items")
ID = Column("id", INT4, key=True)


def _schema(*columns: Column) -> TableSchema:
    return TableSchema(TABLE, columns)


def _numeric(precision: int, scale: int) -> Column:
    return Column("n", NUMERIC, ((precision << 16) | scale) + 4)


BEFORE = _schema(ID, Column("label", VARCHAR, 14), _numeric(10, 2))
HARMLESS = [
    _schema(ID, Column("label", VARCHAR, 14), _numeric(10, 2), Column("more", TEXT)),
    _schema(ID, Column("label", VARCHAR, 24), _numeric(10, 2)),
    _schema(ID, Column("label", TEXT), _numeric(12, 4)),
    _schema(Column("id", INT8, key=True), Column("label", VARCHAR, 14), _numeric(10, 2)),
]
HARMFUL = [
    _schema(ID, _numeric(10, 2)),
    _schema(ID, Column("label", VARCHAR, 8), _numeric(10, 2)),
    _schema(ID, Column("label", VARCHAR, 14), _numeric(10, 4)),
    _schema(ID, Column("renamed", VARCHAR, 14), _numeric(10, 2)),
]
REKEYED = _schema(Column("id", INT4), Column("label", VARCHAR, 14, key=True), _numeric(10, 2))


def _policed(policy: Policy) -> CheckedSchemas:
    registry = Registry()
    registry.record(BEFORE)
    return CheckedSchemas(registry, policy)


@pytest.mark.parametrize("after", HARMLESS + HARMFUL)
def test_evolve_follows_everything(after: TableSchema) -> None:
    assert _policed("evolve").record(after).columns == after.columns


@pytest.mark.parametrize("after", HARMLESS)
def test_lenient_follows_what_loses_nothing(after: TableSchema) -> None:
    assert _policed("lenient").record(after).columns == after.columns


@pytest.mark.parametrize("after", HARMFUL)
def test_lenient_refuses_what_loses_something(after: TableSchema) -> None:
    with pytest.raises(SchemaRefused, match=r"public\.items"):
        _policed("lenient").record(after)


@pytest.mark.parametrize("after", HARMLESS + HARMFUL)
def test_exception_refuses_every_change(after: TableSchema) -> None:
    with pytest.raises(SchemaRefused):
        _policed("exception").record(after)


@pytest.mark.parametrize("after", HARMLESS + HARMFUL)
def test_ignore_keeps_the_former_columns(after: TableSchema) -> None:
    assert _policed("ignore").record(after).columns == BEFORE.columns


def test_no_policy_but_evolve_passes_over_another_key() -> None:
    for policy in ("lenient", "ignore", "exception"):
        with pytest.raises(SchemaRefused, match="its key was replaced"):
            _policed(policy).record(REKEYED)
        assert already_recorded(_policed(policy), REKEYED) is None
    assert _policed("evolve").record(REKEYED).key == REKEYED.key


@pytest.mark.parametrize("policy", ["evolve", "lenient", "ignore", "exception"])
def test_a_new_table_and_an_unchanged_one_pass_every_policy(policy: Policy) -> None:
    policed = _policed(policy)
    assert policed.record(BEFORE).columns == BEFORE.columns
    other = TableSchema(TableId("public", "other"), (ID,))
    assert policed.record(other).columns == other.columns


@pytest.mark.parametrize("policy", ["evolve", "lenient", "ignore", "exception"])
def test_looking_records_nothing_and_refuses_nothing(policy: Policy) -> None:
    """What a streamed transaction says of its columns may yet be rolled back."""
    schemas = _policed(policy)
    assert schemas.already_recorded(BEFORE) == schemas.newest()[0]
    assert schemas.already_recorded(HARMFUL[0]) == (schemas.newest()[0] if policy == "ignore" else None)
    assert [schema.id for schema in schemas.newest()] == [1]
