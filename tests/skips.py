"""In CI a skip that is not listed here fails the run: otherwise a missing program would hide a broken test."""

import os

import pytest

EXPECTED = {
    "fish is not installed": "a shell that few machines have; bash is tested everywhere",
    "zsh is not installed": "a shell that few machines have; bash is tested everywhere",
    "docker compose is not on this machine": "CI runs in a container; the other tests check the file's content",
    "psql is not on this machine": "one test starts it beside our own server; every other one connects by psycopg",
    "systemd-analyze is not on this machine": "the unit file's content is tested without it",
    "this sink has no fingerprints": "the small sink of docs/add-a-sink.md; every sink that we ship has them",
    "this server comes without test_decoding": "the Postgres from PyPI lacks it",
}
"""Reasons of skips, and why CI accepts each."""


class UnexpectedSkips:
    """Collects them, of all workers. Registered in the process that prints the summary."""

    def __init__(self) -> None:
        self._found: dict[str, str] = {}

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if not report.skipped or hasattr(report, "wasxfail"):
            return
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        reason = reason.removeprefix("Skipped: ")
        if reason not in EXPECTED:
            self._found[report.nodeid] = reason

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test, or its fixtures."""
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A whole file."""
        self._note(report)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that is otherwise green."""
        if self._found and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Name each test and its reason."""
        for test, reason in sorted(self._found.items()):
            terminalreporter.write_line(
                f"FAILED {test}: skipped in CI because: {reason}. "
                "Install what it needs, or list the reason in tests/skips.py.",
                red=True,
            )


def pytest_configure(config: pytest.Config) -> None:
    """Only in CI: a developer's machine may lack a program."""
    if "CI" in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(UnexpectedSkips())
