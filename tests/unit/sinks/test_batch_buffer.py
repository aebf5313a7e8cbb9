"""Batches handed to several sinks, each at its own speed."""

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Batch
from sinks.apply import batch_schedule
from sinks.apply.applier import Stopped
from sinks.apply.batch_buffer import KEPT, BatchBuffer, BufferedBatch
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
def ring() -> BatchBuffer:
    made = BatchBuffer(Lsn(10))
    made.board("cache")
    return made


def beside(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def fed(ring: BatchBuffer, *numbers: int, size: int = 1) -> list[int]:
    """Put batches as the query does; returns what the cache took meanwhile."""

    def put() -> None:
        for end in numbers:
            ring.put(batch(end), size)

    query = beside(put)
    taken: list[int] = []
    while len(taken) < len(numbers):
        taken += ends(ring.take("cache"))
    acknowledging = beside(lambda: ring.take("cache"))
    query.join(10)
    assert not query.is_alive()
    assert acknowledging.is_alive()
    return taken


def test_every_sink_takes_every_batch_and_a_slow_one_several_at_once(ring: BatchBuffer) -> None:
    ring.board("lake")
    assert fed(ring, 20, 30) == [20, 30]
    assert ends(ring.take("lake")) == [20, 30]
    ring.close()


def test_the_query_waits_while_every_sink_is_busy(ring: BatchBuffer) -> None:
    ring.put(batch(20), 1)
    thread = beside(lambda: ring.put(batch(30), 1))
    thread.join(0.2)
    assert thread.is_alive()
    assert ends(ring.take("cache")) == [20, 30]
    beside(lambda: ring.take("cache"))
    thread.join(10)
    assert not thread.is_alive()
    ring.close()


def test_a_sink_that_is_too_far_behind_is_left_and_the_others_go_on(
    ring: BatchBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_schedule, "PATIENCE", 0.0)
    monkeypatch.setattr(batch_schedule, "BUDGET", 5)
    ring.board("lake")
    assert fed(ring, 20, 30, 40, size=3) == [20, 30, 40]
    assert ring.aboard == {"cache"}
    assert ring.take("lake") == []
    ring.close()


def test_a_sink_comes_back_only_if_nothing_that_it_lacks_is_forgotten(
    ring: BatchBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.apply.batch_buffer.BUDGET", 2)
    fed(ring, 20, 30, 40, 50)
    assert not ring.join("lake", Lsn(20))  # the batch that ends at 30 is gone
    assert ring.join("lake", Lsn(45))
    assert ends(ring.take("lake")) == [50]
    ring.close()


def test_a_hundred_thousand_tiny_batches_leave_nothing_behind_and_cost_the_same_each(
    ring: BatchBuffer, monkeypatch: pytest.MonkeyPatch
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

    ring._links = Counting()
    ring.board("lake")
    for number in range(100_000):
        tiny = Watched(Lsn(20 + number), None, [])
        alive.add(tiny)
        ring.put(tiny, 96)
        del tiny
        assert [ends(ring.take(sink)) for sink in ("cache", "lake")] == [[20 + number]] * 2
        assert len(ring._links) <= KEPT + 2
    assert len(alive) <= KEPT + 2
    assert looked < 12 * 100_000, "no scan of what was handed out before"


def test_a_tiny_batch_is_counted_with_what_it_costs_besides_its_rows() -> None:
    assert size(Folded(Lsn(1), None, [Batch(ITEMS, FOLDED.empty_table())])) > 8_000


def test_entries_that_share_an_lsn_are_not_taken_for_applied(ring: BatchBuffer) -> None:
    """Chunks of a snapshot: whoever has reached 20 may have had only the first of them."""
    fed(ring, 20, 20, 20, 30)
    assert ring.join("lake", Lsn(20))
    assert ends(ring.take("lake")) == [20, 20, 20, 30]
    ring.close()


def test_closing_ends_every_wait(ring: BatchBuffer) -> None:
    outcome: list[str] = []

    def put() -> None:
        with pytest.raises(Stopped):
            ring.put(batch(20), 1)
            ring.put(batch(30), 1)
        outcome.append("stopped")

    thread = beside(put)
    other = BatchBuffer(Lsn(0))
    other.board("cache")
    taker = beside(lambda: outcome.append(f"took {other.take('cache')}"))
    ring.close()
    other.close()
    thread.join(10)
    taker.join(10)
    wait_until(lambda: sorted(outcome) == ["stopped", "took []"], 10)
