"""CI fails on a skip that is not listed in tests/skips.py."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import EXPECTED

_ROOT = Path(__file__).parents[2]
_LISTED = next(iter(EXPECTED))


def run(folder: Path, body: str, *options: str, ci: bool = True) -> subprocess.CompletedProcess[str]:
    """A pytest of its own on one file."""
    (folder / "test_one.py").write_text(f"import pytest\n\n{body}\n", encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    environment.pop("CI", None)
    if ci:
        environment["CI"] = "true"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.skips", *options]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_skip_that_is_not_listed_fails_the_run_and_is_named(tmp_path: Path, workers: str) -> None:
    done = run(tmp_path, 'def test_a() -> None:\n    pytest.skip("no moon tonight")', "-n", workers)
    assert done.returncode == 1, done.stdout
    assert "FAILED test_one.py::test_a: skipped in CI because: no moon tonight." in done.stdout


def test_a_file_that_is_skipped_as_a_whole_fails_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, 'pytest.importorskip("nothing_of_this_name")\n\ndef test_a() -> None: ...')
    assert done.returncode != 0
    assert "FAILED test_one.py: skipped in CI" in done.stdout


@pytest.mark.parametrize(("reason", "ci"), [(_LISTED, True), ("no moon tonight", False)])
def test_listed_skips_pass_in_ci_and_every_skip_passes_elsewhere(tmp_path: Path, reason: str, ci: bool) -> None:
    body = f'@pytest.mark.skip(reason="{reason}")\ndef test_a() -> None: ...\n\ndef test_b() -> None: ...'
    done = run(tmp_path, body, ci=ci)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout
