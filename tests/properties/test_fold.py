"""Folding: associative, whatever the cuts, the repeats and the order of keys; and Spark's half equals the book's."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.model import LOG_SCHEMA, PROGRESS_TABLE, TableId, TableSchema
from sinks.fold.arrow import ranked as ranked_by_arrow
from sinks.fold.folded import Folded, gather, joined
from sinks.fold.spark import FOLDED, fold
from tests.scenes.histories import INTEGERS, ODD_TEXTS, TEXT, History, Row, change, folded, log_table, removed, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ITEMS = table()
RANKED = pa.schema([*FOLDED, pa.field("ordinal", pa.int64()), pa.field("rank", pa.int32())])
seeds = st.integers(0, 2**32)
Outcome = tuple[dict[str, Any], int, dict[str, int]]
"""What counts by key, the newest truncate, and the removed ranges with their versions."""


class Registry:
    """Every table has the same columns."""

    def get(self, name: TableId, schema_id: int) -> TableSchema:
        return TableSchema(name, ITEMS.columns, id=schema_id)

    def record(self, schema: TableSchema) -> TableSchema:
        return schema

    def newest(self) -> Sequence[TableSchema]:
        return []


def ranked(rows: Sequence[Row]) -> pa.Table:
    """What `fold` gives, by a plain sort."""
    by_key: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        by_key.setdefault((row["table"], row["key"]), []).append(row)
    out: list[Row] = []
    for group in by_key.values():
        newest = sorted(group, key=lambda row: (row["version"], row["commit_lsn"], row["ordinal"]), reverse=True)
        kept = newest if newest[0]["unchanged"] else newest[:1]
        out += [{**row, "op": row["op"] if row["op"] in "dtmp" else "u", "rank": at} for at, row in enumerate(kept, 1)]
    return pa.Table.from_pylist(out, schema=RANKED)


def result(rows: Sequence[Row]) -> Outcome:
    """The product's fold of one table, with the Spark half by a plain sort: key to what counts, and the truncate."""
    return shown(gather(ranked(rows), Registry()))


def shown(whole: Folded) -> Outcome:
    rows = [row for batch in whole.batches for row in batch.rows.to_pylist()]
    keys = {row["key"]: essence(row) for row in rows}
    for batch in whole.batches:
        assert len(set(batch.rows["key"].to_pylist())) == batch.rows.num_rows
    ranges = {removal.range.text(): removal.version for batch in whole.batches for removal in batch.removed}
    return keys, max((batch.truncated for batch in whole.batches), default=0), ranges


def test_the_delete_below_a_partial_row_goes_to_the_store_before_it() -> None:
    """Of a key that another row took over: the store would keep the large column of the row that is gone."""
    key = '{"id":1}'
    rows = [change("d", key, 8), change("u", key, 9, key, ["big"])]
    first, second = gather(ranked(rows), Registry()).batches
    assert [(row["op"], row["version"]) for row in first.rows.to_pylist()] == [("d", 8)]
    assert [(row["op"], row["version"]) for row in second.rows.to_pylist()] == [("u", 9)]
    tied = [change("d", key, 9, ordinal=0), change("u", key, 9, key, ["big"], ordinal=1)]
    versions = [batch.rows["version"].to_pylist() for batch in gather(ranked(tied), Registry()).batches]
    assert versions == [[8], [9]], "with one version for both, the store would ignore the row"
    whole = [change("d", key, 8), change("u", key, 9, '{"id":1,"big":"x"}'), change("u", key, 10, key, ["big"])]
    assert len(gather(ranked(whole), Registry()).batches) == 1


def essence(row: Row) -> tuple[Any, ...]:
    return row["op"], row["after"], tuple(row["unchanged"] or ()), row["version"], row["schema_id"]


def by_the_book(rows: Sequence[Row]) -> Outcome:
    newest, truncated = folded(rows)
    return {key: essence(row) for key, row in newest.items()}, truncated, removed(rows)


def history(seed: int, size: int = 40) -> list[Row]:
    rng = random.Random(seed)
    return History(ITEMS, INTEGERS, rng).write(size).rows


def as_changes(outcome: Outcome) -> list[Row]:
    """A folded batch as rows of a log: what a compacted log would hold."""
    keys, truncated, ranges = outcome
    rows = [change(op, key, version, after, list(gone)) for key, (op, after, gone, version, _) in keys.items()]
    rows += [change("p", text, version) for text, version in ranges.items()]
    return [*rows, *([change("t", None, truncated + 1)] if truncated else [])]


@given(seeds)
def test_the_fold_is_the_one_of_the_book(seed: int) -> None:
    rows = history(seed)
    assert result(rows) == by_the_book(rows)


@given(seeds, st.randoms(use_true_random=False))
def test_the_fold_in_arrow_is_the_one_of_the_book(seed: int, rng: random.Random) -> None:
    rows = history(seed)
    shuffled = [*rows, *(row for row in rows if rng.random() < 0.3), change("m", None, 99)]
    rng.shuffle(shuffled)
    assert shown(gather(ranked_by_arrow(log_table(shuffled)), Registry())) == by_the_book(rows)


@given(seeds, st.integers(0, 60))
def test_folding_a_part_first_changes_nothing(seed: int, cut: int) -> None:
    rows = history(seed)
    assert result([*as_changes(result(rows[:cut])), *rows[cut:]]) == result(rows)


@given(seeds, st.lists(st.integers(0, 60), max_size=4))
def test_batches_folded_apart_and_joined_are_the_batch_folded_whole(seed: int, cuts: list[int]) -> None:
    rows = history(seed)
    ends = [0, *sorted(cuts), len(rows)]
    apart = [gather(ranked(rows[start:end]), Registry()) for start, end in pairwise(ends)]
    assert shown(joined(apart)) == result(rows)


