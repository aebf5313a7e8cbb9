"""The snapshot's bench in its short form, without the contenders that need a broker."""

import json
from pathlib import Path

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
