"""Changes of the log as rows of a DataFrame: which rows, which values, and what is named as missing."""

from typing import Any

import pyarrow as pa
import pytest

from cdc.errors import ChangeRefused, ConfigError
from cdc.model import LOG_SCHEMA, Column, PgType, TableId, TableSchema
from pyspark_millrace.columns import table_columns
from pyspark_millrace.options import Mode, Preimages, RowRules, Truncates
from pyspark_millrace.rows import RowReader
from tests.scenes.histories import INT4, INT8, STAMP, TEXT, WHEN, Row, change

ID = Column("id", INT4, key=True)
NUMERIC = PgType(1700, "numeric")
AMOUNT = Column("amount", NUMERIC, modifier=(12 << 16 | 2) + 4)
ITEMS = TableSchema(TableId("public", "items"), (ID, AMOUNT, Column("note", TEXT), Column("at", STAMP)), id=1)
NEW = '{"id":1,"amount":1.50,"note":"a","at":null}'
OLD = '{"id":1,"amount":1.25,"note":"b","at":null}'
KEY = '{"id":1}'


def read(
    *changes: Row, schema: TableSchema = ITEMS, columns: tuple[str, ...] = (), **rules: Any
) -> list[dict[str, Any]]:
    """The rows of these changes."""
    batch = pa.RecordBatch.from_pylist(list(changes), schema=LOG_SCHEMA)
    rows = RowReader(table_columns(schema, columns), RowRules(**rules)).rows(batch)
    assert rows.schema.equals(table_columns(schema, columns).arrow)
    return rows.to_pylist()


def told(row: dict[str, Any]) -> tuple[Any, ...]:
    return (row["_change_type"], row["id"], row["note"], row["_missing"])


def test_each_change_has_the_columns_of_the_change_data_feed() -> None:
    (row,) = read(change("c", KEY, 500, NEW, ordinal=3))
    assert row.pop("_commit_timestamp") == WHEN
    assert str(row.pop("amount")) == "1.50"
    assert row == {
        "id": 1, "note": "a", "at": None, "_change_type": "insert", "_commit_version": 501, "_row_version": 500,
        "_ordinal": 3, "_missing": [],
    }  # fmt: skip


def test_an_update_with_its_old_row_is_two_rows_and_others_are_one() -> None:
    rows = read(
        change("u", KEY, 500, NEW),
        {**change("u", KEY, 501, NEW), "before": OLD},
        {**change("d", KEY, 502), "before": NEW},
        {**change("u", KEY, 503, OLD), "before": NEW},
    )
    assert [told(row) for row in rows] == [
        ("update_postimage", 1, "a", []),
        ("update_preimage", 1, "b", []),
        ("update_postimage", 1, "a", []),
        ("delete", 1, "a", []),
        ("update_preimage", 1, "a", []),
        ("update_postimage", 1, "b", []),
    ]
    assert [row["_row_version"] for row in rows] == [500, 501, 501, 502, 503, 503]


def test_a_delete_without_its_old_row_has_its_key_and_names_the_rest() -> None:
    assert told(*read(change("d", KEY, 500))) == ("delete", 1, None, ["amount", "note", "at"])


def test_a_column_that_was_not_sent_is_named_and_a_null_is_not() -> None:
    partial = '{"id":1,"amount":null,"at":null}'
    assert told(*read(change("u", KEY, 500, partial, ["note"]))) == ("update_postimage", 1, None, ["note"])


def test_a_large_key_column_that_was_not_sent_is_taken_from_the_key() -> None:
    schema = TableSchema(ITEMS.table, (ID, Column("note", TEXT, key=True)), id=1)
    (row,) = read(change("u", '{"id":1,"note":"large"}', 500, '{"id":1}', ["note"]), schema=schema)
    assert told(row) == ("update_postimage", 1, "large", [])


def test_a_row_of_an_earlier_schema_names_the_columns_that_it_lacks() -> None:
    assert told(*read(change("r", KEY, 500, '{"id":1,"gone":7,"note":"a"}'))) == ("insert", 1, "a", ["amount", "at"])


def test_rows_that_were_read_stand_before_changes_and_behind_their_truncate() -> None:
    unstreamed = {"xid": 0, "ordinal": 5}
    rows = read(
        {**change("t", None, 500), **unstreamed},
        {**change("r", KEY, 500, NEW), **unstreamed},
        change("u", KEY, 500, NEW),
        truncates=Truncates.EMIT,
    )
    assert [(row["_change_type"], row["_ordinal"]) for row in rows] == [
        ("truncate", -2),
        ("insert", -1),
        ("update_postimage", 0),
    ]
    assert rows[0]["_missing"] == ["id", "amount", "note", "at"]


