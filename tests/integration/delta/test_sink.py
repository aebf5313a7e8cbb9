"""The Delta sink on a folder: what it writes, and how much of the table it touches."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.errors import Rejected, SinkError
from cdc.model import Column, PgType, TableId, TableSchema
from cdc.ports import Batch
from sinks.delta.write import writer
from sinks.delta.write.merge import WRITER
from tests.fix_delta import OpenLake, ends_as_the_source, numbers, stored_table
from tests.scenes.histories import INT4, INT8, NUMERIC, TEXT, batch, change, images, table

ID = Column("id", INT4, key=True)


def items(*columns: Column, identity: str = "d", schema_id: int = 1) -> TableSchema:
    return TableSchema(TableId("public", "items"), columns, schema_id, identity=identity)


def put(schema: TableSchema, version: int, **values: str) -> dict[str, Any]:
    """A whole row of raw values; the key columns are taken from them."""
    whole = ",".join(f'"{name}":{value}' for name, value in values.items())
    key = ",".join(f'"{column.name}":{values[column.name]}' for column in schema.key)
    return change("u", f"{{{key}}}", version, f"{{{whole}}}")


LABELLED = items(ID, Column("label", TEXT))


def last_commit(lake: Path) -> dict[str, int]:
    metrics: dict[str, int] = stored_table(lake).history(1)[0]["operationMetrics"]
    return metrics


def test_values_are_stored_in_types_that_any_reader_of_delta_knows(lake: Path, open_lake: OpenLake) -> None:
    schema = items(
        ID,
        Column("amount", NUMERIC, ((12 << 16) | 2) + 4),
        Column("at", PgType(1114, "timestamp")),
        Column("raw", PgType(17, "bytea")),
        Column("doc", PgType(3802, "jsonb")),
    )
    sink = open_lake(schema)
    sink.apply(
        batch(schema, [put(schema, 5, id="1", amount="1.10", at='"2024-01-31T10:00:00.5"', raw='"aGk="', doc="[1.10]")])
    )
    stored = stored_table(lake).to_pyarrow_table()
    assert [(field.name, str(field.type)) for field in stored.schema] == [
        ("id", "int32"),
        ("amount", "decimal128(12, 2)"),
        ("at", "timestamp[us]"),
        ("raw", "binary"),
        ("doc", "string"),
        ("_millrace_version", "int64"),
        ("_millrace_deleted", "bool"),
        ("_millrace_commit_ts", "timestamp[us, tz=UTC]"),
    ]
    assert stored.to_pylist()[0]["raw"] == b"hi"
    assert stored.to_pylist()[0]["doc"] == "[1.10]"


def test_a_value_that_does_not_fit_is_rejected_and_the_rest_is_written(open_lake: OpenLake) -> None:
    schema = items(ID, Column("at", PgType(1184, "timestamptz")), Column("amount", NUMERIC, ((38 << 16) | 0) + 4))
    sink = open_lake(schema)
    rows = [
        put(schema, 5, id="1", at='"infinity"', amount="1"),
        put(schema, 6, id="2", at='"2024-01-01T00:00:00Z"', amount="9" * 38),
        put(schema, 7, id="3", at="null", amount="1" + "0" * 38),
    ]
    with pytest.raises(Rejected) as caught:
        sink.apply(batch(schema, rows))
    assert [(item.key, item.version, item.reason) for item in caught.value.items] == [
        ('{"id":3}', 7, "column amount: value does not fit decimal(38,0)"),
        ('{"id":1}', 5, "column at: value does not fit timestamp"),
    ]
    assert sink.stored(schema)["id"].to_pylist() == [2]
    state = {row["key"]: row["after"] for row in rows}
    assert not sink.stored(schema).equals(sink.expected(schema, images(state))), "verify must see what was refused"


def test_a_table_that_begins_again_under_a_shorter_key_has_each_row_once(open_lake: OpenLake) -> None:
    """A truncate and the rows that follow it in one batch, where two stored rows have one key now."""
    before = items(Column("tenant", INT4, key=True), ID, Column("label", TEXT))
    after = items(Column("tenant", INT4), ID, Column("label", TEXT), schema_id=2)
    sink = open_lake(before)
    sink.apply(batch(before, [put(before, 5, tenant=tenant, id="1", label='"old"') for tenant in ("1", "7")]))
    sink.apply(batch(before, [change("d", '{"tenant":7,"id":1}', 6)]))
    sink.prepare(after)
    newer = [put(after, 12, tenant="1", id=key, label='"new"') for key in ("1", "2")]
    again = batch(after, [change("t", None, 10), *newer])
    for _ in range(2):
        sink.apply(again)
        assert sink.stored(after).select(["id", "label"]).to_pylist() == [
            {"id": 1, "label": "new"},
            {"id": 2, "label": "new"},
        ]
    sink.apply(batch(after, [put(after, 8, tenant="1", id="3", label='"older than the truncate"')]))
    assert sink.stored(after)["id"].to_pylist() == [1, 2]


def test_a_numeric_of_131072_digits_is_stored_digit_by_digit(open_lake: OpenLake) -> None:
    schema = items(ID, Column("amount", NUMERIC))
    digits = "1" * 131072
    sink = open_lake(schema)
    sink.apply(batch(schema, [put(schema, 5, id="1", amount=digits)]))
    assert sink.stored(schema)["amount"].to_pylist() == [digits]


def test_a_batch_with_two_changes_of_one_key_is_refused_before_anything_is_written(
    lake: Path, open_lake: OpenLake
) -> None:
    sink = open_lake(LABELLED)
    once = numbers(LABELLED, range(1), 5)
    with pytest.raises(SinkError, match="two changes of one key"):
        sink.apply(Batch(LABELLED, pa.concat_tables([once.rows, once.rows])))
    assert stored_table(lake).version() == 0


def test_a_replayed_batch_makes_no_commit(lake: Path, open_lake: OpenLake) -> None:
    sink = open_lake(LABELLED)
    given = numbers(LABELLED, range(10), 5)
    sink.apply(given)
    version = stored_table(lake).version()
    sink.apply(given)
    open_lake().apply(given)
    assert stored_table(lake).version() == version


def test_each_commit_says_which_lsn_it_brings_the_table_to(lake: Path, open_lake: OpenLake) -> None:
    sink = open_lake(LABELLED)
    sink.apply(numbers(LABELLED, range(10), 50))
    assert stored_table(lake).history(1)[0][WRITER] == "51"
    assert stored_table(lake).transaction_version(WRITER) == 51


def test_changes_below_the_recorded_lsn_are_never_skipped(lake: Path, open_lake: OpenLake) -> None:
    """A checkpoint that was lost starts again at the beginning: what the table lacks must still arrive."""
    sink = open_lake(LABELLED)
    sink.apply(numbers(LABELLED, range(10), 500))
    sink.apply(numbers(LABELLED, range(10, 20), 50))
    assert sink.stored(LABELLED).num_rows == 20
    assert stored_table(lake).transaction_version(WRITER) == 501


def test_a_change_rewrites_only_the_file_of_its_key(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LEAST_FILE", 2000)
    sink = open_lake(LABELLED)
    for start in range(0, 20_000, 1000):
        sink.apply(numbers(LABELLED, range(start, start + 1000), 5))
    files = len(stored_table(lake).file_uris())
    assert files >= 20
    sink.apply(numbers(LABELLED, range(7_500, 7_501), 6))
    metrics = last_commit(lake)
    assert metrics["num_removed_files"] == 1
    assert metrics["num_added_rows"] <= 2000
    assert len(stored_table(lake).file_uris()) <= files + 1


def test_new_keys_are_appended_and_no_file_is_touched(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LEAST_FILE", 100)
    sink = open_lake(LABELLED)
    sink.apply(numbers(LABELLED, range(1000), 5))
    sink.apply(numbers(LABELLED, range(1000, 1100), 6))
    assert last_commit(lake)["num_removed_files"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_the_merge_of_deltalake_ends_as_the_rewrite_does(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(writer, "REGION_LIMIT", -1)
    schema = table("ints")
    sink = open_lake(schema, as_text={"public.ints": ("at",)})
    ends_as_the_source(sink, schema, random.Random(seed))
    assert "MERGE" in {commit["operation"] for commit in stored_table(lake, "public.ints").history()}


def test_a_batch_that_touches_too_much_at_once_is_written_in_parts(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LEAST_FILE", 2000)
    sink = open_lake(LABELLED)
    for start in range(0, 20_000, 2000):
        sink.apply(numbers(LABELLED, range(start, start + 2000), 5))
    size = sum(file.stat().st_size for file in lake.rglob("*.parquet"))
    version = stored_table(lake).version()
    monkeypatch.setattr(writer, "REGION_LIMIT", size // 3)
    rows = [put(LABELLED, 6, id=str(number), label='"new"') for number in range(0, 20_000, 500)]
    partial = change("u", '{"id":77777}', 6, '{"id":77777}', ["label"])
    with pytest.raises(Rejected) as caught:
        sink.apply(batch(LABELLED, [*rows, partial]))
    assert [item.key for item in caught.value.items] == ['{"id":77777}']
    commits = stored_table(lake).history(stored_table(lake).version() - version)
    assert len(commits) > 1
    assert {commit["operation"] for commit in commits} == {"WRITE"}
    stored = sink.stored(LABELLED)
    assert stored.num_rows == 20_000
    assert [row["id"] for row in stored.to_pylist() if row["label"] == "new"] == list(range(0, 20_000, 500))


def test_new_keys_in_random_order_are_appended_and_known_ones_are_found(
    lake: Path, open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "LOAD_ROWS", 50)
    schema = items(Column("id", TEXT, key=True), Column("label", TEXT))
    keys = [f'"{number * 7919 % 1000:03}"' for number in range(1000)]
    sink = open_lake(schema)
    for start in range(0, 1000, 100):
        chunk = [put(schema, 5, id=key, label='"a"') for key in keys[start : start + 100]]
        sink.apply(batch(schema, chunk))
        assert start < 200 or last_commit(lake)["num_removed_files"] == 0
    sink.apply(batch(schema, [put(schema, 6, id=key, label='"b"') for key in keys[:60]]))
    stored = sink.stored(schema)["label"].to_pylist()
    assert (len(stored), stored.count("b")) == (1000, 60)


def test_rows_without_a_primary_key_are_told_apart_with_their_nulls(open_lake: OpenLake) -> None:
    schema = items(Column("a", INT4, key=True), Column("b", TEXT, key=True), identity="f")
    sink = open_lake(schema)
    sink.apply(batch(schema, [put(schema, 5, a="1", b="null"), put(schema, 5, a="null", b='"x"')]))
    sink.apply(batch(schema, [change("d", '{"a":1,"b":null}', 6)]))
    assert sink.stored(schema).to_pylist() == [{"a": None, "b": "x"}]


@pytest.mark.parametrize(
    ("type_", "modifier", "keys"),
    [
        (
            PgType(2950, "uuid"),
            -1,
            ['"0b6d91ad-808a-f0c4-1a32-5d48bb442752"', '"ffffffff-808a-f0c4-1a32-5d48bb442752"'],
        ),
        (NUMERIC, ((10 << 16) | 2) + 4, ["1.10", "-99999999.99"]),
        (NUMERIC, -1, ["1.10", "1.1"]),
        (PgType(1114, "timestamp"), -1, ['"2024-01-31T10:00:00.000001"', '"2024-01-31T10:00:00.000002"']),
        (PgType(1184, "timestamptz"), -1, ['"2024-01-31T10:00:00.000001Z"', '"1900-01-31T10:00:00.000002Z"']),
        (PgType(1082, "date"), -1, ['"2024-01-31"', '"0001-01-01"']),
        (PgType(17, "bytea"), -1, ['"aGk="', '""']),
        (PgType(16, "bool"), -1, ["true", "false"]),
        (INT8, -1, ["9007199254740993", "9007199254740992"]),
        (TEXT, -1, ['"it\'s"', '"' + "x" * 3000 + '"']),
    ],
)
def test_keys_of_every_type_are_told_apart(open_lake: OpenLake, type_: PgType, modifier: int, keys: list[str]) -> None:
    schema = items(Column("id", type_, modifier, key=True), Column("label", TEXT))
    sink = open_lake(schema)
    for version in (5, 6):
        rows = [put(schema, version, id=key, label=f'"{number} v{version}"') for number, key in enumerate(keys)]
        sink.apply(batch(schema, rows))
    sink.apply(batch(schema, [change("d", f'{{"id":{keys[0]}}}', 7)]))
    sink.apply(batch(schema, [put(schema, 5, id=keys[0], label='"late"')]))
    assert sink.stored(schema)["label"].to_pylist() == ["1 v6"]


def test_keys_of_several_types_are_told_apart_together(open_lake: OpenLake) -> None:
    key = [Column("tenant", INT4, key=True), Column("at", PgType(1082, "date"), key=True), Column("k", TEXT, key=True)]
    schema = items(*key, Column("label", TEXT))
    sink = open_lake(schema)
    rows = [
        put(schema, 5, tenant=str(tenant), at=f'"2024-01-0{day}"', k=f'"{k}"', label='"a"')
        for tenant in (1, 2)
        for day in (1, 2)
        for k in "xy"
    ]
    sink.apply(batch(schema, rows))
    sink.apply(batch(schema, [put(schema, 6, tenant="1", at='"2024-01-02"', k='"y"', label='"b"')]))
    stored = sink.stored(schema)
    assert stored.num_rows == 8
    assert [row["label"] for row in stored.to_pylist()] == ["a", "a", "a", "b", "a", "a", "a", "a"]


def test_odd_names_of_tables_and_columns_are_only_names(lake: Path, open_lake: OpenLake) -> None:
    odd = Column('We "ird"; DROP TABLE x --.`y', INT4)
    schema = TableSchema(TableId("../x", 'a"b/c'), (Column("Id'", TEXT, key=True), odd), 1)
    sink = open_lake(schema)
    for version, value in ((5, "1"), (6, "2")):
        row = change(
            "u", """{"Id'":"it's"}""", version, f"""{{"Id'":"it's","We \\"ird\\"; DROP TABLE x --.`y":{value}}}"""
        )
        sink.apply(batch(schema, [row]))
    assert sink.stored(schema).to_pylist() == [{"Id'": "it's", odd.name: 2}]
    assert [path.parent for path in lake.parent.rglob("_delta_log")] == [lake / "~2e~2e~2fx.a~22b~2fc"]


def test_tables_are_written_side_by_side(open_lake: OpenLake) -> None:
    schemas = [TableSchema(TableId("public", f"t{number}"), LABELLED.columns, 1) for number in range(6)]
    sink = open_lake()

    def load(schema: TableSchema) -> int:
        sink.prepare(schema)
        for version in range(5, 9):
            sink.apply(numbers(schema, range(version * 10, version * 10 + 20), version))
        return sink.stored(schema).num_rows

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(load, schemas)) == [50] * 6


def test_a_table_that_was_made_for_a_key_refuses_rows_without_one(open_lake: OpenLake) -> None:
    """Its primary key was dropped: no comparison would find a row by a null."""
    keyed = items(Column("id", INT4, key=True), Column("label", TEXT))
    sink = open_lake(keyed)
    sink.apply(batch(keyed, [put(keyed, 5, id="1", label='"a"')]))
    keyless = items(Column("id", INT4, key=True), Column("label", TEXT, key=True), identity="f")
    sink.prepare(keyless)
    sink.apply(batch(keyless, [put(keyless, 6, id="2", label='"b"')]))
    with pytest.raises(SinkError, match=r"public\.items has lost its key"):
        sink.apply(batch(keyless, [put(keyless, 7, id="3", label="null")]))
