"""Merging, retention and compaction on real files, and the plans behind them."""

import json
import threading
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.errors import LogCorrupt
from cdc.log.segments.log import SegmentSettings, SegmentWriter
from cdc.log.segments.merge import plan
from cdc.log.segments.retention import expired
from cdc.log.segments.segment_names import Segment
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry, Lsn
from cdc.ports import Offset
from tests.contract.logs import commits, entry, history, read_all, rows
from tests.scenes.segment_logs import folder_reader, folder_writer

MB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "log"


def small(hours: float = 1e6, gigabytes: float = 100.0, hot: int = 8) -> SegmentSettings:
    return SegmentSettings(hot_segments=hot, retention_hours=hours, retention_gb=gigabytes)


def seg(start: int, stop: int, generation: int = 0, newest: int = 0) -> Segment:
    return Segment(start, stop, generation, Lsn(start), Lsn(stop), Lsn(stop), 1, newest)


def files(root: Path) -> int:
    return sum(1 for folder in ("hot", "history") for _ in (root / folder).iterdir())


# Plans


def test_a_hundred_thousand_flushes_leave_a_bounded_number_of_segments() -> None:
    kept: list[Segment] = []
    sizes: dict[Segment, int] = {}
    most = 0
    for number in range(1, 100_001):
        kept.append(seg(number, number))
        sizes[kept[-1]] = 4_000
        if number % 100 == 0:
            for run in list(plan(kept, sizes, 512, 96 * MB)):
                merged = seg(run[0].start, run[-1].stop, run[0].generation + 1)
                sizes[merged] = sum(sizes.pop(one) for one in run)
                at = kept.index(run[0])
                kept[at : at + len(run)] = [merged]
            most = max(most, len(kept))
    assert [one.start for one in kept] == [1, *(one.stop + 1 for one in kept[:-1])]
    assert most < 700


def test_merged_segments_stop_growing_at_the_target() -> None:
    kept = [seg(index * 10 + 1, index * 10 + 10, 1) for index in range(20)]
    sizes = dict.fromkeys(kept, 30 * MB)
    runs = list(plan(kept, sizes, 512, 96 * MB))
    assert all(len(run) == 3 for run in runs)
    assert len(runs) == 6


def test_large_fresh_segments_are_not_rewritten() -> None:
    kept = [seg(number, number) for number in range(1, 2000)]
    assert list(plan(kept, dict.fromkeys(kept, 50 * MB), 512, 96 * MB)) == []


@pytest.mark.parametrize(
    ("oldest", "room", "protected", "gone"),
    [(0, 10**9, None, 0), (3, 10**9, None, 3), (9, 10**9, 2, 2), (0, 25, None, 3), (0, 25, 1, 1), (9, 0, 0, 0)],
)
def test_retention_takes_the_oldest_that_everybody_has_read(
    oldest: int, room: int, protected: int | None, gone: int
) -> None:
    kept = [seg(number, number, newest=number - 1) for number in range(1, 6)]
    found = expired(kept, dict.fromkeys(kept, 10), oldest, room, protected)
    assert list(found) == kept[:gone]


# Merging


def test_merging_changes_no_row_no_offset_and_no_mark(root: Path) -> None:
    writer = folder_writer(root, small())
    for number in range(1, 101):
        writer.append(entry(number, marks={"at": str(number), f"m{number}": "x"} if number % 10 == 0 else None))
        if number % 7 == 0:
            writer.maintain()
    reader = folder_reader(root)
    assert files(root) < 40
    assert read_all(reader).equals(history(*range(1, 101)))
    for number in range(101):
        ends = [piece.end for piece in reader.read(Offset(str(number)))]
        assert ends == [100 * later + 10 for later in range(number + 1, 101)]
        assert reader.seek(Lsn(100 * number + 10)) == str(number)
    writer.close()
    marks = folder_writer(root, small()).progress().marks
    assert marks == {"at": "100", **{f"m{number}": "x" for number in range(10, 101, 10)}}


def test_a_spooled_segment_moves_and_merges_like_any_other(root: Path) -> None:
    writer = folder_writer(root, small(hot=1))
    for number in range(1, 21):
        spool = writer.spool()
        spool.write(entry(number).rows)
        spool.publish(entry(number).end)
        writer.maintain()
    assert read_all(folder_reader(root)).equals(history(*range(1, 21)))


