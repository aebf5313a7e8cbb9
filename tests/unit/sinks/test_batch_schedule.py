"""When the next batch begins, and who shares a query: pure decisions."""

import pytest

from cdc.ports import Lag
from sinks.apply import batch_schedule
from sinks.apply.batch_schedule import BUDGET, NEAR, PATIENCE, ScheduleDecision, SinkBacklog, next_batch, sinks_to_share

IDLE = SinkBacklog(0, 0)
BUSY = SinkBacklog(1, 1000)
LATE = SinkBacklog(2, 2000)
LOST = SinkBacklog(40, BUDGET + 1)


@pytest.mark.parametrize(
    ("waiting", "waited", "verdict"),
    [
        pytest.param({}, 0.0, ScheduleDecision(False), id="no sink"),
        pytest.param({"cache": IDLE, "lake": IDLE}, 0.0, ScheduleDecision(True), id="idle: at once"),
        pytest.param(
            {"cache": BUSY, "lake": BUSY}, 0.0, ScheduleDecision(True), id="one in hand, the next may be folded"
        ),
        pytest.param({"cache": LATE, "lake": LATE}, 60.0, ScheduleDecision(False), id="all are busy: the batch grows"),
        pytest.param({"cache": IDLE, "lake": LATE}, 0.0, ScheduleDecision(True), id="a slow one holds nobody back"),
        pytest.param({"cache": IDLE, "lake": LOST}, 0.0, ScheduleDecision(False), id="too slow: a moment of patience"),
        pytest.param(
            {"cache": IDLE, "lake": LOST}, PATIENCE, ScheduleDecision(True, frozenset({"lake"})), id="then without it"
        ),
        pytest.param(
            {"lake": SinkBacklog(1, BUDGET * 2)}, 0.0, ScheduleDecision(True), id="one huge batch is nobody's fault"
        ),
    ],
)
def test_the_next_batch_begins(waiting: dict[str, SinkBacklog], waited: float, verdict: ScheduleDecision) -> None:
    assert next_batch(waiting, waited) == verdict


def lag(size: int) -> Lag:
    return Lag("any", size, 0, 0.0)


@pytest.mark.parametrize(
    ("bytes_behind", "together"),
    [
        ({}, set()),
        ({"cache": 0}, set()),
        ({"cache": 10, "lake": 10}, {"cache", "lake"}),
        ({"cache": 10, "lake": 10 + NEAR, "search": 11 + NEAR}, {"cache", "lake"}),
        ({"cache": 0, "lake": NEAR + 1}, set()),
    ],
)
def test_sinks_start_together_that_are_near_the_foremost(bytes_behind: dict[str, int], together: set[str]) -> None:
    assert sinks_to_share({name: lag(size) for name, size in bytes_behind.items()}) == together


def test_a_sink_is_given_more_than_the_readiest_one_holds() -> None:
    assert batch_schedule.AHEAD < 40 and not BUSY.too_much and LOST.too_much
