"""A large transaction on disk comes back whole, however often and however far it is walked."""

from pathlib import Path

import pytest

from cdc.capture.overflow import Overflow
from cdc.errors import LogCorrupt
from tests.properties.test_assembly import _table as rows_of


@pytest.fixture
def overflow(tmp_path: Path) -> Overflow:
    made = Overflow(tmp_path / "scratch")
    for first in (0, 100, 200):
        made.write(rows_of([(7, first + number) for number in range(100)]))
    return made


def _walked(overflow: Overflow) -> list[int]:
    return [int(row) for part in overflow.read() for row in part["version"].to_numpy()]


def test_rows_come_back_in_order(overflow: Overflow) -> None:
    assert _walked(overflow) == list(range(300))


def test_a_walk_that_was_given_up_harms_no_other(overflow: Overflow) -> None:
    first = next(overflow.read())
    assert first.num_rows == 100
    assert _walked(overflow) == list(range(300))
    assert _walked(overflow) == list(range(300))


def test_two_walks_at_once_do_not_meet(overflow: Overflow) -> None:
    one, other = overflow.read(), overflow.read()
    pairs = list(zip(one, other, strict=True))
    assert all(left.equals(right) for left, right in pairs) and len(pairs) == 3


def test_the_file_has_no_name(overflow: Overflow, tmp_path: Path) -> None:
    assert list((tmp_path / "scratch").iterdir()) == []
    overflow.discard()


def test_rows_that_do_not_come_back_are_an_error(overflow: Overflow) -> None:
    overflow._rows += 1
    with pytest.raises(LogCorrupt, match="301 rows and came back with 300"):
        _walked(overflow)
