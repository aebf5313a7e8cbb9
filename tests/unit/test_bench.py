"""The bench's own arithmetic: who is measured, how much, and how they compare."""

import pytest

from bench.capture import NAMES, Sizes, chosen_contenders, ratios


def test_without_a_choice_everybody_is_measured() -> None:
    assert chosen_contenders("") == list(NAMES)


def test_chosen_contenders_run_in_the_usual_order() -> None:
    assert chosen_contenders("debezium_kafka, pg_recvlogical") == ["pg_recvlogical", "debezium_kafka"]


def test_an_unknown_contender_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="'maxwell' is none of pg_recvlogical, "):
        chosen_contenders("maxwell")


def test_sizes_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHANGES", "7")
    monkeypatch.setenv("TPS", "2.5")
    assert Sizes.from_environment() == Sizes(changes=7, tps=2.5)


def test_ratios_are_to_the_limit_and_to_the_peer() -> None:
    found = {
        "pg_recvlogical": {"changes_per_s": 100, "cpu_us_per_change": 2.0, "peak_rss_mb": 10.0},
        "millrace_segments": {"changes_per_s": 80, "cpu_us_per_change": 5.0, "peak_rss_mb": 250.0},
        "debezium_kafka": {"changes_per_s": 20, "cpu_us_per_change": 80.0, "peak_rss_mb": 1000.0},
    }
    said = ratios(found)["millrace_segments"]
    assert said == {
        "rate_of_pg_recvlogical": 0.8,
        "speed_of_debezium": 4.0,
        "debezium_cpu": 16.0,
        "debezium_memory": 4.0,
    }
