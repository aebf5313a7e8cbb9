"""Which batch applied what: never a guess."""

from pathlib import Path

import pytest

from cdc.model import ZERO_LSN, Lsn, TableId
from cdc.service.state import batch_history
from cdc.service.state.batch_history import AppliedBatch, BatchHistory, BatchHistoryReader

ORDERS = TableId("public", "orders")


def numbers(state: Path, end: int, table: str = "public.orders") -> tuple[int, int] | None:
    found = BatchHistoryReader(state, "lake").batch_of(Lsn(end), table)
    return None if found is None else (found.first, found.last)


def test_an_entry_belongs_to_the_batch_that_passed_it(tmp_path: Path) -> None:
    history = BatchHistory(tmp_path, "lake", lambda: ZERO_LSN)
    for reached in (10, 20, 30):
        history.record(Lsn(reached), ())
    assert [numbers(tmp_path, end) for end in (5, 10, 11, 30, 31)] == [(1, 1), (1, 1), (2, 2), (3, 3), None]


def test_what_was_applied_before_the_book_was_begun_is_not_recorded(tmp_path: Path) -> None:
    BatchHistory(tmp_path, "lake", lambda: Lsn(50)).record(Lsn(60), ())
    assert (numbers(tmp_path, 50), numbers(tmp_path, 51)) == (None, (1, 1))


def test_a_batch_that_a_crash_repeats_is_named_with_its_repeat_and_numbers_go_on(tmp_path: Path) -> None:
    BatchHistory(tmp_path, "lake", lambda: ZERO_LSN).record(Lsn(20), ())
    BatchHistory(tmp_path, "lake", lambda: ZERO_LSN).record(Lsn(30), ())  # the position had not moved
    assert [numbers(tmp_path, end) for end in (15, 25)] == [(1, 2), (2, 2)]


def test_chunks_that_share_a_position_are_told_as_a_range(tmp_path: Path) -> None:
    history = BatchHistory(tmp_path, "lake", lambda: ZERO_LSN)
    for reached in (10, 10, 10, 20):
        history.record(Lsn(reached), ())
    assert [numbers(tmp_path, end) for end in (10, 20)] == [(1, 3), (4, 4)]


def test_a_table_that_was_held_back_was_not_applied_by_that_batch(tmp_path: Path) -> None:
    BatchHistory(tmp_path, "lake", lambda: ZERO_LSN).record(Lsn(10), [ORDERS])
    assert (numbers(tmp_path, 10), numbers(tmp_path, 10, "public.users")) == (None, (1, 1))


def test_a_line_cut_short_and_lines_lost_are_gaps_and_nothing_is_guessed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = BatchHistory(tmp_path, "lake", lambda: ZERO_LSN)
    history.record(Lsn(10), ())
    with monkeypatch.context() as full:
        full.setattr(batch_history, "_append", _no_room)
        history.record(Lsn(20), ())
    history.record(Lsn(30), ())
    with (tmp_path / "batches" / "lake.jsonl").open("a") as file:
        file.write('{"batch": 4, "aft')
    assert [numbers(tmp_path, end) for end in (10, 15, 25, 35)] == [(1, 1), None, (3, 3), None]


def _no_room(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_the_book_stays_small_and_keeps_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_history, "_LARGEST", 2000)
    history = BatchHistory(tmp_path, "lake", lambda: ZERO_LSN)
    for reached in range(1, 101):
        history.record(Lsn(reached), ())
    assert sum(path.stat().st_size for path in (tmp_path / "batches").iterdir()) < 5000
    assert isinstance(BatchHistoryReader(tmp_path, "lake").batch_of(Lsn(100), "public.orders"), AppliedBatch)
    assert (numbers(tmp_path, 100), numbers(tmp_path, 1)) == ((100, 100), None)
