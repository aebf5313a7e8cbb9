"""Entries of views, which have no LSN of their own and rows of before, in a log that merges, seeks and forgets."""

from contextlib import closing
from datetime import timedelta

import pytest

from cdc.model import ZERO_LSN, Entry, Lsn
from tests.contract.logs import DAY, LOGS, Bench, entry, open_reader, open_writer, read_all
from tests.scenes.view_rows import TABLE, TOTALS, rows

COUNT = 12


@pytest.fixture(params=[name for name in LOGS if name != "segments in a bucket"])
def bench(request: pytest.FixtureRequest) -> Bench:
    """A log with a view's entry after each of the source's, two transactions late; merged where the log merges."""
    found = LOGS[request.param](request)
    with closing(open_writer(found)) as writer:
        writer.schemas.record(TOTALS)
        for number in range(1, COUNT + 1):
            writer.append(entry(number, size=1))
            late = max(1, number - 2)
            writer.append(Entry(rows(100 * late, number), ZERO_LSN, {"view.totals": f"mark {number}"}))
        assert writer.progress().end == 100 * COUNT + 10
        writer.maintain()
    return found


def _steps(bench: Bench, after: Lsn | None = None) -> list[tuple[str, int]]:
    """Table and commit LSN of every row, in the order of the log."""
    reader = open_reader(bench)
    offset = reader.start() if after is None else reader.seek(after)
    found = [row for piece in reader.read(offset) for row in piece.rows.to_pylist()]
    return [(row["table"], row["commit_lsn"]) for row in found]


def test_the_order_stays_and_the_mark_is_the_last_one(bench: Bench) -> None:
    wanted: list[tuple[str, int]] = []
    for number in range(1, COUNT + 1):
        wanted += [("public.items", 100 * number), (str(TABLE), 100 * max(1, number - 2))]
    assert _steps(bench) == wanted
    with closing(open_writer(bench)) as writer:
        assert writer.progress().marks["view.totals"] == f"mark {COUNT}"


def test_a_reader_that_begins_after_an_lsn_gets_every_later_entry_also_those_with_older_rows(bench: Bench) -> None:
    found = _steps(bench, Lsn(100 * 8 + 10))
    assert found[-8:] == _steps(bench)[-8:]
    reader = open_reader(bench)
    later = reader.seek(DAY + timedelta(seconds=100 * 8))
    assert [row for piece in reader.read(later) for row in piece.rows.to_pylist()][-10:] == read_all(
        reader
    ).to_pylist()[-10:]


def test_a_reader_that_has_committed_an_offset_between_two_entries_of_one_lsn_goes_on_there(bench: Bench) -> None:
    reader = open_reader(bench)
    pieces = [piece for piece in reader.read(reader.start()) if piece.rows.num_rows]
    middle = pieces[2 * COUNT - 2]
    reader.commit("lake", middle.end, middle.offset)
    (lag,) = reader.lags()
    assert lag.entries >= 1
    (consumer,) = reader.consumers()
    rest = [row["table"] for piece in reader.read(consumer.offset) for row in piece.rows.to_pylist()]
    assert rest == [str(TABLE)]
    (last,) = pieces[-1:]
    reader.commit("lake", last.end, last.offset)
    assert reader.lags()[0].entries == 0
