"""Where a read begins and ends, over a real segment log: exactly between two commits, wherever entries begin."""

from datetime import UTC, datetime, timedelta

import pytest

from cdc.errors import ChangesRemoved, ConfigError
from cdc.log.segments.log import SegmentWriter
from cdc.log.segments.reader import SegmentReader
from cdc.model import Lsn
from cdc.ports import LogReader
from pyspark_millrace.options import Edge, Point
from pyspark_millrace.positions import CommitRange, begin, until
from tests.fix_log import FilledLog
from tests.scenes.histories import change

NOON = datetime(2026, 3, 1, 12, tzinfo=UTC)
HISTORY = [(100, 0), (200, 10), (300, 30), (400, 20), (500, 40), (600, 50)]
"""Commits by LSN, and the seconds after noon at which each says it committed: not in order, as in Postgres."""


def fill(log: FilledLog) -> LogReader:
    """Two commits an entry."""
    rows = [
        {**change("c", '{"id":1}', lsn - 1, "{}"), "commit_ts": NOON + timedelta(seconds=at)} for lsn, at in HISTORY
    ]
    for first in range(0, len(rows), 2):
        log.append(rows[first : first + 2])
    return log.reader


def commits(reader: LogReader, first: Point = Edge.START, last: Point = Edge.NOW) -> list[int]:
    """The commits that a batch read between two points gives."""
    offset, chosen = begin(reader, first)
    chosen = until(reader, last, chosen)
    parts = [chosen.rows_of(batch) for piece in reader.read(offset) for batch in piece.rows.to_batches()]
    return [lsn for part in parts for lsn in part.column("commit_lsn").to_pylist() if lsn is not None]


def test_the_whole_log_is_read_from_its_start_and_nothing_from_now(filled_log: FilledLog) -> None:
    reader = fill(filled_log)
    assert commits(reader) == [100, 200, 300, 400, 500, 600]
    assert commits(reader, Edge.NOW) == []


@pytest.mark.parametrize("cut", [1, 100, 101, 200, 250, 300, 301, 400, 401, 600, 601, 10_000])
def test_reads_up_to_an_lsn_and_from_it_on_give_each_commit_once(filled_log: FilledLog, cut: int) -> None:
    reader = fill(filled_log)
    before, behind = commits(reader, last=Lsn(cut)), commits(reader, Lsn(cut))
    assert (before, behind) == ([lsn for lsn, _ in HISTORY if lsn < cut], [lsn for lsn, _ in HISTORY if lsn >= cut])


@pytest.mark.parametrize("seconds", [-1, 0, 5, 10, 20, 25, 30, 40, 50, 51])
def test_reads_up_to_a_time_and_from_it_on_give_each_commit_once(filled_log: FilledLog, seconds: int) -> None:
    reader, moment = fill(filled_log), NOON + timedelta(seconds=seconds)
    before, behind = commits(reader, last=moment), commits(reader, moment)
    assert before + behind == [100, 200, 300, 400, 500, 600]
    assert dict(HISTORY).get(behind[0] if behind else 0, 99) >= seconds


def test_a_time_that_the_log_has_not_reached_is_waited_for(filled_log: FilledLog) -> None:
    reader, moment = fill(filled_log), NOON + timedelta(seconds=70)
    offset, chosen = begin(reader, moment)
    filled_log.append([{**change("c", None, 699, "{}"), "commit_ts": NOON + timedelta(seconds=60)}])
    filled_log.append([{**change("c", None, 799, "{}"), "commit_ts": NOON + timedelta(seconds=80)}])
    parts = [chosen.rows_of(batch) for piece in reader.read(offset) for batch in piece.rows.to_batches()]
    assert [lsn for part in parts for lsn in part.column("commit_lsn").to_pylist()] == [800]


def test_the_begin_stays_the_same_over_a_checkpoint() -> None:
    for chosen in (CommitRange(), CommitRange(from_lsn=7), CommitRange(from_time=9)):
        assert CommitRange.decoded({"sequence": 4, **chosen.encoded()}) == chosen


def test_an_end_before_the_begin_is_an_error(filled_log: FilledLog) -> None:
    with pytest.raises(ConfigError, match="'until' is before option 'from'"):
        commits(fill(filled_log), Lsn(300), Lsn(200))


def test_a_begin_that_retention_has_passed_is_an_error_that_says_what_is_left(filled_log: FilledLog) -> None:
    reader = fill(filled_log)
    assert isinstance(filled_log.writer, SegmentWriter)
    filled_log.writer.maintain()
    filled_log.writer.trim(hours=1e-9, gigabytes=1, force=True)
    filled_log.append([change("c", '{"id":1}', 799, "{}")])
    for point in (Lsn(300), NOON):
        with pytest.raises(ChangesRemoved, match=r"retention removed the changes up to 0/259.*from = start"):
            commits(reader, point)
    assert commits(reader) == [800]
    assert commits(reader, Lsn(700)) == [800]


def test_every_offset_has_the_lsn_that_it_reaches(filled_log: FilledLog) -> None:
    reader = fill(filled_log)
    assert isinstance(reader, SegmentReader)
    reached = [(piece.end, reader.reached(piece.offset)) for piece in reader.read(reader.start())]
    assert [found for _, found in reached] == [end for end, _ in reached] == [201, 401, 601]
    assert reader.reached(reader.start()) == 0
