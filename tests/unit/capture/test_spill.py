"""A large transaction on disk comes back whole, however often and however far it is walked."""

import resource
from pathlib import Path

import numpy as np
import pytest

from cdc.capture.pgoutput.events import Begin, Commit, Event
from cdc.capture.transactions.assembly import Assembler, Item, SpilledTransaction
from cdc.capture.transactions.spill import SpillFile, SpillFolder
from cdc.errors import LogCorrupt, LogFull
from cdc.model import Lsn
from tests.properties.test_assembly import _table as rows_of


@pytest.fixture
def overflow(tmp_path: Path) -> SpillFile:
    made = SpillFolder(tmp_path / "scratch").open()
    for first in (0, 100, 200):
        made.write(rows_of([(7, first + number) for number in range(100)]))
    return made


def _walked(overflow: SpillFile) -> list[int]:
    return [int(row) for part in overflow.read() for row in part["version"].to_numpy()]


def test_rows_come_back_in_order(overflow: SpillFile) -> None:
    assert _walked(overflow) == list(range(300))


def test_a_walk_that_was_given_up_harms_no_other(overflow: SpillFile) -> None:
    first = next(overflow.read())
    assert first.num_rows == 100
    assert _walked(overflow) == list(range(300))
    assert _walked(overflow) == list(range(300))


def test_two_walks_at_once_do_not_meet(overflow: SpillFile) -> None:
    one, other = overflow.read(), overflow.read()
    pairs = list(zip(one, other, strict=True))
    assert all(left.equals(right) for left, right in pairs) and len(pairs) == 3


def test_the_file_has_no_name(overflow: SpillFile, tmp_path: Path) -> None:
    assert list((tmp_path / "scratch").iterdir()) == []
    overflow.discard()


def test_rows_that_do_not_come_back_are_an_error(overflow: SpillFile) -> None:
    overflow._file._rows += 1
    with pytest.raises(LogCorrupt, match="301 rows, but 300 were read back"):
        _walked(overflow)


def test_what_no_listing_shows_is_counted_until_it_is_given_back(tmp_path: Path) -> None:
    scratch = SpillFolder(tmp_path)
    one, other = scratch.open(), scratch.open()
    for overflow in (one, other):
        overflow.write(rows_of([(7, number) for number in range(1000)]))
    both = scratch.size
    one.discard()
    assert 0 < scratch.size < both
    other.discard()
    assert scratch.size == 0


def test_a_write_without_room_adds_nothing_and_may_be_made_again(overflow: SpillFile, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    rows = rows_of([(7, 300 + number) for number in range(100)])
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (overflow._file.size + 100, limits[1]))
        with pytest.raises(LogFull, match="No disk space for a large transaction"):
            overflow.write(rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    overflow.write(rows)
    assert _walked(overflow) == list(range(400))


def test_a_large_transaction_waits_for_room_on_disk_and_loses_no_row(tmp_path: Path) -> None:
    full = False

    def check() -> None:
        if full:
            raise LogFull("No room left.", "Make some.")

    assembler = Assembler(Lsn(0), 1000, SpillFolder(tmp_path, check).open)

    def feed(first: int, *events: Event) -> list[Item]:
        rows = rows_of([(1, first + number) for number in range(100)])
        return assembler.take(rows, events, np.zeros(100, np.int64))

    full = True
    feed(0, Begin(Lsn(900), 0, 1, 0))
    assert "No room left" in assembler.trouble and not assembler.spill()
    full = False
    assert assembler.spill() and not assembler.trouble
    full = True
    feed(100)
    assert assembler.trouble
    (whole,) = feed(200, Commit(Lsn(900), Lsn(910), 0, 100))
    assert isinstance(whole, SpilledTransaction)
    assert [int(row) for part in whole.parts() for row in part["version"].to_numpy()] == list(range(300))
