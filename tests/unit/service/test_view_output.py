"""Capture appends what views hand over, exactly once, and ticks where a view asks for them."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.errors import LogFull, LogLost, MillraceError
from cdc.log.guarded import GuardedLog
from cdc.model import TICKS_TABLE, ZERO_LSN, Entry, Lsn
from cdc.service.capture.view_output import ViewOutput
from sinks.fold.folded import of_slices
from tests.contract.logs import entry, read_all
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from tests.scenes.view_rows import TABLE, TOTALS, output
from views.output_files import OutputFolder


@pytest.fixture
def folder(state_dir: Path) -> OutputFolder:
    return OutputFolder(state_dir, "totals")


@pytest.fixture
def appender(filled_log: FilledLog, state_dir: Path) -> Iterator[ViewOutput]:
    """Its turns are the test's: the thread does not run."""
    filled_log.writer.append(entry(1))
    yield ViewOutput(filled_log.writer, filled_log.writer.schemas, state_dir, threading.Event())


def _totals(log: FilledLog) -> list[tuple[int, int]]:
    """LSN and total of every row of the view."""
    found = [row for row in read_all(log.reader).to_pylist() if row["table"] == str(TABLE)]
    return [(row["version"], json.loads(row["after"])["total"]) for row in found]


def _mark(log: FilledLog) -> str:
    return log.writer.progress().marks.get("view.totals", "")


def test_rows_and_mark_become_durable_together_at_the_end_of_the_log(
    appender: ViewOutput, folder: OutputFolder, filled_log: FilledLog
) -> None:
    folder.put(output("", "A", 50, 7, 8))
    assert appender.turn()
    assert _totals(filled_log) == [(50, 7), (50, 8)]
    assert (_mark(filled_log), filled_log.writer.progress().end) == ("A", Lsn(110))
    assert filled_log.reader.head()[1] == Lsn(110)
    assert not folder.pending()
    assert folder.mark() == "A"
    assert not appender.turn()


def test_files_that_wait_become_one_entry(appender: ViewOutput, folder: OutputFolder, filled_log: FilledLog) -> None:
    for before, after, lsn in (("", "A", 10), ("A", "B", 20), ("B", "C", 30)):
        folder.put(output(before, after, lsn, lsn))
    appender.turn()
    entries = [piece for piece in filled_log.reader.read(filled_log.reader.start()) if piece.rows.num_rows]
    assert [piece.rows.num_rows for piece in entries] == [3, 3]
    assert _mark(filled_log) == "C"
    assert not folder.pending()


def test_a_repeat_is_removed_and_not_appended(
    appender: ViewOutput, folder: OutputFolder, filled_log: FilledLog
) -> None:
    folder.put(output("", "A", 10, 1))
    appender.turn()
    folder.put(output("", "A", 10, 1))
    folder.put(output("A", "B", 20, 2))
    appender.turn()
    assert (_totals(filled_log), _mark(filled_log)) == ([(10, 1), (20, 2)], "B")
    assert not folder.pending()


def test_output_of_before_the_view_began_again_is_removed(
    appender: ViewOutput, folder: OutputFolder, filled_log: FilledLog
) -> None:
    folder.put(output("", "A", 10, 1))
    appender.turn()
    folder.put(output("X", "Y", 20, 2))
    folder.put(output("Y", "Z", 30, 3))
    appender.turn()
    assert (_totals(filled_log), _mark(filled_log)) == ([(10, 1)], "A")
    assert not folder.pending()


def test_a_break_in_the_chain_ends_the_entry_and_the_rest_is_looked_at_in_the_next_turn(
    appender: ViewOutput, folder: OutputFolder, filled_log: FilledLog
) -> None:
    folder.put(output("", "A", 10, 1))
    folder.put(output("X", "Y", 20, 2))
    folder.put(output("A", "B", 30, 3))
    appender.turn()
    appender.turn()
    assert (_totals(filled_log), _mark(filled_log)) == ([(10, 1), (30, 3)], "B")


def test_a_file_that_a_power_cut_has_emptied_is_removed(
    appender: ViewOutput, folder: OutputFolder, filled_log: FilledLog
) -> None:
    folder.put(output("", "A", 10, 1)).write_bytes(b"")
    folder.put(output("A", "B", 20, 2))
    appender.turn()
    assert (_totals(filled_log), _mark(filled_log)) == ([], "")
    assert not folder.pending()


def test_each_row_has_the_id_of_its_own_schema(
    appender: ViewOutput, folder: OutputFolder, filled_log: FilledLog
) -> None:
    folder.put(output("", "A", 10, 1))
    other = replace(TOTALS, columns=(*TOTALS.columns, replace(TOTALS.columns[1], name="more")))
    folder.put(replace(output("A", "B", 20, 2), schema=other))
    appender.turn()
    ids = [row["schema_id"] for row in read_all(filled_log.reader).to_pylist() if row["table"] == str(TABLE)]
    assert ids == [1, 2]
    assert filled_log.reader.schemas.get(TABLE, 2) == replace(other, id=2)


