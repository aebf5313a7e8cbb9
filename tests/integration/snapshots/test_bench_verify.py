"""verify's bench in its short form, with the store that needs no server."""

import json
from pathlib import Path

from tests.fix_processes import RunProgram


def test_the_short_form_measures_rate_and_cpu_of_store_and_source(run_program: RunProgram, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    program = run_program("-m", "bench.verify", env={"ROWS": "20000", "RUNS": "1", "STORES": "delta", "OUT": str(out)})
    assert program.wait(120) == 0, program.said()
    results = json.loads(out.read_text())
    assert results["rows"] == 20_000
    assert min(results["stores"]["delta"][name] for name in ("rows_per_s", "cpu_us_per_row")) > 0
    assert results["source_cpu_us_per_row"] >= 0
