"""How many changes the next batch has: fixed where the pipeline says so, else by how long the last one took."""

import pytest

from cdc.log.batch_size import SECONDS, USUAL_CHANGES, BatchSize


class Batches:
    """Batches of a size, at a clock that only they move."""

    def __init__(self, least: int, most: int) -> None:
        self.now = 100.0
        self.size = BatchSize(least, most, lambda: self.now)

    def one(self, seconds: float, *, full: bool = True) -> int:
        """Plan a batch that takes so long; returns the changes of the next one."""
        self.size.begun(full=full)
        self.now += seconds
        self.size.ended()
        return self.size.changes


def test_batches_grow_until_one_takes_as_long_as_wanted() -> None:
    batches = Batches(1_000, 1_000_000)
    rate = 2_000.0
    sizes = [batches.one(batches.size.changes / rate) for _ in range(20)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 2_000
    assert sizes[-1] == pytest.approx(rate * SECONDS, rel=0.01)


def test_a_batch_that_took_long_makes_the_next_one_smaller_but_never_below_the_least() -> None:
    batches = Batches(1_000, 1_000_000)
    for _ in range(4):
        batches.one(0.1)
    assert batches.one(60.0) == 8_000
    assert [batches.one(60.0) for _ in range(4)] == [4_000, 2_000, 1_000, 1_000]


def test_no_batch_has_more_than_the_most() -> None:
    batches = Batches(1_000, 3_000)
    assert [batches.one(0.0) for _ in range(3)] == [2_000, 3_000, 3_000]


def test_a_batch_that_took_all_there_was_says_nothing_about_the_next() -> None:
    batches = Batches(1_000, 1_000_000)
    assert [batches.one(0.01, full=False), batches.one(60.0, full=False)] == [1_000, 1_000]


def test_asking_again_without_a_batch_in_between_changes_nothing() -> None:
    batches = Batches(1_000, 1_000_000)
    batches.one(1.0)
    for _ in range(3):
        batches.size.ended()
    assert batches.size.changes == 2_000


def test_only_a_batch_without_a_limit_grows_and_with_the_number_of_tasks() -> None:
    limited = BatchSize.of({"limit": "9", "tasks": "4"}, 100_000)
    free = BatchSize.of({"limit": "0", "tasks": "4"}, 100_000)
    for size in (limited, free):
        for _ in range(10):
            size.begun(full=True)
            size.ended()
    assert (limited.changes, free.changes) == (9, 400_000)
    assert BatchSize.of({"limit": "0", "tasks": "4"}, 1).changes == USUAL_CHANGES
