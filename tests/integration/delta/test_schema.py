"""How a Delta table follows its source's columns, by policy; no value is ever found in another column."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from cdc.errors import Rejected, SinkError
from cdc.model import Column, PgType, TableId, TableSchema
from sinks.delta import sink as delta
from tests.fix_delta import OpenLake, stored_table
from tests.scenes.histories import BOOL, INT4, INT8, TEXT, batch, change, images

ID = Column("id", INT4, key=True)


def items(schema_id: int, *columns: Column) -> TableSchema:
    return TableSchema(TableId("public", "items"), (ID, *columns), schema_id)


def apply(
    sink: delta.DeltaSink,
    schema: TableSchema,
    key: int,
    version: int,
    *,
    unchanged: list[str] | None = None,
    **values: str,
) -> None:
    whole = ",".join([f'"id":{key}', *(f'"{name}":{value}' for name, value in values.items())])
    sink.prepare(schema)
    sink.apply(batch(schema, [change("u", f'{{"id":{key}}}', version, f"{{{whole}}}", unchanged)]))


def rows(lake: Path, *names: str) -> list[Any]:
    return stored_table(lake).to_pyarrow_table(columns=["id", *names]).sort_by("id").to_pylist()


def columns(lake: Path) -> list[str]:
    return [field.name for field in stored_table(lake).schema().fields][:-3]


NICK, NAME = items(1, Column("nick", TEXT), Column("n", INT4)), items(2, Column("name", TEXT), Column("n", INT4))


def test_a_rename_without_a_word_is_a_dropped_column_and_a_new_one(lake: Path, open_lake: OpenLake) -> None:
    sink = open_lake()
    apply(sink, NICK, 1, 10, nick='"a"', n="1")
    apply(sink, NICK, 2, 11, nick='"b"', n="2")
    apply(sink, NAME, 1, 20, name='"c"', n="3")
    assert rows(lake, "nick", "name", "n") == [
        {"id": 1, "nick": None, "name": "c", "n": 3},
        {"id": 2, "nick": "b", "name": None, "n": 2},
    ]


def test_a_declared_rename_takes_the_values_along(lake: Path, open_lake: OpenLake) -> None:
    sink = open_lake(renamed_columns={"public.items": {"nick": "name"}})
    apply(sink, NICK, 1, 10, nick='"a"', n="1")
    apply(sink, NICK, 2, 11, nick='"b"', n="2")
    apply(sink, NAME, 1, 20, n="3", unchanged=["name"])
    assert columns(lake) == ["id", "name", "n"]
    assert rows(lake, "name", "n") == [{"id": 1, "name": "a", "n": 3}, {"id": 2, "name": "b", "n": 2}]


def test_rows_of_the_old_name_that_come_late_fit_under_the_new_one(lake: Path, open_lake: OpenLake) -> None:
    settings = {"renamed_columns": {"public.items": {"nick": "name"}}}
    sink = open_lake(**settings)
    apply(sink, NICK, 1, 10, nick='"a"', n="1")
    apply(sink, NAME, 1, 20, name='"new"', n="2")
    replay = open_lake(**settings)
    apply(replay, NICK, 1, 10, nick='"a"', n="1")
    apply(replay, NICK, 2, 11, nick='"b"', n="5")
    assert columns(lake) == ["id", "name", "n"]
    assert rows(lake, "name") == [{"id": 1, "name": "new"}, {"id": 2, "name": "b"}]


def test_a_column_may_be_renamed_and_widened_at_once(lake: Path, open_lake: OpenLake) -> None:
    sink = open_lake(renamed_columns={"public.items": {"n": "count"}})
    apply(sink, items(1, Column("n", INT4)), 1, 10, n="7")
    apply(sink, items(2, Column("count", INT8)), 2, 20, count="9007199254740993")
    assert rows(lake, "count") == [{"id": 1, "count": 7}, {"id": 2, "count": 9007199254740993}]


def test_a_dropped_column_stays_or_goes_by_policy(lake: Path, open_lake: OpenLake) -> None:
    both, one = items(1, Column("a", TEXT), Column("b", TEXT)), items(2, Column("b", TEXT))
    keeping = open_lake()
    apply(keeping, both, 1, 10, a='"x"', b='"y"')
    apply(keeping, one, 2, 20, b='"z"')
    assert rows(lake, "a", "b") == [{"id": 1, "a": "x", "b": "y"}, {"id": 2, "a": None, "b": "z"}]
    removing = open_lake(dropped_columns="remove")
    apply(removing, one, 3, 30, b='"w"')
    assert columns(lake) == ["id", "b"]
    assert rows(lake, "b") == [{"id": 1, "b": "y"}, {"id": 2, "b": "z"}, {"id": 3, "b": "w"}]


def test_a_replay_of_older_rows_brings_no_removed_column_back(lake: Path, open_lake: OpenLake) -> None:
    both, one = items(1, Column("a", TEXT), Column("b", TEXT)), items(2, Column("b", TEXT))
    sink = open_lake(dropped_columns="remove")
    apply(sink, both, 1, 10, a='"x"', b='"y"')
    apply(sink, one, 1, 20, b='"z"')
    version = stored_table(lake).version()
    again = open_lake(dropped_columns="remove")
    apply(again, both, 1, 10, a='"x"', b='"y"')
    assert stored_table(lake).version() == version
    apply(again, both, 2, 15, a='"x"', b='"older"')
    assert columns(lake) == ["id", "b"]
    assert rows(lake, "b") == [{"id": 1, "b": "z"}, {"id": 2, "b": "older"}]


def test_a_column_dropped_and_made_again_with_another_type_never_mixes(lake: Path, open_lake: OpenLake) -> None:
    number, none, text = items(1, Column("n", INT4)), items(2), items(3, Column("n", TEXT))
    stopping = open_lake()
    apply(stopping, number, 1, 10, n="7")
    apply(stopping, none, 2, 11)
    with pytest.raises(SinkError, match="column n is integer in Delta and now string"):
        stopping.prepare(text)
    beside = open_lake(type_change="new_column")
    apply(beside, text, 2, 20, n='"seven"')
    assert rows(lake, "n", "n__string") == [
        {"id": 1, "n": 7, "n__string": None},
        {"id": 2, "n": None, "n__string": "seven"},
    ]


def test_a_removed_column_made_again_with_another_type_begins_empty(lake: Path, open_lake: OpenLake) -> None:
    number, none, text = items(1, Column("n", INT4)), items(2), items(3, Column("n", TEXT))
    sink = open_lake(dropped_columns="remove")
    apply(sink, number, 1, 10, n="7")
    apply(sink, none, 2, 11)
    apply(sink, text, 3, 12, n='"seven"')
    assert rows(lake, "n") == [{"id": 1, "n": None}, {"id": 2, "n": None}, {"id": 3, "n": "seven"}]


def test_integers_widen_and_then_stop_at_text(lake: Path, open_lake: OpenLake) -> None:
    sink = open_lake()
    for number, (kind, value) in enumerate([(PgType(21, "int2"), "1"), (INT4, "70000"), (INT8, "5000000000")], 1):
        apply(sink, items(number, Column("n", kind)), number, 10 + number, n=value)
    assert rows(lake, "n") == [{"id": 1, "n": 1}, {"id": 2, "n": 70000}, {"id": 3, "n": 5_000_000_000}]
    apply(sink, items(4, Column("n", INT4)), 4, 20, n="4")
    with pytest.raises(SinkError, match="Nothing was written"):
        sink.prepare(items(5, Column("n", TEXT)))
    assert rows(lake, "n")[3] == {"id": 4, "n": 4}


def test_a_column_is_added_widened_and_dropped_on_the_way(open_lake: OpenLake) -> None:
    second = items(2, Column("n", INT8), Column("label", TEXT))
    third = items(3, Column("label", TEXT))
    sink = open_lake()
    apply(sink, items(1, Column("n", INT4)), 1, 5, n="7")
    apply(sink, items(1, Column("n", INT4)), 2, 5, n="8")
    apply(sink, second, 1, 6, n=str(2**40), label='"x"')
    assert sink.stored(second).to_pylist() == [{"id": 1, "n": 2**40, "label": "x"}, {"id": 2, "n": 8, "label": None}]
    apply(sink, third, 1, 7, label='"y"')
    assert sink.stored(third).to_pylist() == [{"id": 1, "label": "y"}, {"id": 2, "label": None}]
    assert sink.stored(second)["n"].to_pylist() == [None, 8], "a dropped column stays, null in rows written since"


def test_integer_to_text_stops_or_goes_on_beside_and_never_mixes(lake: Path, open_lake: OpenLake) -> None:
    before, after = items(1, Column("n", INT4)), items(2, Column("n", TEXT))
    sink = open_lake()
    apply(sink, before, 1, 5, n="7")
    version = stored_table(lake).version()
    with pytest.raises(SinkError, match="column n is integer in Delta and now string"):
        sink.prepare(after)
    assert stored_table(lake).version() == version
    lenient = open_lake(type_change="new_column")
    apply(lenient, after, 1, 6, n='"seven"')
    apply(lenient, after, 2, 6, n='"8"')
    assert lenient.stored(after).to_pylist() == [{"id": 1, "n": "seven"}, {"id": 2, "n": "8"}]
    assert rows(lake, "n", "n__string") == [
        {"id": 1, "n": None, "n__string": "seven"},
        {"id": 2, "n": None, "n__string": "8"},
    ]


def test_a_text_column_takes_any_length(open_lake: OpenLake) -> None:
    varchar = PgType(1043, "varchar")
    before, after = items(1, Column("s", varchar, 9)), items(2, Column("s", varchar, 6))
    sink = open_lake()
    apply(sink, before, 1, 5, s='"abcde"')
    apply(sink, after, 2, 6, s='"ab"')
    assert sink.stored(after)["s"].to_pylist() == ["abcde", "ab"]


SOFT = items(1, Column("label", TEXT), Column("gone", BOOL))


@pytest.mark.parametrize("condition", ["gone", '"gone" = true', "gone = 'true'"])
def test_a_row_that_counts_as_deleted_is_deleted_and_may_come_back(open_lake: OpenLake, condition: str) -> None:
    sink = open_lake(apply_as_deletes={"public.items": condition})
    apply(sink, SOFT, 1, 10, label='"a"', gone="false")
    apply(sink, SOFT, 2, 11, label='"b"', gone="null")
    apply(sink, SOFT, 1, 20, label='"a"', gone="true")
    state = {'{"id":1}': '{"id":1,"label":"a","gone":true}', '{"id":2}': '{"id":2,"label":"b","gone":null}'}
    assert sink.stored(SOFT)["id"].to_pylist() == [2]
    assert sink.stored(SOFT).equals(sink.expected(SOFT, images(state))), "verify counts as the sink does"
    apply(sink, SOFT, 1, 10, label='"old"', gone="false")
    assert sink.stored(SOFT)["id"].to_pylist() == [2], "an older change does not bring it back"
    with pytest.raises(Rejected):
        apply(sink, SOFT, 1, 30, gone="false", unchanged=["label"])
    apply(sink, SOFT, 1, 31, label='"again"', gone="false")
    assert sink.stored(SOFT)["label"].to_pylist() == ["again", "b"]


def test_a_soft_delete_ends_a_row_of_type_two(lake: Path, open_lake: OpenLake) -> None:
    sink = open_lake(apply_as_deletes={"public.items": "gone"}, stored_as_scd_type=2)
    apply(sink, SOFT, 1, 10, label='"a"', gone="false")
    apply(sink, SOFT, 1, 20, label='"a"', gone="true")
    assert rows(lake, "label", "__START_AT", "__END_AT") == [{"id": 1, "label": "a", "__START_AT": 10, "__END_AT": 20}]


def test_settings_that_mean_nothing_are_refused_with_a_reason(open_lake: OpenLake) -> None:
    with pytest.raises(ValidationError, match="is not understood; write `column`"):
        open_lake(apply_as_deletes={"public.items": "deleted_at < now()"})
    with pytest.raises(ValidationError, match="remove apply_as_deletes"):
        open_lake(apply_as_deletes={"public.items": "gone"}, append_only=True)
    with pytest.raises(SinkError, match="names column nothing, which it does not have"):
        open_lake(apply_as_deletes={"public.items": "nothing"}).prepare(SOFT)
    with pytest.raises(SinkError, match=r"`keys` asks for \(label\), but its key in the source is \(id\)"):
        open_lake(keys={"public.items": ["label"]}).prepare(SOFT)
    open_lake(keys={"public.items": ["id"]}).prepare(SOFT)