def test_a_truncate_is_an_error_unless_it_may_be_passed_on_or_skipped() -> None:
    changes = change("c", KEY, 500, NEW), change("t", None, 600), change("c", KEY, 700, NEW)
    with pytest.raises(ChangeRefused, match=r"Table public.items, commit 0/259: it was truncated. .* emit or skip"):
        read(*changes)
    kinds = [row["_change_type"] for row in read(*changes, truncates=Truncates.EMIT)]
    assert kinds == ["insert", "truncate", "insert"]
    assert [row["_row_version"] for row in read(*changes, truncates=Truncates.SKIP)] == [500, 700]


def test_a_removed_partition_can_be_skipped_but_not_passed_on() -> None:
    changes = change("p", '["id"]', 600), change("c", KEY, 700, NEW)
    for rule in (Truncates.FAIL, Truncates.EMIT):
        with pytest.raises(ChangeRefused, match="lost the rows of a partition"):
            read(*changes, truncates=rule)
    assert [row["_row_version"] for row in read(*changes, truncates=Truncates.SKIP)] == [700]


def test_old_rows_can_be_demanded_or_left_out() -> None:
    full = {**change("u", KEY, 500, NEW), "before": OLD}
    assert len(read(full, preimages=Preimages.REQUIRED)) == 2
    assert [told(row)[0] for row in read(full, preimages=Preimages.NONE)] == ["update_postimage"]
    for lacking in (change("u", KEY, 600, NEW), change("d", KEY, 600)):
        with pytest.raises(ChangeRefused, match=r"commit 0/259: .* alter table public.items replica identity full"):
            read(full, lacking, preimages=Preimages.REQUIRED)


def test_a_value_that_does_not_fit_is_an_error_that_does_not_show_it() -> None:
    wrong = change("c", KEY, 600, '{"id":1,"amount":1.505,"note":"a","at":"infinity"}')
    with pytest.raises(ChangeRefused) as caught:
        read(change("c", KEY, 500, NEW), wrong)
    assert "commit 0/259: it has a value that cannot be read: column amount: value does not fit decimal(12,2)" in str(
        caught.value
    )
    assert "1.505" not in str(caught.value) and "PERMISSIVE" in caught.value.remedy


def test_a_permissive_reader_names_each_value_that_does_not_fit() -> None:
    wrong = change("c", KEY, 600, '{"id":1,"amount":1.505,"note":"a","at":"infinity"}')
    sound, bad = read(change("c", KEY, 500, NEW), wrong, mode=Mode.PERMISSIVE)
    assert (told(sound), told(bad)) == (("insert", 1, "a", []), ("insert", 1, "a", ["amount", "at"]))
    assert bad["amount"] is None
    only_text = read(wrong, columns=("id", "note"))
    assert told(*only_text) == ("insert", 1, "a", [])


def test_only_new_columns_and_types_of_columns_that_are_read_count_as_a_change() -> None:
    every, some = table_columns(ITEMS), table_columns(ITEMS, ("id", "note"))
    dropped = TableSchema(ITEMS.table, ITEMS.columns[:2], id=2)
    added = TableSchema(ITEMS.table, (*ITEMS.columns, Column("more", TEXT)), id=2)
    wider = TableSchema(ITEMS.table, (ID, Column("amount", INT8), *ITEMS.columns[2:]), id=2)
    assert (every.change_in(dropped), some.change_in(dropped)) == ("", "")
    assert (every.change_in(added), some.change_in(added)) == ("column more was added", "")
    assert every.change_in(wider) == "column amount is long now, not decimal(12,2)"
    assert some.change_in(wider) == ""


def test_a_column_that_is_not_there_or_has_a_name_of_ours_is_an_error() -> None:
    odd = TableSchema(ITEMS.table, (ID, Column("_Change_Type", TEXT), Column("ID", TEXT)), id=1)
    with pytest.raises(ConfigError, match=r"table public.items has no column 'nothing'. It has: id, amount, note, at"):
        table_columns(ITEMS, ("nothing",))
    with pytest.raises(ConfigError, match=r"'id' of table public.items has the name of another column"):
        table_columns(odd)
    assert table_columns(odd, ("id",)).spark.names[:2] == ["id", "_change_type"]


def test_no_changes_are_no_rows() -> None:
    assert read() == []
    assert read(change("m", None, 500)) == []
