"""Shaping: however a history is cut and repeated, the store ends with the rows of the source, filtered and computed."""

import random
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.model import TableSchema
from cdc.ports import Sink
from sinks import registry
from sinks.context import SinkContext
from sinks.memory import MemorySettings
from tests.scenes.histories import INT4, INTEGERS, ODD_TEXTS, PAIRS, TEXT, History, batch, cut, images, table
from tests.scenes.shaping import SHAPE, apply_with_source, shaped_by_hand

KEYED = {
    "integers": (table(), INTEGERS),
    "texts": (table(key=[("id", TEXT)]), ODD_TEXTS),
    "pairs": (table(key=[("id", INT4), ("part", TEXT)]), PAIRS),
}


def opened(schema: TableSchema, **shape: object) -> Sink:
    chosen = MemorySettings(name=f"memory-{uuid.uuid4().hex[:8]}", shape={schema.table: SHAPE.model_copy(update=shape)})
    sink = registry.open_sink(chosen, SinkContext(Path("unused")))
    sink.prepare(schema)
    return sink


def rows(found: pa.Table) -> dict[str, str]:
    return {str(row["key"]): str(row["after"]) for row in found.to_pylist()}


@pytest.mark.parametrize("keyed", sorted(KEYED))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_changes_in_any_cut_end_as_the_shaped_rows_of_the_source(keyed: str, seed: int) -> None:
    schema, keys = KEYED[keyed]
    rng = random.Random(seed)
    history = History(schema, keys, rng).write(40)
    batches = [batch(schema, part) for part in cut(history.rows, rng)]
    sink, source = opened(schema), history.state()
    for number, current in enumerate(batches):
        apply_with_source(sink, current, source)
        if number and rng.random() < 0.3:
            apply_with_source(sink, batches[rng.randrange(number)], source)
    assert rows(sink.stored(schema)) == shaped_by_hand(source)
    assert rows(sink.expected(schema, images(source))) == shaped_by_hand(source)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_renamed_key_identifies_the_same_rows(seed: int) -> None:
    schema, keys = KEYED["integers"]
    rng = random.Random(seed)
    history = History(schema, keys, rng).write(40)
    sink, source = opened(schema, rename={"id": "number", "doc": "document"}), history.state()
    for part in cut(history.rows, rng):
        apply_with_source(sink, batch(schema, part), source)
    expected = {
        key.replace('{"id":', '{"number":'): after.replace('{"id":', '{"number":', 1)
        for key, after in shaped_by_hand(source).items()
    }
    assert rows(sink.stored(schema)) == expected


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_only_rows_whose_filter_or_expression_needs_a_missing_value_are_read_again(seed: int) -> None:
    """`size` and `copied` are made of the missing column alone, and stay as they are stored."""
    schema, keys = KEYED["integers"]
    rng = random.Random(seed)
    history = History(schema, keys, rng).write(40)
    shape = {"where": "", "compute": {"size": "length(big)", "copied": "big"}}
    sink, source = opened(schema, **shape), history.state()
    read = sum(apply_with_source(sink, batch(schema, [row]), source) for row in history.rows)
    assert read == 0
    assert rows(sink.stored(schema)) == rows(sink.expected(schema, images(source)))
