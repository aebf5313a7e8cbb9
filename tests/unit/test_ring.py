"""Batches handed to several sinks, each at its own speed."""

import threading
from collections.abc import Callable

import pytest

from cdc.model import Lsn
from sinks import pace
from sinks.applier import Stopped
from sinks.folded import Folded
from sinks.ring import Ring
from tests.fix_processes import wait_until


def batch(end: int) -> Folded:
    return Folded(Lsn(end), None, [])


def ends(taken: list[Folded]) -> list[int]:
    return [int(folded.reached) for folded in taken]


@pytest.fixture
def ring() -> Ring:
    made = Ring(Lsn(10))
    made.board("cache")
    return made


def beside(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread


def fed(ring: Ring, *numbers: int, size: int = 1) -> list[int]:
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


def test_every_sink_takes_every_batch_and_a_slow_one_several_at_once(ring: Ring) -> None:
    ring.board("lake")
    assert fed(ring, 20, 30) == [20, 30]
    assert ends(ring.take("lake")) == [20, 30]
    ring.close()


def test_the_query_waits_while_every_sink_is_busy(ring: Ring) -> None:
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
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "PATIENCE", 0.0)
    monkeypatch.setattr(pace, "BUDGET", 5)
    ring.board("lake")
    assert fed(ring, 20, 30, 40, size=3) == [20, 30, 40]
    assert ring.aboard == {"cache"}
    assert ring.take("lake") == []
    ring.close()


def test_a_sink_comes_back_only_if_nothing_that_it_lacks_is_forgotten(
    ring: Ring, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.ring.BUDGET", 2)
    fed(ring, 20, 30, 40, 50)
    assert not ring.join("lake", Lsn(20))  # the batch that ends at 30 is gone
    assert ring.join("lake", Lsn(45))
    assert ends(ring.take("lake")) == [50]
    ring.close()


def test_entries_that_share_an_lsn_are_not_taken_for_applied(ring: Ring) -> None:
    """Chunks of a snapshot: whoever has reached 20 may have had only the first of them."""
    fed(ring, 20, 20, 20, 30)
    assert ring.join("lake", Lsn(20))
    assert ends(ring.take("lake")) == [20, 20, 20, 30]
    ring.close()


def test_closing_ends_every_wait(ring: Ring) -> None:
    outcome: list[str] = []

    def put() -> None:
        with pytest.raises(Stopped):
            ring.put(batch(20), 1)
            ring.put(batch(30), 1)
        outcome.append("stopped")

    thread = beside(put)
    other = Ring(Lsn(0))
    other.board("cache")
    taker = beside(lambda: outcome.append(f"took {other.take('cache')}"))
    ring.close()
    other.close()
    thread.join(10)
    taker.join(10)
    wait_until(lambda: sorted(outcome) == ["stopped", "took []"], 10)
