"""Type 2: every version of a row, and the current rows as type 1 would have them."""

import random
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from cdc.errors import Rejected, SinkError
from cdc.key_range import KeyRange, Level
from cdc.model import Column, PgType, TableId, TableSchema
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.settings import DeltaSettings
from sinks.delta.write import writer
from sinks.delta.write.writer import REGION_LIMIT
from tests.fix_delta import ends_as_the_source
from tests.scenes.histories import INT4, TEXT, WHEN, batch, change, table

ITEMS = TableSchema(TableId("public", "items"), (Column("id", INT4, key=True), Column("a", TEXT), Column("b", TEXT)), 1)


def opened(lake: Path, **settings: Any) -> delta.DeltaSink:
    whole = {"path": str(lake), "stored_as_scd_type": 2, "as_text": {"public.ints": ["at"]}, **settings}
    sink = delta.open_sink(DeltaSettings.model_validate(whole), SinkContext(lake))
    sink.prepare(ITEMS)
    return sink


def row(key: int, version: int, a: str, b: str | None = "b") -> dict[str, Any]:
    rest = "" if b is None else f',"b":"{b}"'
    return change("u", f'{{"id":{key}}}', version, f'{{"id":{key},"a":"{a}"{rest}}}', ["b"] if b is None else None)


def gone(key: int, version: int) -> dict[str, Any]:
    return change("d", f'{{"id":{key}}}', version)


def history(lake: Path) -> list[tuple[Any, ...]]:
    names = ["id", "a", "b", "__START_AT", "__END_AT"]
    rows = DeltaTable(lake / "public.items").to_pyarrow_table(columns=names).to_pylist()
    return sorted(tuple(row[name] for name in names) for row in rows)


def test_each_version_has_its_start_and_its_end(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    for changes in ([row(1, 10, "x")], [row(1, 20, "y"), row(2, 21, "z")], [gone(1, 30)], [row(1, 40, "again")]):
        sink.apply(batch(ITEMS, changes))
    assert history(tmp_path) == [
        (1, "again", "b", 40, None),
        (1, "x", "b", 10, 20),
        (1, "y", "b", 20, 30),
        (2, "z", "b", 21, None),
    ]
    assert sink.stored(ITEMS)["a"].to_pylist() == ["again", "z"]


def test_a_replay_of_any_batch_changes_nothing(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    batches = [batch(ITEMS, changes) for changes in ([row(1, 10, "x")], [row(1, 20, "y")], [gone(1, 30)])]
    for current in batches:
        sink.apply(current)
    before = history(tmp_path)
    version = DeltaTable(tmp_path / "public.items").version()
    for current in batches:
        sink.apply(current)
    assert history(tmp_path) == before
    assert DeltaTable(tmp_path / "public.items").version() == version


def test_a_partial_version_takes_what_it_lacks_from_the_one_before(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.apply(batch(ITEMS, [row(1, 10, "x", "large")]))
    sink.apply(batch(ITEMS, [row(1, 20, "y", None)]))
    assert history(tmp_path) == [(1, "x", "large", 10, 20), (1, "y", "large", 20, None)]
    sink.apply(batch(ITEMS, [gone(1, 30)]))
    with pytest.raises(Rejected) as caught:
        sink.apply(batch(ITEMS, [row(1, 40, "z", None), row(2, 41, "whole")]))
    assert [item.reason for item in caught.value.items] == ["stored row missing"]
    assert (2, "whole", "b", 41, None) in history(tmp_path)


def test_keys_without_bounds_have_their_history_too(tmp_path: Path) -> None:
    day = TableSchema(TableId("public", "days"), (Column("id", PgType(1082, "date"), key=True), Column("a", TEXT)), 1)
    sink = opened(tmp_path)
    sink.prepare(day)
    for version in (5, 6, 6):
        keys = [f'{{"id":"2024-01-0{number}"' for number in (1, 2)]
        sink.apply(batch(day, [change("u", key + "}", version, f'{key},"a":"v{version}"}}') for key in keys]))
    rows = DeltaTable(tmp_path / "public.days").to_pyarrow_table(columns=["a", "__END_AT"]).to_pylist()
    assert sorted(row["a"] for row in rows) == ["v5", "v5", "v6", "v6"]
    assert sink.stored(day)["a"].to_pylist() == ["v6", "v6"]


def test_a_delete_of_a_row_never_seen_is_remembered(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.apply(batch(ITEMS, [gone(1, 20)]))
    sink.apply(batch(ITEMS, [row(1, 10, "x")]))
    assert sink.stored(ITEMS).num_rows == 0


def test_a_truncate_ends_what_is_older(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.apply(batch(ITEMS, [row(1, 10, "x"), row(2, 30, "y")]))
    sink.apply(batch(ITEMS, [change("t", None, 20), row(1, 21, "new")]))
    # one below the truncate's version, which rows behind it in its own transaction may share
    assert history(tmp_path) == [(1, "new", "b", 21, None), (1, "x", "b", 10, 19), (2, "y", "b", 30, None)]


def test_a_removed_range_ends_its_older_rows(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.apply(batch(ITEMS, [row(1, 10, "x"), row(2, 30, "y"), row(3, 10, "z")]))
    removed = KeyRange((Level(("id",), ("number",), ("1",), ("3",)),)).text()
    sink.apply(batch(ITEMS, [change("p", removed, 20), row(1, 21, "new")]))
    assert history(tmp_path) == [
        (1, "new", "b", 21, None),
        (1, "x", "b", 10, 20),
        (2, "y", "b", 30, None),
        (3, "z", "b", 10, None),
    ]


def test_versions_can_be_told_apart_by_time(tmp_path: Path) -> None:
    sink = opened(tmp_path, sequence_by="commit_ts")
    sink.apply(batch(ITEMS, [row(1, 10, "x")]))
    assert history(tmp_path) == [(1, "x", "b", WHEN, None)]


@pytest.mark.parametrize("limit", [REGION_LIMIT, -1])
@pytest.mark.parametrize("seed", range(2))
def test_current_rows_are_those_of_type_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, limit: int
) -> None:
    monkeypatch.setattr(writer, "REGION_LIMIT", limit)
    schema = table("ints")
    sink = opened(tmp_path)
    sink.prepare(schema)
    ends_as_the_source(sink, schema, random.Random(seed), length=50)
    names = ["id", "__START_AT"]
    rows = DeltaTable(tmp_path / "public.ints").to_pyarrow_table(columns=names).to_pylist()
    assert len({tuple(row.values()) for row in rows}) == len(rows), "no version is stored twice"


def test_a_table_keeps_the_type_it_was_made_with(tmp_path: Path) -> None:
    opened(tmp_path)
    with pytest.raises(SinkError, match="stored_as_scd_type"):
        opened(tmp_path, stored_as_scd_type=1)


def test_maintenance_keeps_the_whole_history(tmp_path: Path) -> None:
    sink = opened(tmp_path, keep_tombstones_hours=0.0001)
    for version in range(10, 14):
        sink.apply(batch(ITEMS, [row(1, version, f"v{version}")]))
    before = history(tmp_path)
    sink.maintain(ITEMS)
    assert history(tmp_path) == before