def test_readers_read_on_while_segments_are_merged_under_them(root: Path) -> None:
    writer = folder_writer(root, small(hot=2))
    stop = threading.Event()
    failures: list[str] = []

    def read_again_and_again() -> None:
        reader = folder_reader(root)
        while not stop.is_set():
            ends = [piece.end for piece in reader.read(reader.start())]
            if ends != [100 * number + 10 for number in range(1, len(ends) + 1)]:
                failures.append(str(ends))

    thread = threading.Thread(target=read_again_and_again)
    thread.start()
    for number in range(1, 151):
        writer.append(entry(number))
        if number % 3 == 0:
            writer.maintain()
    stop.set()
    thread.join(30)
    assert not failures


def test_appending_listing_and_reading_cost_the_same_after_many_flushes(root: Path) -> None:
    writer = folder_writer(root, small(hot=64))
    reader = folder_reader(root)
    most = 0
    for number in range(1, 1601):
        writer.append(entry(number))
        if number % 64 == 0:
            writer.maintain()
            most = max(most, files(root))
            assert reader.head()[0] == str(number)
    assert most < 64 + 3 * 16, "the work of a listing is the number of names"
    tail = list(reader.read(Offset("1590")))
    assert [piece.end for piece in tail] == [100 * number + 10 for number in range(1591, 1601)]


# Retention


def recent(number: int, age: timedelta) -> Entry:
    return Entry(rows(100 * number, number, at=datetime.now(UTC) - age), Lsn(100 * number + 10), {str(number): "x"})


def aged_log(root: Path, settings: SegmentSettings) -> SegmentWriter:
    writer = folder_writer(root, settings)
    for number in range(1, 7):
        writer.append(recent(number, timedelta(hours=10 if number <= 4 else 0)))
    return writer


def test_what_is_past_its_age_goes_and_position_and_marks_stay(root: Path) -> None:
    writer = aged_log(root, small(hours=5))
    writer.maintain()
    reader = folder_reader(root)
    assert commits(read_all(reader)) == [500, 600]
    assert reader.start() == "4"
    writer.close()
    again = folder_writer(root, small(hours=5))
    assert again.progress().end == 610
    assert set(again.progress().marks) == {str(number) for number in range(1, 7)}


def test_a_log_may_expire_entirely_and_goes_on(root: Path) -> None:
    writer = folder_writer(root, small(hours=5))
    for number in range(1, 4):
        writer.append(recent(number, timedelta(hours=10)))
    writer.maintain()
    writer.maintain()
    reader = folder_reader(root)
    assert (reader.start(), reader.head()) == ("3", ("3", 310))
    writer.append(recent(2, timedelta()))
    writer.append(recent(4, timedelta()))
    assert commits(read_all(reader)) == [400]


def test_a_log_may_expire_ten_thousand_times(root: Path) -> None:
    writer = folder_writer(root, small(hours=5))
    for number in range(1, 31):
        writer.append(recent(number, timedelta(hours=10)))
        writer.maintain()
    floor = folder_reader(root).view().chain.floor
    assert floor is not None
    assert (floor.start, floor.stop) == (1, 30)
    assert floor.generation < 3, "a name has room for four digits"
    assert files(root) == 1
    assert len(writer.progress().marks) == 30


def test_reading_what_retention_removed_is_an_error_and_not_a_gap(root: Path) -> None:
    writer = aged_log(root, small(hours=5))
    reader = folder_reader(root)
    early = reader.start()
    writer.maintain()
    with pytest.raises(LogCorrupt, match=r"Retention removed .*; the oldest offset is 4"):
        list(reader.read(early))


def test_nothing_goes_that_a_registered_consumer_has_not_read(root: Path) -> None:
    writer = aged_log(root, small(hours=5))
    reader = folder_reader(root)
    reader.commit("slow", ZERO_LSN)
    writer.maintain()
    assert reader.start() == "0"
    reader.commit("slow", Lsn(210))
    writer.maintain()
    assert reader.start() == "2"
    reader.forget("slow")
    writer.maintain()
    assert reader.start() == "4"


