"""How a micro-batch is planned from the log and read by its tasks: no Spark needed."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.errors import LogCorrupt
from cdc.log.segments import segment_file
from cdc.log.segments.log import SegmentSettings, SegmentWriter
from cdc.log.segments.reader import offset_of
from cdc.log.spark.splits import Split, advance, distribute, plan, progress_at, progress_row, read
from cdc.model import LOG_SCHEMA, PROGRESS_TABLE, Entry
from cdc.ports import Offset
from tests.contract.logs import commits, entry, history
from tests.scenes.segment_logs import folder_reader, folder_writer

PLENTY = 1 << 40


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def writer(root: Path) -> Iterator[SegmentWriter]:
    """Twelve entries of three rows: ten merged, two fresh."""
    opened = folder_writer(root, SegmentSettings(hot_segments=4, retention_hours=1e6))
    for number in range(1, 11):
        opened.append(entry(number))
    opened.maintain()
    for number in range(11, 13):
        opened.append(entry(number))
    yield opened
    opened.close()


def table(root: Path, whole: list[Split]) -> pa.Table:
    return pa.concat_tables(
        [LOG_SCHEMA.empty_table(), *(rows for piece in whole for rows in read(folder_reader(root), piece))]
    )


def test_a_batch_takes_whole_entries_up_to_its_limit(root: Path, writer: SegmentWriter) -> None:
    view = folder_reader(root).view()
    for start in range(12):
        for limit in (1, 3, 7, 1000):
            taken = advance(view, start, limit, PLENTY) - start
            assert taken == min(max(limit // 3, 1), 12 - start), (start, limit)
    assert advance(view, 12, 100, PLENTY) == 12


def test_a_batch_is_limited_by_bytes_too(root: Path, writer: SegmentWriter) -> None:
    assert advance(folder_reader(root).view(), 0, 1000, 1) == 1


@pytest.mark.parametrize("start", range(0, 12, 3))
def test_any_range_of_offsets_is_read_exactly(root: Path, writer: SegmentWriter, start: int) -> None:
    view = folder_reader(root).view()
    for end in range(start + 1, 13):
        assert table(root, plan(view, start, end)).equals(history(*range(start + 1, end + 1)))


def test_entries_are_cut_right_wherever_row_groups_begin(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "GROUP_ROWS", 4)
    writer = folder_writer(root, SegmentSettings(hot_segments=1, retention_hours=1e6))
    for number in range(1, 9):
        writer.append(Entry(entry(number, size=number).rows, entry(number).end))
    writer.maintain()
    reader = folder_reader(root)
    whole = pa.concat_tables([entry(number, size=number).rows for number in range(1, 9)])
    assert pa.concat_tables([piece.rows for piece in reader.read(reader.start())]).equals(whole)
    assert [piece.rows.num_rows for piece in reader.read(Offset("3"))] == [4, 5, 6, 7, 8]
    for tasks in (1, 3, 36):
        shares = distribute(plan(reader.view(), 2, 8), tasks, 1)
        assert table(root, [piece for share in shares for piece in share]).equals(whole.slice(3))
    writer.close()


@pytest.mark.parametrize("tasks", [1, 2, 5])
def test_tasks_share_the_rows_without_losing_or_doubling_any(root: Path, writer: SegmentWriter, tasks: int) -> None:
    shares = distribute(plan(folder_reader(root).view(), 0, 12), tasks, 1)
    assert len(shares) == tasks
    assert table(root, [piece for share in shares for piece in share]).equals(history(*range(1, 13)))


def test_few_rows_are_one_task(root: Path, writer: SegmentWriter) -> None:
    assert len(distribute(plan(folder_reader(root).view(), 0, 12), 8, 1000)) == 1
    assert distribute([], 8, 1000) == [[]]


def test_a_task_finds_its_rows_though_they_were_merged_after_it_was_planned(root: Path, writer: SegmentWriter) -> None:
    planned = distribute(plan(folder_reader(root).view(), 3, 12), 4, 1)
    for number in range(13, 20):
        writer.append(entry(number))
    before = {path.name for path in (root / "hot").iterdir()}
    writer.maintain()
    assert {path.name for path in (root / "hot").iterdir()} != before
    assert table(root, [piece for share in planned for piece in share]).equals(history(*range(4, 13)))


def test_the_marker_says_where_the_batch_ends(root: Path, writer: SegmentWriter) -> None:
    view = folder_reader(root).view()
    for end in (1, 5, 10, 12):
        row = progress_row(*progress_at(view, end)).to_pylist()[0]
        assert (row["table"], row["op"], row["version"], row["key"]) == (PROGRESS_TABLE, "m", 100 * end + 10, None)
        assert row["after"] == offset_of(end)
    with pytest.raises(LogCorrupt, match="beyond the end"):
        progress_at(view, 13)


def test_rows_that_retention_removed_are_an_error(root: Path, writer: SegmentWriter) -> None:
    writer._retention.apply(0.0001, 100.0)
    with pytest.raises(LogCorrupt, match="Retention removed"):
        plan(folder_reader(root).view(), 0, 12)
    assert commits(table(root, plan(folder_reader(root).view(), 12, 12))) == []
