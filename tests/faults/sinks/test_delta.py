"""The Delta sink when things go wrong: other writers, crashes, full disks, folders that vanish."""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError

from cdc.errors import Busy, Lost, SinkError
from cdc.model import Column, TableId, TableSchema
from cdc.ports import Batch
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta import store
from sinks.delta.rows.changes import changes
from sinks.delta.settings import DeltaSettings
from sinks.delta.write import writer as delta_write
from tests import fix_delta
from tests.fix_delta import mark_everywhere, stored_table
from tests.fix_servers import MakeDisk
from tests.scenes.histories import INT4, TEXT, batch, change

ITEMS = TableSchema(TableId("public", "items"), (Column("id", INT4, key=True), Column("label", TEXT)), 1)


def opened(lake: Path) -> delta.DeltaSink:
    return delta.open_sink(DeltaSettings(path=str(lake)), SinkContext(lake))


def prepared(lake: Path, rows: int = 0) -> delta.DeltaSink:
    """With its table, and so many rows in it."""
    sink = opened(lake)
    sink.prepare(ITEMS)
    if rows:
        sink.apply(numbers(range(rows), 5))
    return sink


def numbers(ids: range, version: int, label: str = "x") -> Batch:
    return fix_delta.numbers(ITEMS, ids, version, label)


def labels(sink: delta.DeltaSink) -> dict[int, str]:
    return {row["id"]: row["label"] for row in sink.stored(ITEMS).to_pylist()}


SCRIPT = """
import sys
from pathlib import Path
from tests.faults.sinks.test_delta import numbers, prepared
sink = prepared(Path(sys.argv[1]), 100)
"""


def writer(lake: Path, fail: str = "", before: str = "", after: str = "") -> int:
    """A process that writes a hundred rows, dying at a named point; its exit code."""
    command = [sys.executable, "-c", before + SCRIPT + after, str(lake)]
    return subprocess.run(command, env={**os.environ, "MILLRACE_FAIL": fail}, timeout=60, check=False).returncode


def test_a_batch_run_again_after_a_kill_behind_its_commit_has_one_effect(tmp_path: Path) -> None:
    assert writer(tmp_path, "delta.after_commit:kill") == -signal.SIGKILL
    table = stored_table(tmp_path)
    version = table.version()
    assert table.to_pyarrow_table().num_rows == 100
    sink = prepared(tmp_path, 100)
    assert stored_table(tmp_path).version() == version
    assert sink.stored(ITEMS).num_rows == 100


def test_a_kill_before_the_commit_leaves_nothing_behind_that_is_seen(tmp_path: Path) -> None:
    assert writer(tmp_path, "delta.before_commit:kill") == -signal.SIGKILL
    assert prepared(tmp_path).stored(ITEMS).num_rows == 0
    assert prepared(tmp_path, 100).stored(ITEMS).num_rows == 100


