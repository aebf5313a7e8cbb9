"""The snapshot's bench in its short form, without the contenders that need a broker."""

import json
from pathlib import Path

import pytest

from bench.snapshot import NAMES, chosen_contenders, ratios
from tests.fix_processes import RunProgram


def test_the_short_form_measures_rows_cpu_memory_and_load(run_program: RunProgram, tmp_path: Path) -> None:
    chosen, out = "psql_copy,millrace_segments", tmp_path / "results.json"
    settings = {"ROWS": "20000", "RUNS": "1", "CONTENDERS": chosen, "OUT": str(out)}
    program = run_program("-m", "bench.snapshot", env=settings)
    assert program.wait(120) == 0, program.said()
    results = json.loads(out.read_text())
    assert list(results["contenders"]) == chosen.split(",")
    for figures in results["contenders"].values():
        assert figures["rows"] == 20_000
        assert min(figures[name] for name in ("rows_per_s", "cpu_us_per_row", "peak_rss_mb")) > 0
        assert "load" in figures
    assert results["ratios"]["millrace_segments"]["rate_of_psql_copy"] > 0


def test_contenders_are_the_four_unless_named() -> None:
    assert chosen_contenders("") == list(NAMES)
    assert chosen_contenders("millrace_chunked,psql_copy") == ["psql_copy", "millrace_chunked"]
    with pytest.raises(SystemExit, match="'maxwell' is none of psql_copy, "):
        chosen_contenders("maxwell")


def test_ratios_are_to_the_floor_and_to_the_peer() -> None:
    found = {
        "psql_copy": {"rows_per_s": 100.0, "cpu_us_per_row": 0.5, "peak_rss_mb": 10.0},
        "millrace_segments": {"rows_per_s": 60.0, "cpu_us_per_row": 4.0, "peak_rss_mb": 250.0},
        "debezium_kafka": {"rows_per_s": 20.0, "cpu_us_per_row": 80.0, "peak_rss_mb": 1000.0},
    }
    assert ratios(found)["millrace_segments"] == {
        "rate_of_psql_copy": 0.6,
        "speed_of_debezium": 3.0,
        "debezium_cpu": 20.0,
        "debezium_memory": 4.0,
    }
