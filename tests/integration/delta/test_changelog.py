"""The append-only form: every change once."""

import random
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pydantic import ValidationError

from cdc.model import Column, TableId, TableSchema
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.settings import DeltaSettings
from tests.fix_delta import apply_with_repeats
from tests.scenes.histories import INT4, INTEGERS, TEXT, History, batch, change, cut, folded, images, state_of, table

ITEMS = TableSchema(TableId("public", "items"), (Column("id", INT4, key=True), Column("a", TEXT), Column("b", TEXT)), 1)


def opened(lake: Path) -> delta.DeltaSink:
    settings = {"path": str(lake), "append_only": True, "as_text": {"public.ints": ["at"]}}
    sink = delta.open_sink(DeltaSettings.model_validate(settings), SinkContext(lake))
    sink.prepare(ITEMS)
    return sink


def log(lake: Path) -> list[tuple[Any, ...]]:
    names = ["id", "_millrace_version", "_millrace_deleted", "a", "b", "_millrace_unchanged"]
    rows = DeltaTable(lake / "public.items").to_pyarrow_table(columns=names).to_pylist()
    return sorted(tuple(row[name] for name in names) for row in rows)


def test_each_change_is_a_row_and_a_replay_adds_none(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    batches = [
        [change("u", '{"id":1}', 10, '{"id":1,"a":"x","b":"large"}')],
        [change("u", '{"id":1}', 20, '{"id":1,"a":"y"}', ["b"])],
        [change("d", '{"id":1}', 30)],
    ]
    for _ in range(2):
        for rows in batches:
            sink.apply(batch(ITEMS, rows))
    assert log(tmp_path) == [
        (1, 10, False, "x", "large", None),
        (1, 20, False, "y", None, '["b"]'),
        (1, 30, True, None, None, None),
    ]


def test_an_older_change_that_comes_late_has_its_row_too(tmp_path: Path) -> None:
    sink = opened(tmp_path)
    sink.apply(batch(ITEMS, [change("u", '{"id":1}', 20, '{"id":1,"a":"y","b":"b"}')]))
    sink.apply(batch(ITEMS, [change("u", '{"id":1}', 10, '{"id":1,"a":"x","b":"b"}')]))
    assert [row[:2] for row in log(tmp_path)] == [(1, 10), (1, 20)]
    assert sink.stored(ITEMS)["a"].to_pylist() == ["y"]


@pytest.mark.parametrize("seed", range(2))
def test_the_changes_add_up_to_the_rows(tmp_path: Path, seed: int) -> None:
    schema = table("ints")
    rng = random.Random(seed)
    written = History(schema, INTEGERS, rng).write(50)
    whole = [row for row in written.rows if not row["unchanged"]]
    sink = opened(tmp_path)
    sink.prepare(schema)
    apply_with_repeats(sink, [batch(schema, rows) for rows in cut(whole, rng)], rng)
    newest, _ = folded(whole)
    final = state_of([row for row in newest.values() if row["op"] != "d"])
    assert sink.stored(schema).equals(sink.expected(schema, images(final)))


def test_two_forms_at_once_are_refused() -> None:
    with pytest.raises(ValidationError, match="exclude each other"):
        DeltaSettings.model_validate({"path": "lake", "append_only": True, "stored_as_scd_type": 2})