def test_chunks_that_share_an_lsn_are_kept_until_the_stream_has_passed_them(root: Path) -> None:
    writer = folder_writer(root, small(hours=5))
    old = datetime.now(UTC) - timedelta(hours=10)
    for chunk in "123":
        writer.append(Entry(rows(99, int(chunk), at=old), Lsn(100), {chunk: "x"}))
    reader = folder_reader(root)
    reader.commit("sink", Lsn(100))
    writer.maintain()
    assert reader.start() == "1"


def test_a_log_larger_than_its_room_loses_the_oldest(root: Path) -> None:
    writer = folder_writer(root, small(gigabytes=6_000 / 2**30))
    for number in range(1, 31):
        writer.append(entry(number))
    writer.maintain()
    kept = commits(read_all(folder_reader(root)))
    assert 0 < len(kept) < 90
    assert kept[-1] == 3000


# Compaction


def merged_log(root: Path, entries: Sequence[pa.Table]) -> SegmentWriter:
    """Those entries in history, and a few fresh ones behind them."""
    writer = folder_writer(root, small(hot=1))
    for index, table in enumerate(entries):
        writer.append(Entry(table, Lsn(table["commit_lsn"][-1].as_py() + index + 10)))
    writer.maintain()
    return writer


def partial(commit: int, number: int) -> pa.Table:
    table = rows(commit, number).to_pylist()
    return pa.Table.from_pylist([{**table[0], "unchanged": ["big"]}], LOG_SCHEMA)


def test_compaction_keeps_the_newest_complete_version_of_each_key(root: Path) -> None:
    tables = [rows(100, 1, 2), rows(200, 1, 3), rows(300, 2, op="d"), rows(400, 1), rows(900, 9)]
    writer = merged_log(root, tables)
    reader = folder_reader(root)
    assert writer.compact() == 3
    kept = [(json.loads(row["key"])["id"], row["commit_lsn"], row["op"]) for row in read_all(reader).to_pylist()]
    assert kept == [(3, 200, "u"), (2, 300, "d"), (1, 400, "u"), (9, 900, "u")]
    assert [piece.end for piece in reader.read(Offset("2"))] == [312, 413, 914]
    assert writer.compact() == 0


def test_compaction_keeps_what_a_partial_row_is_filled_from(root: Path) -> None:
    writer = merged_log(root, [rows(100, 1), rows(200, 1), partial(300, 1), partial(400, 1), rows(900, 9)])
    assert writer.compact() == 1
    assert commits(read_all(folder_reader(root))) == [200, 300, 400, 900]


def test_compaction_keeps_truncates(root: Path) -> None:
    truncate = pa.Table.from_pylist([{**rows(200, 1, op="t").to_pylist()[0], "key": None, "after": None}], LOG_SCHEMA)
    writer = merged_log(root, [rows(100, 1), truncate, rows(300, 1), rows(900, 9)])
    writer.compact()
    assert commits(read_all(folder_reader(root))) == [200, 300, 900]


def test_compaction_keeps_the_newest_removal_of_each_range(root: Path) -> None:
    def removal(commit: int, text: str) -> pa.Table:
        facts = {**rows(commit, 1, op="p").to_pylist()[0], "key": text, "after": None}
        return pa.Table.from_pylist([facts], LOG_SCHEMA)

    tables = [rows(100, 1), removal(200, "[1]"), removal(300, "[2]"), removal(400, "[1]"), rows(900, 9)]
    writer = merged_log(root, tables)
    writer.compact()
    assert commits(read_all(folder_reader(root))) == [100, 300, 400, 900]


def test_compaction_leaves_what_a_registered_consumer_has_not_read(root: Path) -> None:
    writer = merged_log(root, [rows(100, 1), rows(200, 1), rows(300, 1), rows(900, 9)])
    folder_reader(root).commit("slow", ZERO_LSN)
    assert writer.compact() == 0
    assert writer.compact(force=True) == 2


def test_merging_old_and_fresh_ones_in_one_go_finds_the_marks_of_before(root: Path) -> None:
    """The marks that the second merge repeats lie in a segment that the first has just taken away."""
    writer = folder_writer(root, small(hot=4))
    for turn in range(17):
        for number in range(6 * turn + 1, 6 * turn + 7):
            writer.append(entry(number, marks={"place": str(number)}))
        writer.maintain()
    writer.close()
    assert folder_writer(root, small()).progress().marks["place"] == str(6 * 17)
    assert read_all(folder_reader(root)).equals(history(*range(1, 6 * 17 + 1)))