@pytest.fixture(params=["copies", "marks"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How changed rows are replaced: by copying files, or by deletion vectors."""
    if request.param == "marks":
        mark_everywhere(monkeypatch, small_files=4)
    return str(request.param)


@contextlib.contextmanager
def beside(work: Callable[[], object], *forgiven: type[Exception], pause: float = 0.0) -> Iterator[None]:
    """The same work again and again in another thread, with success at least once."""
    done = threading.Event()

    def rounds() -> int:
        count = 0
        while not done.wait(pause):
            with contextlib.suppress(*forgiven):
                work()
                count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(rounds)
        try:
            yield
        finally:
            done.set()
        assert working.result(timeout=60) > 0


def stream(sink: delta.DeltaSink, versions: range, rows: int) -> dict[int, str]:
    """Every seventh row anew in each version; what the table must hold then."""
    expected = {number: f"x {number}" for number in range(rows)}
    for version in versions:
        ids = range(version, rows, 7)
        _until_not_busy(sink, numbers(ids, version, f"v{version}"))
        expected |= {number: f"v{version} {number}" for number in ids}
    return expected


def test_compaction_vacuum_and_a_second_writer_beside_the_stream_lose_nothing(tmp_path: Path, way: str) -> None:
    sink = prepared(tmp_path, 200)

    def compact() -> None:
        table = stored_table(tmp_path)
        table.optimize.compact()
        table.vacuum(retention_hours=1, dry_run=False, enforce_retention_duration=False)

    def rival() -> None:
        other = prepared(tmp_path)
        for version in range(10, 25):
            _until_not_busy(other, numbers(range(100, 300), version * 2 + 1, "rival"))

    with beside(compact, CommitFailedError, DeltaError), ThreadPoolExecutor(1) as pool:
        rivalling = pool.submit(rival)
        for version in range(10, 25):
            _until_not_busy(sink, numbers(range(200), version * 2, "own"))
        rivalling.result(timeout=60)
    found = labels(sink)
    assert sorted(found) == list(range(300))
    assert found[50] == "own 50" and found[150] == "rival 150" and found[250] == "rival 250"
    assert sink.stored(ITEMS).num_rows == 300, f"{way}: no key is stored twice"


def test_metadata_that_others_change_beside_the_stream_stops_nothing(tmp_path: Path, way: str) -> None:
    """Properties of the table are changed by somebody else between our look and our commit."""
    sink = prepared(tmp_path, 200)
    hours = itertools.count(24)

    def alter() -> None:
        stored_table(tmp_path).alter.set_table_properties(
            {"delta.logRetentionDuration": f"interval {next(hours)} hours"}
        )

    with beside(alter, CommitFailedError, DeltaError, pause=0.05):
        expected = stream(sink, range(10, 30), 200)
    assert labels(sink) == expected, way


def _until_not_busy(sink: delta.DeltaSink, given: Batch) -> None:
    for _ in range(50):
        try:
            return sink.apply(given)
        except Busy:
            continue
    raise AssertionError("busy for ever")


def test_two_writers_that_see_an_empty_table_never_both_append_a_key(tmp_path: Path) -> None:
    first, second = prepared(tmp_path), prepared(tmp_path)
    stale = second.store(ITEMS.table).current()
    first.apply(numbers(range(10), 5))
    given = changes(numbers(range(10), 5), second._layout(ITEMS))
    with pytest.raises(CommitFailedError):
        delta_write.write(stale, given)
    second.apply(numbers(range(10), 5))
    assert stored_table(tmp_path).to_pyarrow_table().num_rows == 10


def test_many_writers_create_one_table(tmp_path: Path) -> None:
    sinks = [opened(tmp_path) for _ in range(8)]
    ready = threading.Barrier(8)

    def create(sink: delta.DeltaSink) -> None:
        ready.wait(timeout=30)
        sink.prepare(ITEMS)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, sinks))
    assert stored_table(tmp_path).version() == 0
    sinks[0].apply(numbers(range(5), 5))
    assert sinks[7].stored(ITEMS).num_rows == 5


def test_a_writer_that_always_loses_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = prepared(tmp_path, 10)
    real = delta_write.scanned

    def overtaken(*arguments: object) -> object:
        rows = real(*arguments)  # type: ignore[arg-type]
        rival = opened(tmp_path)
        monkeypatch.setattr(delta_write, "scanned", real)
        rival.apply(numbers(range(10), next(versions), "rival"))
        monkeypatch.setattr(delta_write, "scanned", overtaken)
        return rows

    versions = iter(range(10, 20))
    monkeypatch.setattr(delta_write, "scanned", overtaken)
    monkeypatch.setattr(store, "ATTEMPTS", 3)
    with pytest.raises(Busy, match="other writers"):
        sink.apply(numbers(range(10), 50))
    monkeypatch.setattr(delta_write, "scanned", real)
    assert set(labels(sink).values()) == {f"rival {number}" for number in range(10)}


def test_a_table_that_vanished_is_lost_and_says_what_to_do(tmp_path: Path) -> None:
    sink = prepared(tmp_path, 10)
    shutil.rmtree(tmp_path / "public.items")
    with pytest.raises(Lost, match=r"public\.items.*millrace backfill public\.items"):
        sink.apply(numbers(range(10), 6))
    assert not (tmp_path / "public.items").exists(), "an empty table would hide that rows are missing"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"partition_by": ["label"]}, r"is partitioned by label.*Move it away"),
        ({"configuration": {"delta.appendOnly": "true"}}, r"takes no changes of its rows \(delta.appendOnly\)"),
    ],
)
def test_a_table_of_somebody_else_in_which_rows_cannot_be_replaced_is_refused_by_name(
    tmp_path: Path, form: dict[str, Any], message: str
) -> None:
    prepared(tmp_path, 10)
    schema = stored_table(tmp_path).schema()
    shutil.rmtree(tmp_path / "public.items")
    DeltaTable.create(tmp_path / "public.items", schema, **form)
    with pytest.raises(SinkError, match=message) as caught:
        opened(tmp_path).prepare(ITEMS)
    assert "public.items" in str(caught.value)


def test_a_table_set_to_append_only_later_is_never_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark_everywhere(monkeypatch)
    sink = prepared(tmp_path, 10)
    stored_table(tmp_path).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(SinkError):
        sink.apply(numbers(range(5), 6))
    assert set(labels(sink).values()) == {f"x {number}" for number in range(10)}


def test_a_full_disk_is_busy_and_the_batch_goes_through_once_there_is_room(small_disk: MakeDisk) -> None:
    disk = small_disk(2)
    lake = disk / "lake"
    sink = prepared(lake, 10)
    ballast = disk / "ballast"
    ballast.write_bytes(b"\0" * (shutil.disk_usage(disk).free - 8192))
    big = batch(ITEMS, [change("u", '{"id":1}', 6, f'{{"id":1,"label":"{os.urandom(40000).hex()}"}}')])
    with pytest.raises(Busy, match="the disk is full"):
        sink.apply(big)
    assert labels(sink)[1] == "x 1"
    ballast.unlink()
    sink.apply(big)
    assert len(labels(sink)[1]) == 80000


def test_a_foreign_append_is_kept_and_the_stream_goes_on(tmp_path: Path) -> None:
    """Somebody writes a row of his own into our table: not ours to remove, and no reason to stop."""
    sink = prepared(tmp_path, 10)
    row = stored_table(tmp_path).to_pyarrow_table().slice(0, 1)
    foreign = row.set_column(0, "id", [[77]]).cast(row.schema)
    write_deltalake(tmp_path / "public.items", foreign, mode="append")
    sink.apply(numbers(range(12), 6))
    assert sorted(labels(sink)) == [*range(12), 77]


def test_maintenance_beside_the_stream_loses_no_change(tmp_path: Path, way: str) -> None:
    sink = prepared(tmp_path, 500)
    with beside(lambda: sink.maintain(ITEMS)):
        expected = stream(sink, range(10, 40), 500)
    assert labels(sink) == expected, way


def test_a_kill_of_a_marking_writer_leaves_the_table_whole(tmp_path: Path) -> None:
    """Killed with its new rows written aside and its commit not made: nobody sees them, and the batch goes through."""
    marking = {
        "before": "from sinks.delta.deletion_vectors import writer\nwriter.LEAST_REGION = writer.LEAST_RATIO = 0\n",
        "after": "sink.apply(numbers(range(0, 100, 9), 6, 'new'))\n",
    }
    assert writer(tmp_path, "delta.before_mark:kill", **marking) == -signal.SIGKILL
    sink = opened(tmp_path)
    assert set(labels(sink).values()) == {f"x {number}" for number in range(100)}
    assert writer(tmp_path, **marking) == 0
    assert sum(label.startswith("new") for label in labels(sink).values()) == 12
    assert sink.stored(ITEMS).num_rows == 100


def test_a_writer_that_slept_through_a_clean_up_of_the_log_wakes_up(tmp_path: Path) -> None:
    sleeper, other = prepared(tmp_path), prepared(tmp_path)
    sleeper.apply(numbers(range(10), 5))
    for version in range(6, 12):
        other.apply(numbers(range(10), version, f"v{version}"))
    table = stored_table(tmp_path)
    table.create_checkpoint()
    for number in range(table.version()):
        (tmp_path / "public.items" / "_delta_log" / f"{number:020}.json").unlink()
    sleeper.apply(numbers(range(5), 20, "awake"))
    found = labels(sleeper)
    assert (found[0], found[9]) == ("awake 0", "v11 9")
