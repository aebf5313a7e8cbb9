"""How long to wait before the next try."""

from cdc.backoff import delay, spread


def test_the_delay_doubles_up_to_its_bound() -> None:
    assert [delay(failures, 0.5, 3.0) for failures in range(6)] == [0.0, 0.5, 1.0, 2.0, 3.0, 3.0]


def test_any_number_of_failures_has_a_delay() -> None:
    assert delay(10**6, 0.5, 30.0) == 30.0


def test_a_spread_delay_is_between_half_and_one_and_a_half_of_it() -> None:
    assert (spread(10.0, lambda: 0.0), spread(10.0, lambda: 1.0)) == (5.0, 15.0)
    assert all(5.0 <= spread(10.0) <= 15.0 for _ in range(100))
