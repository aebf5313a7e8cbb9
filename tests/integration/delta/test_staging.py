"""Several tasks write one batch, and one commit of the driver makes it visible."""

import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cdc.errors import Busy, SinkError
from cdc.model import Column, TableId, TableSchema
from cdc.ports import Batch, StagingSink
from sinks.delta.deletion_vectors import new_files
from sinks.delta.files.transaction_log import commit_path, parse_commit
from sinks.delta.sink import DeltaSink
from sinks.delta.staging import commit as commit_module
from sinks.delta.staging import plan as plan_module
from sinks.delta.write import writer
from sinks.rows.images import STORED_ROW_MISSING
from tests import fix_delta
from tests.fix_delta import OpenLake, ends_as_the_source, stored_table
from tests.scenes.histories import FLOAT8, INT4, INTEGERS, ODD_TEXTS, PAIRS, TEXT, batch, change, table
from tests.scenes.seeds import seeds
from tests.scenes.staged_sink import StagedSink, split

ITEMS = TableSchema(
    TableId("public", "items"), (Column("id", INT4, key=True), Column("label", TEXT), Column("big", TEXT)), 1
)


def numbers(ids: range, version: int, label: str = "row") -> Batch:
    return fix_delta.numbers(ITEMS, ids, version, label, big="big")


def labels(sink: DeltaSink) -> dict[int, str]:
    return {row["id"]: row["label"] for row in sink.stored(ITEMS).to_pylist()}


def staged(sink: DeltaSink, given: Batch, plan: bytes) -> list[bytes]:
    return [sink.stage(part, plan).content for _, part in split(given)]


