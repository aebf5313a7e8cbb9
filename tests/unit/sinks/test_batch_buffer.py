"""Batches handed to several sinks, each at its own speed."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Batch
from sinks.apply import batch_schedule
from sinks.apply.batch_buffer import KEPT, BatchBuffer, BufferedBatch
from sinks.apply.errors import Stopped
from sinks.fold.folded import Folded
from sinks.fold.spark import FOLDED
from sinks.spark.shared_query import size
from tests.fix_processes import wait_until

ITEMS = TableSchema(TableId("public", "items"), ())


class Watched(Folded):
    """A batch that can be asked whether it is still there."""

    __slots__ = ("__weakref__",)
    __hash__ = object.__hash__


def batch(end: int) -> Folded:
    return Folded(Lsn(end), None, [])


def ends(taken: list[Folded]) -> list[int]:
    return [int(folded.reached) for folded in taken]


@pytest.fixture
def buffer() -> BatchBuffer:
    made = BatchBuffer(Lsn(10))
    made.add_member("cache")
    return made


def beside(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def fed(buffer: BatchBuffer, *numbers: int, size: int = 1) -> list[int]:
    """Put batches as the query does; returns what the cache took meanwhile."""

    def put() -> None:
        for end in numbers:
            buffer.put(batch(end), size)

    query = beside(put)
    taken: list[int] = []
    while len(taken) < len(numbers):
        taken += ends(buffer.take("cache"))
    acknowledging = beside(lambda: buffer.take("cache"))
    query.join(10)
    assert not query.is_alive()
    assert acknowledging.is_alive()
    return taken


def test_every_sink_takes_every_batch_and_a_slow_one_several_at_once(buffer: BatchBuffer) -> None:
    buffer.add_member("lake")
    assert fed(buffer, 20, 30) == [20, 30]
    assert ends(buffer.take("lake")) == [20, 30]
    buffer.close()


def test_the_query_waits_while_every_sink_is_busy(buffer: BatchBuffer) -> None:
    buffer.put(batch(20), 1)
    thread = beside(lambda: buffer.put(batch(30), 1))
    thread.join(0.2)
    assert thread.is_alive()
    assert ends(buffer.take("cache")) == [20, 30]
    beside(lambda: buffer.take("cache"))
    thread.join(10)
    assert not thread.is_alive()
    buffer.close()


def test_a_sink_that_is_too_far_behind_is_left_and_the_others_go_on(
    buffer: BatchBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_schedule, "PATIENCE", 0.0)
    monkeypatch.setattr(batch_schedule, "BUDGET", 5)
    buffer.add_member("lake")
    assert fed(buffer, 20, 30, 40, size=3) == [20, 30, 40]
    assert buffer.members == {"cache"}
    assert buffer.take("lake") == []
    buffer.close()


def test_a_sink_comes_back_only_if_nothing_that_it_lacks_is_forgotten(
    buffer: BatchBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.apply.batch_buffer.BUDGET", 2)
    fed(buffer, 20, 30, 40, 50)
    assert not buffer.join("lake", Lsn(20))  # the batch that ends at 30 is gone
    assert buffer.join("lake", Lsn(45))
    assert ends(buffer.take("lake")) == [50]
    buffer.close()


def test_a_hundred_thousand_tiny_batches_leave_nothing_behind_and_cost_the_same_each(
    buffer: BatchBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted, not timed: what is kept, what is alive, and how many batches are looked at for each one."""
    monkeypatch.setattr(
        batch_schedule, "AHEAD", 2
    )  # one thread plays all parts: a batch is put before the last one is done
    alive: weakref.WeakSet[Watched] = weakref.WeakSet()
    looked = 0

    class Counting(dict[int, BufferedBatch]):
        def __getitem__(self, number: int) -> BufferedBatch:
            nonlocal looked
            looked += 1
            return super().__getitem__(number)

        def values(self) -> Any:
            nonlocal looked
            looked += len(self)
            return super().values()

    buffer._batches = Counting()
    buffer.add_member("lake")
    for number in range(100_000):
        tiny = Watched(Lsn(20 + number), None, [])
        alive.add(tiny)
        buffer.put(tiny, 96)
        del tiny
        assert [ends(buffer.take(sink)) for sink in ("cache", "lake")] == [[20 + number]] * 2
        assert len(buffer._batches) <= KEPT + 2
    assert len(alive) <= KEPT + 2
    assert looked < 12 * 100_000, "no scan of what was handed out before"


def test_a_tiny_batch_is_counted_with_what_it_costs_besides_its_rows() -> None:
    assert size(Folded(Lsn(1), None, [Batch(ITEMS, FOLDED.empty_table())])) > 8_000


def test_entries_that_share_an_lsn_are_not_taken_for_applied(buffer: BatchBuffer) -> None:
    """Chunks of a snapshot: whoever has reached 20 may have had only the first of them."""
    fed(buffer, 20, 20, 20, 30)
    assert buffer.join("lake", Lsn(20))
    assert ends(buffer.take("lake")) == [20, 20, 20, 30]
    buffer.close()


def test_closing_ends_every_wait(buffer: BatchBuffer) -> None:
    outcome: list[str] = []

    def put() -> None:
        with pytest.raises(Stopped):
            buffer.put(batch(20), 1)
            buffer.put(batch(30), 1)
        outcome.append("stopped")

    thread = beside(put)
    other = BatchBuffer(Lsn(0))
    other.add_member("cache")
    taker = beside(lambda: outcome.append(f"took {other.take('cache')}"))
    buffer.close()
    other.close()
    thread.join(10)
    taker.join(10)
    wait_until(lambda: sorted(outcome) == ["stopped", "took []"], 10)
