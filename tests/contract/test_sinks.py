"""What every sink promises, whatever it stores: cdc.ports.Sink.

Each test runs against every kind in tests/contract/sinks.py. Histories are random but seeded: the seed is in the
test's name, so a failure can be run again.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import pyarrow as pa
import pytest

from cdc.errors import Lost, Rejected
from cdc.key_range import KeyRange, Level
from cdc.model import Column, Lsn, TableId, TableSchema
from cdc.ports import Batch, Sink
from sinks import registry
from sinks.fingerprints import Difference, Fingerprinted, Mark
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from sinks.rows.stored_key import KeyReader
from sinks.shape.sink import ShapedSink
from tests.contract.sinks import BENCHES, Bench
from tests.properties.test_fold import Registry
from tests.scenes.histories import (
    INT4,
    INTEGERS,
    ODD_TEXTS,
    PAIRS,
    TEXT,
    History,
    Row,
    batch,
    change,
    cut,
    images,
    log_table,
    table,
)
from tests.scenes.seeds import seeds
from tests.scenes.shaping import apply_with_source, shaped_by_hand, shaped_settings

ITEMS = table()


@pytest.fixture(params=sorted(BENCHES))
def bench(request: pytest.FixtureRequest) -> Bench:
    return BENCHES[request.param](request)


@pytest.fixture
def sink(bench: Bench) -> Iterator[Sink]:
    opened = bench.open()
    opened.prepare(ITEMS)
    yield opened
    opened.close()


def row(key: int, version: int, values: str | None = None, op: str = "u", unchanged: list[str] | None = None) -> Row:
    """A change of ITEMS; `values` are raw members beside the key."""
    after = None if values is None else f'{{"id":{key},{values}}}'
    return change(op, f'{{"id":{key}}}', version, after, unchanged)


FULL = '"label":"one","amount":1.10,"doc":null,"at":null,"good":true,"ratio":1.5,"big":"large"'
OTHER = FULL.replace("one", "two")
WITHOUT_BIG = '"label":"three","amount":2.20,"doc":null,"at":null,"good":false,"ratio":1.5'


def check(sink: Sink, state: dict[str, str], schema: TableSchema = ITEMS) -> None:
    """The store holds exactly this state."""
    assert sink.stored(schema).to_pylist() == sink.expected(schema, images(state)).to_pylist()


def after(key: int, values: str) -> dict[str, str]:
    return {f'{{"id":{key}}}': f'{{"id":{key},{values}}}'}


def test_every_kind_of_sink_is_under_contract() -> None:
    assert set(BENCHES) >= set(registry.settings_kinds())


def test_an_inserted_row_is_stored_and_a_deleted_one_is_gone(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL), row(2, 11, OTHER)]))
    check(sink, after(1, FULL) | after(2, OTHER))
    sink.apply(batch(ITEMS, [row(1, 12, op="d")]))
    check(sink, after(2, OTHER))
    assert _held(sink, ITEMS, [f'{{"id":{key}}}' for key in (1, 2, 3)]) in (
        [("deleted", 12), ("there", 11), ("absent", 0)],
        [],
    )


def _held(sink: Sink, schema: TableSchema, keys: Sequence[str]) -> list[tuple[str, int]]:
    """State and version of single keys; none where a sink cannot be asked for them."""
    found = [sink.stored_key(schema, key) for key in keys] if isinstance(sink, KeyReader) else []
    return [(one.state, one.version) for one in found]


def test_a_store_that_lost_a_table_shows_it_and_takes_older_rows_once_the_table_is_renewed(
    bench: Bench, sink: Sink
) -> None:
    """Rows that are read again have versions below those of changes and truncates that the store once had."""
    if not isinstance(sink, Fingerprinted):
        pytest.skip("this sink has no fingerprints")
    mark, items = sink.mark_table(ITEMS), ITEMS.table
    sink.apply(batch(ITEMS, [row(1, 10, FULL), row(2, 11, OTHER)]))
    sink.apply(batch(ITEMS, [change("t", None, 20), row(1, 30, FULL)]))
    mark = _as_it_was(sink.compare_marks({items: mark}, Lsn(0)), ITEMS)
    bench.restart()
    again = bench.open()
    again.prepare(ITEMS)
    assert isinstance(again, Fingerprinted)
    _as_it_was(again.compare_marks({items: mark}, Lsn(0)), ITEMS)
    assert again.mark_table(ITEMS)["id"] == mark["id"]
    bench.drop(ITEMS)
    assert isinstance(again.compare_marks({items: mark}, Lsn(0))[items], Difference)
    again.recreate(ITEMS)
    again.prepare(ITEMS)
    assert isinstance(again.compare_marks({items: mark}, Lsn(0))[items], Difference), "only a new mark counts"
    renewed = _as_it_was(again.compare_marks({items: again.mark_table(ITEMS)}, Lsn(0)), ITEMS)
    again.apply(batch(ITEMS, [row(1, 5, OTHER)]))
    check(again, after(1, OTHER))
    again.recreate(ITEMS)  # also a table that is there: it may be an older copy
    again.prepare(ITEMS)
    check(again, {})
    again.apply(batch(ITEMS, [row(1, 4, FULL)]))
    check(again, after(1, FULL))
    _as_it_was(again.compare_marks({items: again.mark_table(ITEMS)}, Lsn(0)), ITEMS)
    assert renewed != mark


def _as_it_was(shown: Mapping[TableId, Mark | Difference], schema: TableSchema) -> Mark:
    found = shown[schema.table]
    assert not isinstance(found, Difference), found.message
    return found


def test_an_older_change_never_replaces_a_newer_one(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 20, FULL)]))
    sink.apply(batch(ITEMS, [row(1, 10, OTHER)]))
    check(sink, after(1, FULL))


def test_an_older_change_never_brings_a_deleted_row_back(bench: Bench, sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL)]))
    sink.apply(batch(ITEMS, [row(1, 20, op="d")]))
    bench.restart()
    again = bench.open()
    again.prepare(ITEMS)
    again.apply(batch(ITEMS, [row(1, 10, FULL)]))
    check(again, {})


def test_a_delete_of_a_row_never_seen_is_remembered(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 20, op="d")]))
    sink.apply(batch(ITEMS, [row(1, 10, FULL)]))
    check(sink, {})


def test_versions_beyond_what_a_double_holds_are_told_apart(sink: Sink) -> None:
    high = (1 << 62) + 1
    sink.apply(batch(ITEMS, [row(1, high, FULL)]))
    sink.apply(batch(ITEMS, [row(1, high - 1, OTHER)]))
    check(sink, after(1, FULL))
    sink.apply(batch(ITEMS, [row(1, high + 1, OTHER)]))
    check(sink, after(1, OTHER))


def test_a_row_inserted_again_after_its_delete_is_back(sink: Sink) -> None:
    for changes in ([row(1, 10, FULL)], [row(1, 11, op="d")], [row(1, 12, OTHER)]):
        sink.apply(batch(ITEMS, changes))
    check(sink, after(1, OTHER))


def test_update_keeps_the_large_column_it_did_not_send(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL), row(2, 11, OTHER)]))
    sink.apply(batch(ITEMS, [row(1, 12, WITHOUT_BIG, unchanged=["big"]), row(2, 13, FULL)]))
    check(sink, after(1, WITHOUT_BIG + ',"big":"large"') | after(2, FULL))


def test_a_stale_partial_row_is_ignored(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 20, FULL), row(2, 20, op="d")]))
    late = [row(1, 12, WITHOUT_BIG, unchanged=["big"]), row(2, 12, WITHOUT_BIG, unchanged=["big"])]
    sink.apply(batch(ITEMS, late))
    check(sink, after(1, FULL))


def test_a_partial_row_without_its_stored_row_is_rejected_and_the_rest_applied(bench: Bench, sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL), row(2, 10, FULL)]))
    bench.lose(ITEMS, '{"id":1}')
    with pytest.raises(Rejected) as caught:
        sink.apply(batch(ITEMS, [row(1, 12, WITHOUT_BIG, unchanged=["big"]), row(2, 12, OTHER), row(3, 12, FULL)]))
    assert [(item.key, item.version, item.reason) for item in caught.value.items] == [
        ('{"id":1}', 12, "stored row missing")
    ]
    check(sink, after(2, OTHER) | after(3, FULL))


def test_a_truncate_removes_what_is_older_and_keeps_what_is_newer(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL), row(2, 30, FULL), row(3, 11, FULL)]))
    sink.apply(batch(ITEMS, [change("t", None, 20), row(3, 21, OTHER)]))
    check(sink, after(2, FULL) | after(3, OTHER))


def test_a_truncate_and_its_row_change_nothing_where_all_that_is_stored_is_newer(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 30, FULL)]))
    sink.apply(batch(ITEMS, [change("t", None, 20), row(1, 25, OTHER)]))
    check(sink, after(1, FULL))
    sink.apply(batch(ITEMS, [row(2, 10, OTHER)]))
    check(sink, after(1, FULL))


def test_what_a_truncate_removed_stays_away(bench: Bench, sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL)]))
    sink.apply(batch(ITEMS, [change("t", None, 20)]))
    again = bench.open()
    again.prepare(ITEMS)
    again.apply(batch(ITEMS, [row(1, 10, FULL), row(2, 12, FULL)]))
    check(again, {})


def test_a_row_written_after_the_truncate_of_its_own_transaction_stays(sink: Sink) -> None:
    """Both have one version if another transaction committed while theirs was open: see docs/adr/0013-versions.md."""
    sink.apply(batch(ITEMS, [row(1, 10, FULL), row(2, 11, FULL), row(3, 12, FULL)]))
    tied = [row(3, 50, FULL), change("t", None, 50), row(1, 50, OTHER), row(4, 50, OTHER)]
    rows = log_table([{**each, "ordinal": ordinal} for ordinal, each in enumerate(tied)])
    for _ in range(2):
        for folded in gather(ranked(rows), Registry()).batches:
            sink.apply(folded)
        check(sink, after(1, OTHER) | after(4, OTHER))


def gone(version: int, low: str, high: str) -> Row:
    """The partition of the rows from `low` to below `high` went."""
    return change("p", KeyRange((Level(("id",), ("number",), (low,), (high,)),)).text(), version)


def test_a_removed_range_takes_its_older_rows_and_no_other(bench: Bench, sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL), row(2, 10, FULL), row(3, 30, FULL), row(4, 10, FULL), row(5, 10, FULL)]))
    sink.apply(batch(ITEMS, [gone(20, "2", "5"), row(4, 25, OTHER), row(2, 15, OTHER)]))
    state = after(1, FULL) | after(3, FULL) | after(4, OTHER) | after(5, FULL)
    check(sink, state)
    bench.restart()
    again = bench.open()
    again.prepare(ITEMS)
    again.apply(batch(ITEMS, [row(2, 10, FULL), row(4, 10, FULL)]))
    again.apply(batch(ITEMS, [gone(20, "2", "5")]))
    check(again, state)
    again.apply(batch(ITEMS, [row(2, 21, OTHER)]))
    check(again, state | after(2, OTHER))


def test_an_empty_batch_changes_nothing(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL)]))
    sink.apply(batch(ITEMS, []))
    check(sink, after(1, FULL))


def test_a_new_column_arrives(sink: Sink) -> None:
    sink.apply(batch(ITEMS, [row(1, 10, FULL)]))
    wider = TableSchema(ITEMS.table, (*ITEMS.columns, Column("extra", INT4)), id=2, oid=ITEMS.oid)
    sink.prepare(wider)
    sink.apply(batch(wider, [row(2, 11, OTHER + ',"extra":5')]))
    stored = sink.stored(wider)
    assert stored.num_rows == 2
    assert sink.expected(wider, images(after(2, OTHER + ',"extra":5'))).to_pylist()[0] in stored.to_pylist()


KEYED = {
    "integers": (table("ints"), INTEGERS),
    "odd-texts": (table("odd_texts", [("id", TEXT)]), ODD_TEXTS),
    "pairs": (table("pairs", [("id", INT4), ("part", TEXT)]), PAIRS),
}


@pytest.mark.parametrize("keyed", sorted(KEYED))
@pytest.mark.parametrize("seed", seeds(1, 30))
def test_any_order_of_repeats_ends_as_one_clean_pass(bench: Bench, seed: int, keyed: str) -> None:
    schema, keys = KEYED[keyed]
    rng = random.Random(f"{seed}-{keyed}")
    history = History(schema, keys, rng).write(60)
    batches = [batch(schema, rows) for rows in cut(history.rows, rng)]
    clean = deliver(bench, schema, batches, rng)
    check(clean, history.state(), schema)


@pytest.mark.parametrize("seed", seeds(1, 10))
def test_a_shaped_table_ends_as_the_shaped_rows_of_the_source(bench: Bench, seed: int) -> None:
    """Rows enter and leave the filter, also where the column that it reads was not sent."""
    rng = random.Random(f"shape-{seed}")
    history = History(ITEMS, INTEGERS, rng).write(60)
    source = history.state()
    settings = shaped_settings(ITEMS.table)
    sink = ShapedSink(bench.open(), settings)
    sink.prepare(ITEMS)
    batches = [batch(ITEMS, rows) for rows in cut(history.rows, rng)]
    for number, current in enumerate(batches):
        if rng.random() < 0.2:
            sink = ShapedSink(bench.open(), settings)
            sink.prepare(ITEMS)
        apply_with_source(sink, current, source)
        if number and rng.random() < 0.3:
            apply_with_source(sink, batches[rng.randrange(number)], source)
    check(sink, source)
    by_hand = images(shaped_by_hand(source))
    plain = bench.open().expected(sink.stored_schema(ITEMS), by_hand)
    assert sink.stored(ITEMS).to_pylist() == plain.to_pylist()


def test_a_row_whose_expression_fails_is_rejected_alone_with_the_name_of_the_expression(bench: Bench) -> None:
    settings = shaped_settings(ITEMS.table, where="", compute={"share": "100 / length(big)"})
    sink = ShapedSink(bench.open(), settings)
    sink.prepare(ITEMS)
    empty = FULL.replace('"large"', '""')
    with pytest.raises(Rejected) as caught:
        sink.apply(batch(ITEMS, [row(1, 10, empty), row(2, 10, FULL)]))
    assert [(item.key, item.version) for item in caught.value.items] == [('{"id":1}', 10)]
    assert caught.value.items[0].reason.endswith("shape of public.items, compute.share: division by zero")
    check(sink, after(2, FULL))


def deliver(bench: Bench, schema: TableSchema, batches: Sequence[Batch], rng: random.Random) -> Sink:
    """Each batch in its order, with repeats of older ones, torn attempts, crashes and restarts in between."""
    sink = bench.open()
    sink.prepare(schema)
    seen: dict[str, int] = {}
    for number, current in enumerate(batches):
        chance = rng.random()
        if chance < 0.3:
            sink.apply(_torn(current, rng))
        elif chance < 0.5:
            sink.apply(current)
            sink = bench.open()  # the writer died after writing, before it could say so
            sink.prepare(schema)
        elif chance < 0.6:
            bench.restart()
        try:
            sink.apply(current)
        except Lost:  # a connection that ended with the old server: the service opens the sink again
            sink = bench.open()
            sink.prepare(schema)
            sink.apply(current)
        if number and rng.random() < 0.4:
            sink.apply(batches[rng.randrange(number)])
        seen = _never_back(seen, bench.versions(schema))
    return sink


def _torn(whole: Batch, rng: random.Random) -> Batch:
    """What a failed attempt may have left behind: the truncate and any of the rows."""
    kept = [index for index in range(whole.rows.num_rows) if rng.random() < 0.5]
    return replace(whole, rows=whole.rows.take(pa.array(kept, pa.int64())))


def _never_back(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    assert {key for key, version in before.items() if now.get(key, 0) < version} == set()
    return now