def write(sink: DeltaSink, given: Batch) -> None:
    plan = sink.plan(ITEMS)
    sink.commit_staged(ITEMS, plan, staged(sink, given, plan))


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few hundred rows, merged in fours."""
    monkeypatch.setattr(writer, "LEAST_FILE", 20_000)
    monkeypatch.setattr(new_files, "SMALL_FILES", 4)


def test_a_delta_sink_is_a_staging_sink(open_lake: OpenLake) -> None:
    assert isinstance(open_lake(ITEMS), StagingSink)


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("seed", seeds(1, 20))
@pytest.mark.parametrize(
    ("key", "keys"),
    [([("id", INT4)], INTEGERS), ([("id", TEXT)], ODD_TEXTS), ([("id", INT4), ("part", TEXT)], PAIRS)],
    ids=["integers", "texts", "pairs"],
)
def test_a_history_written_by_tasks_ends_as_the_source(
    open_lake: OpenLake, seed: int, key: list[tuple[str, object]], keys: list[dict[str, str]]
) -> None:
    rng = random.Random(seed)
    schema = table("items", key)  # type: ignore[arg-type]
    sink = StagedSink(lambda: open_lake(schema, as_text={schema.table: ("at",)}), rng)
    ends_as_the_source(sink, schema, rng, keys, length=60)
    assert sink.planned > 5


def test_nothing_is_visible_before_the_commit_and_everything_after_it(open_lake: OpenLake, lake: Path) -> None:
    sink = open_lake(ITEMS)
    sink.apply(numbers(range(100), 5))
    plan = sink.plan(ITEMS)
    before = stored_table(lake).version()
    contents = staged(sink, numbers(range(50, 150), 10, "new"), plan)
    assert stored_table(lake).version() == before and "new" not in "".join(labels(sink).values())
    sink.commit_staged(ITEMS, plan, contents)
    assert labels(sink) == {one: f"{'new' if one >= 50 else 'row'} {one}" for one in range(150)}
    assert stored_table(lake).version() == before + 1


def test_a_commit_records_the_lsn_and_readers_of_delta_see_its_rows(open_lake: OpenLake, lake: Path) -> None:
    sink = open_lake(ITEMS)
    sink.apply(numbers(range(100), 5))
    write(sink, numbers(range(20), 10, "new"))
    actions = parse_commit(commit_path(lake / "public.items", stored_table(lake).version()).read_bytes())
    assert {"txn": {"appId": "millrace.lsn", "version": 11}} in actions
    assert len(labels(sink)) == 100


def test_files_that_were_staged_and_never_committed_change_nothing_and_are_removed_later(
    open_lake: OpenLake, lake: Path
) -> None:
    sink = open_lake(ITEMS)
    sink.apply(numbers(range(100), 5))
    staged(sink, numbers(range(100), 10, "lost"), sink.plan(ITEMS))
    write(sink, numbers(range(10), 20, "kept"))
    assert labels(sink) == {one: f"{'kept' if one < 10 else 'row'} {one}" for one in range(100)}
    unused = {path.name for path in (lake / "public.items").glob("*.parquet")} - set(_live(lake))
    assert unused
    for name in unused:
        os.utime(lake / "public.items" / name, (0, 0))
    sink.maintain(ITEMS)
    assert not unused & {path.name for path in (lake / "public.items").glob("*.parquet")}
    assert len(labels(sink)) == 100


def _live(lake: Path) -> list[str]:
    return [uri.rsplit("/", 1)[-1] for uri in stored_table(lake).file_uris()]


def test_staging_the_same_rows_again_commits_nothing(open_lake: OpenLake, lake: Path) -> None:
    sink = open_lake(ITEMS)
    sink.apply(numbers(range(100), 5))
    for _ in range(2):
        write(sink, numbers(range(20), 10, "new"))
    assert stored_table(lake).version() == 3, "created, loaded, vectors enabled and one commit"
    write(sink, numbers(range(20), 7, "older"))
    assert labels(sink)[3] == "new 3"


def test_a_partial_row_without_a_stored_one_is_rejected_by_its_task(open_lake: OpenLake) -> None:
    sink = open_lake(ITEMS)
    sink.apply(numbers(range(3), 5))
    rows = [change("u", f'{{"id":{one}}}', 9, f'{{"id":{one},"label":"x"}}', ["big"]) for one in (1, 7)]
    plan = sink.plan(ITEMS)
    found = sink.stage(batch(ITEMS, rows), plan)
    assert [(item.key, item.reason) for item in found.rejected] == [('{"id":7}', STORED_ROW_MISSING)]
    sink.commit_staged(ITEMS, plan, [found.content])
    assert sink.stored(ITEMS)["big"].to_pylist() == ["big 0", "big 1", "big 2"]


def test_of_two_drivers_that_commit_at_once_one_stages_again_and_nothing_is_lost(open_lake: OpenLake) -> None:
    sinks = [open_lake(ITEMS) for _ in range(2)]
    sinks[0].apply(numbers(range(100), 5))
    sinks[0].plan(ITEMS)
    ready = threading.Barrier(2)
    conflicts: list[int] = []

    def run(number: int) -> None:
        sink, first = sinks[number], True
        given = numbers(range(number, 200, 2), 10, f"driver{number}")
        while True:
            plan = sink.plan(ITEMS)
            contents = staged(sink, given, plan)
            if first:
                ready.wait(30)
            first = False
            try:
                sink.commit_staged(ITEMS, plan, contents)
            except Busy:
                conflicts.append(number)
                continue
            return

    _in_threads(run)
    assert len(conflicts) == 1
    assert labels(sinks[0]) == {one: f"driver{one % 2} {one}" for one in range(200)}


def _in_threads(run: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)


def test_the_commits_of_many_tables_may_run_at_once(open_lake: OpenLake) -> None:
    columns = (Column("id", INT4, key=True), Column("label", TEXT), Column("big", TEXT))
    schemas = [TableSchema(TableId("public", f"t{number}"), columns, 1) for number in range(6)]
    sink = open_lake(*schemas)

    def run(schema: TableSchema) -> int:
        for version in (5, 9):
            plan = sink.plan(schema)
            parts = split(fix_delta.numbers(schema, range(30), version, f"v{version}", big="big"))
            sink.commit_staged(schema, plan, [sink.stage(part, plan).content for _, part in parts])
        return sum(label.startswith("v9") for label in map(str, sink.stored(schema)["label"].to_pylist()))

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(run, schemas)) == [30] * 6


@pytest.mark.usefixtures("small_files")
def test_small_files_of_a_part_are_merged_by_its_tasks(open_lake: OpenLake, lake: Path) -> None:
    sink = StagedSink(lambda: open_lake(ITEMS), random.Random(1))
    sink.apply(numbers(range(100), 5))
    for version in range(10, 50):
        sink.apply(numbers(range(version, 100, 10), version, f"v{version}"))
    assert len(_live(lake)) < 25, "40 batches of three tasks would leave 120 files"
    assert labels(sink.driver) == {one: _last(one) for one in range(100)}


def _last(one: int) -> str:
    versions = [version for version in range(10, 50) if one in range(version, 100, 10)]
    return f"v{versions[-1]} {one}" if versions else f"row {one}"


@pytest.mark.usefixtures("small_files")
def test_a_merge_is_left_out_where_another_task_replaced_rows_of_the_merged_files(
    open_lake: OpenLake, lake: Path
) -> None:
    """The same name for other keys: what a changed number of partitions under an old name would do."""
    sink = open_lake(ITEMS)
    sink.apply(numbers(range(100), 5))
    for version in range(10, 16):
        plan = sink.plan(ITEMS)
        part = numbers(range(version, 100, 10), version, "first")
        sink.commit_staged(ITEMS, plan, [sink.stage(part, plan, "1 of 2").content])
    plan = sink.plan(ITEMS)
    merging = sink.stage(numbers(range(5), 30, "second"), plan, "1 of 2")
    other = sink.stage(numbers(range(20, 40), 30, "second"), plan, "2 of 2")
    sink.commit_staged(ITEMS, plan, [merging.content, other.content])
    found = labels(sink)
    assert len(found) == 100 and found[25] == "second 25" and found[45] == "first 45"


def test_what_two_tasks_staged_for_one_row_is_refused(open_lake: OpenLake) -> None:
    sink = open_lake(ITEMS)
    sink.apply(numbers(range(10), 5))
    plan = sink.plan(ITEMS)
    twice = [sink.stage(numbers(range(5), 9, "new"), plan).content for _ in range(2)]
    with pytest.raises(SinkError, match="the same row"):
        sink.commit_staged(ITEMS, plan, twice)
    assert "new 1" not in labels(sink).values()


def test_what_was_staged_long_ago_is_staged_again(open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = open_lake(ITEMS)
    plan = sink.plan(ITEMS)
    contents = staged(sink, numbers(range(5), 9), plan)
    monkeypatch.setattr(commit_module, "LONGEST_WAIT", -1.0)
    with pytest.raises(Busy):
        sink.commit_staged(ITEMS, plan, contents)


@pytest.mark.parametrize("settings", [{"stored_as_scd_type": 2}, {"append_only": True}, {"deletion_vectors": False}])
def test_tables_of_other_forms_are_left_to_apply(open_lake: OpenLake, settings: dict[str, object]) -> None:
    assert open_lake(ITEMS, **settings).plan(ITEMS) == b""


def test_keys_without_statistics_and_too_many_small_files_are_left_to_apply(
    open_lake: OpenLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = TableSchema(TableId("public", "odd"), (Column("n", FLOAT8, key=True), Column("label", TEXT)), 1)
    sink = open_lake(ITEMS, odd)
    assert sink.plan(ITEMS)
    assert sink.plan(odd) == b""
    write(sink, numbers(range(10), 5))
    monkeypatch.setattr(plan_module, "MOST_SMALL_FILES", 0)
    assert sink.plan(ITEMS) == b""