@given(seeds, st.randoms(use_true_random=False))
def test_repeats_and_order_change_nothing(seed: int, rng: random.Random) -> None:
    rows = history(seed)
    again = [*rows, *(row for row in rows if rng.random() < 0.3)]
    rng.shuffle(again)
    assert result(again) == result(rows)


@given(seeds)
def test_a_whole_history_leaves_nothing_partial_and_is_the_state_of_the_source(seed: int) -> None:
    made = History(ITEMS, INTEGERS, random.Random(seed)).write(40)
    keys, *_ = result(made.rows)
    assert {key: after for key, (op, after, gone, *_) in keys.items() if op == "u"} == made.state()
    assert not any(gone for _, _, gone, *_ in keys.values())


def test_a_key_change_gives_both_keys_the_same_version() -> None:
    rows = [change("c", '{"id":1}', 5, '{"id":1,"big":"x"}'), change("d", '{"id":1}', 9)]
    rows.append(change("c", '{"id":2}', 9, '{"id":2,"big":"x"}'))
    keys, *_ = result(rows)
    assert [(key, keys[key][0], keys[key][3]) for key in sorted(keys)] == [('{"id":1}', "d", 9), ('{"id":2}', "u", 9)]


def test_filling_gaps_keeps_every_digit_and_escape() -> None:
    raw = '{"id":1,"n":1234567890123456789012345678901234567890.10,"f":1e400,"s":"\\u0041\\/","j":{"a":1,"a":2}}'
    rows = [change("c", '{"id":1}', 5, raw), change("u", '{"id":1}', 9, '{"id":1}', ["n", "f", "s", "j"])]
    assert result(rows)[0]['{"id":1}'][1] == raw


def test_a_delete_ends_the_search_for_older_values() -> None:
    rows = [change("c", '{"id":1}', 5, '{"id":1,"big":"x"}'), change("d", '{"id":1}', 6)]
    rows.append(change("u", '{"id":1}', 9, '{"id":1}', ["big"]))
    assert result(rows)[0]['{"id":1}'][2] == ("big",)


def test_rows_of_two_schemas_come_in_two_batches_and_the_truncate_comes_first() -> None:
    rows = [change("t", None, 8, schema_id=1), change("c", '{"id":1}', 9, '{"id":1}', schema_id=1)]
    rows.append(change("c", '{"id":2}', 10, '{"id":2,"new":1}', schema_id=2))
    batches = gather(ranked(rows), Registry()).batches
    assert [(batch.schema.id, batch.rows.num_rows, batch.truncated) for batch in batches] == [(1, 1, 7), (2, 1, 0)]


def test_a_truncate_removes_earlier_rows_of_its_own_transaction_though_their_versions_are_equal() -> None:
    """A transaction that was overtaken gives all its changes one version: their order in the log decides."""
    rows = [change("c", '{"id":1}', 9, '{"id":1}', ordinal=0), change("c", '{"id":2}', 9, '{"id":2}', ordinal=1)]
    rows += [change("t", None, 9, ordinal=2), change("c", '{"id":2}', 9, '{"id":2,"n":1}', ordinal=3)]
    keys, truncated, ranges = result(rows)
    assert ({key: row[1] for key, row in keys.items()}, truncated) == ({'{"id":2}': '{"id":2,"n":1}'}, 8)
    assert shown(gather(ranked_by_arrow(log_table(rows)), Registry())) == (keys, truncated, ranges)


def test_rows_of_a_resync_stay_though_the_truncate_that_ends_it_has_their_version() -> None:
    """The truncate removes what the resync did not bring, and stands behind its rows in the log."""
    rows = [change("r", f'{{"id":{key}}}', 90, f'{{"id":{key}}}', ordinal=key) for key in (1, 2)]
    rows.append(change("t", None, 90, ordinal=3))
    keys, truncated, ranges = shown(gather(ranked_by_arrow(log_table(rows)), Registry()))
    assert (sorted(keys), truncated) == (['{"id":1}', '{"id":2}'], 89)
    assert (keys, truncated, ranges) == by_the_book(rows)


@pytest.mark.spark
def test_spark_ranks_as_a_plain_sort_does(spark: "SparkSession") -> None:
    """Two hundred histories, each its own table, in one job."""
    from pyspark.sql.pandas.types import from_arrow_schema

    rows: list[Row] = []
    expected: dict[str, Outcome] = {}
    for seed in range(200):
        schema = table(f"t{seed}", [("id", TEXT)])
        rng = random.Random(seed)
        own = History(schema, ODD_TEXTS if seed % 2 else INTEGERS, rng).write(rng.randint(1, 40)).rows
        own += rng.sample(own, len(own) // 4)
        rng.shuffle(own)
        rows += own
        expected[f"public.t{seed}"] = by_the_book(own)
    rows += [change("m", None, 77, table=PROGRESS_TABLE), change("m", None, 99, table=PROGRESS_TABLE)]
    rows.append(change("m", None, 123, table="public.t1"))
    frame = spark.createDataFrame(log_table(rows), from_arrow_schema(LOG_SCHEMA)).repartition(3)
    whole = gather(fold(frame).toArrow(), Registry())
    assert whole.reached == 99
    found: dict[str, list[Any]] = {}
    for batch in whole.batches:
        found.setdefault(str(batch.schema.table), []).append(batch)
    assert {name: shown(Folded(whole.reached, None, batches)) for name, batches in found.items()} == expected