def test_later_changes_of_the_source_follow_as_if_nothing_were_between(
    appender: ViewOutput, folder: OutputFolder, filled_log: FilledLog
) -> None:
    folder.put(output("", "A", 10, 1))
    appender.turn()
    filled_log.writer.append(entry(2))
    filled_log.writer.append(entry(2))  # a repeat stays one
    ends = [piece.end for piece in filled_log.reader.read(filled_log.reader.start())]
    assert ends == [110, 110, 210]


def test_the_mark_that_a_crash_kept_from_the_view_is_told_at_the_next_start(
    filled_log: FilledLog, folder: OutputFolder, state_dir: Path
) -> None:
    folder.put(output("", "A", 10, 1))
    filled_log.writer.append(Entry(output("", "A", 10, 1).rows, ZERO_LSN, {"view.totals": "A"}))
    assert folder.mark() is None
    ViewOutput(filled_log.writer, filled_log.writer.schemas, state_dir, threading.Event()).turn()
    assert folder.mark() == "A"
    assert not folder.pending()


class _FullLog(GuardedLog):
    """Has no room for rows while `full`; breaks for good with `error`."""

    full = True
    error: MillraceError | None = None

    def append(self, entry: Entry) -> None:
        if self.error is not None:
            raise self.error
        if self.full:
            raise LogFull("no room")
        super().append(entry)


def test_output_waits_while_the_log_is_full_and_nothing_is_lost(
    filled_log: FilledLog, folder: OutputFolder, state_dir: Path
) -> None:
    log = _FullLog(filled_log.writer, filled_log.writer.schemas)
    folder.put(output("", "A", 10, 1))
    with ViewOutput(log, log.schemas, state_dir, threading.Event()) as appender:
        wait_until(lambda: appender.trouble, 10, "the trouble")
        assert len(folder.pending()) == 1
        log.full = False
        wait_until(lambda: not folder.pending(), 10, "the rows in the log")
        wait_until(lambda: not appender.trouble, 10, "the end of the trouble")
    assert _totals(filled_log) == [(10, 1)]


def test_an_append_whose_outcome_is_unknown_ends_capture_which_reads_the_log_again(
    filled_log: FilledLog, folder: OutputFolder, state_dir: Path
) -> None:
    log, stop = _FullLog(filled_log.writer, filled_log.writer.schemas), threading.Event()
    log.error = LogLost("the broker is away")
    folder.put(output("", "A", 10, 1))
    with ViewOutput(log, log.schemas, state_dir, stop) as appender:
        assert stop.wait(30)
    assert appender.failure is log.error
    assert len(folder.pending()) == 1


class _SetClock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.at = datetime(2026, 3, 1, tzinfo=UTC)
        self.seconds = 0.0

    def now(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return self.seconds

    def wait(self, seconds: float) -> None:
        self.pass_by(seconds)

    def pass_by(self, seconds: float) -> None:
        self.seconds += seconds
        self.at += timedelta(seconds=seconds)


def test_ticks_are_rows_of_the_log_which_no_sink_sees(
    filled_log: FilledLog, folder: OutputFolder, state_dir: Path
) -> None:
    filled_log.writer.append(entry(1))
    clock = _SetClock()
    appender = ViewOutput(filled_log.writer, filled_log.writer.schemas, state_dir, threading.Event(), clock)
    appender.turn()
    OutputFolder(state_dir, "seldom").ask_for_ticks(60.0)
    folder.ask_for_ticks(10.0)
    for _ in range(25):
        clock.pass_by(1.0)
        appender.turn()
    found = [row for row in read_all(filled_log.reader).to_pylist() if row["table"] == TICKS_TABLE]
    assert [json.loads(row["after"])["at"] for row in found] == [
        f"2026-03-01T00:00:{second:02}.000000+00:00" for second in (1, 11, 21)
    ]
    assert {(row["op"], row["key"], row["version"]) for row in found} == {("m", '{"id":1}', 110)}
    filled_log.record(TOTALS)
    slices = [
        piece
        for piece in filled_log.reader.read(filled_log.reader.start())
        if TICKS_TABLE in piece.rows["table"].to_pylist()
    ]
    assert of_slices(slices, filled_log.reader.schemas).batches == []
    folder.ask_for_ticks(0.0)
    OutputFolder(state_dir, "seldom").ask_for_ticks(0.0)
    clock.pass_by(100.0)
    assert not appender.turn()


def test_time_in_the_log_does_not_go_back_when_the_clock_does(
    filled_log: FilledLog, folder: OutputFolder, state_dir: Path
) -> None:
    clock = _SetClock()
    appender = ViewOutput(filled_log.writer, filled_log.writer.schemas, state_dir, threading.Event(), clock)
    folder.ask_for_ticks(1.0)
    assert appender.turn()
    clock.at -= timedelta(hours=1)
    clock.seconds += 1
    assert not appender.turn()
    clock.pass_by(3700.0)
    assert appender.turn()
