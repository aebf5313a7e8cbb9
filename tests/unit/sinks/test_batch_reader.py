"""Which part of a micro-batch is read in the driver's process, which by tasks, and which was read before: no Spark."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc.ports import LogReader, Offset
from sinks.fold.folded import Folded, of_slices
from sinks.spark import batch_reader
from sinks.spark.batch_reader import BatchReader
from tests.fix_log import FilledLog
from tests.scenes.histories import change, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ITEMS = table()


class Query:
    """Spark's part: it plans batches from where the last one ended, and keeps where they end in its checkpoint."""

    def __init__(self, log: FilledLog, checkpoint: Path) -> None:
        self.log = log
        self.offsets = checkpoint / "offsets"
        self.offsets.mkdir(parents=True)
        self.reader = BatchReader(log.reader, checkpoint)
        self.by_tasks: list[tuple[int, int]] = []
        self._ends = [0]

    def append(self, *entries: int) -> None:
        """Entries of one row, which has the entry's number as its key."""
        for number in entries:
            self.log.append([change("u", f'{{"id":{number}}}', 100 * number, f'{{"id":{number}}}')])

    def batch(self, until: int) -> list[int]:
        """Plan a batch up to an entry, and read it; returns its keys."""
        number = len(self._ends) - 1
        (self.offsets / str(number)).write_text(f'v1\n{{}}\n{{"sequence": {until}}}\n', encoding="utf-8")
        self._ends.append(until)
        return keys(self.reader.read(self, number))  # type: ignore[arg-type]

    def collected(self, _changes: "DataFrame", log: LogReader) -> Iterator[Folded]:
        """Instead of tasks."""
        after, until = self._ends[-2:]
        self.by_tasks.append((after, until))
        yield of_slices(list(log.read(Offset(str(after)), Offset(str(until)))), log.schemas)

    def follow(self) -> list[int]:
        """Follow until there is nothing left; returns the keys."""
        looks = iter([False] * 3 + [True])
        return keys(self.reader.follow(lambda: next(looks, True)))


def keys(pieces: Iterator[Folded]) -> list[int]:
    found = [key for one in pieces for batch in one.batches for key in batch.rows["key"].to_pylist()]
    return [json.loads(str(key))["id"] for key in found]


@pytest.fixture
def query(filled_log: FilledLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Query:
    """A query whose first batch had entry 1, which tasks read."""
    filled_log.record(ITEMS)
    made = Query(filled_log, tmp_path / "checkpoint")
    monkeypatch.setattr(batch_reader, "_collected", made.collected)
    made.append(1)
    assert made.batch(1) == [1]
    assert made.by_tasks == [(0, 1)]
    return made


def test_a_small_batch_is_read_without_tasks(query: Query) -> None:
    query.append(2, 3)
    assert query.batch(3) == [2, 3]
    assert query.by_tasks == [(0, 1)]


def test_what_followed_a_batch_is_not_read_again_when_spark_plans_it(query: Query) -> None:
    query.append(2, 3)
    assert query.follow() == [2, 3]
    assert query.batch(2) == query.batch(3) == []
    query.append(4, 5)
    assert query.batch(5) == [4, 5]
    assert query.by_tasks == [(0, 1)]


def test_a_batch_of_which_a_part_has_followed_the_last_one_has_the_rest(query: Query) -> None:
    query.append(2, 3)
    assert query.follow() == [2, 3]
    query.append(4)
    assert query.batch(4) == [4]
    assert query.by_tasks == [(0, 1)]


def test_much_is_left_to_spark_and_read_by_tasks(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    query.append(2)
    assert query.follow() == [2]
    monkeypatch.setattr(batch_reader, "_FEW_BYTES", 50)
    query.append(3, 4)
    assert query.follow() == []
    assert query.batch(2) == []
    assert query.batch(4) == [3, 4]
    assert query.by_tasks == [(0, 1), (2, 4)]


def test_what_spark_plans_behind_its_tasks_is_read_from_where_they_ended(query: Query, monkeypatch: Any) -> None:
    query.append(2, 3)
    with monkeypatch.context() as much:
        much.setattr(batch_reader, "_FEW_BYTES", 0)
        assert query.batch(3) == [2, 3]
    query.append(4)
    assert query.batch(4) == [4]
    assert query.by_tasks == [(0, 1), (1, 3)]


def test_following_ends_after_so_many_changes(query: Query, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_reader, "_FOLLOW_CHANGES", 2)
    query.append(2, 3)
    pieces = query.reader.follow(lambda: False)
    assert keys(iter([next(pieces)])) == [2, 3]
    query.append(4)
    assert keys(pieces) == []
    assert query.batch(4) == [4]
