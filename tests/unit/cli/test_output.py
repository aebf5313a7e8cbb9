"""What people see in a terminal."""

import io
from datetime import UTC, datetime, timedelta

import pytest
from rich.console import Console

from cdc.cli import output


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    spoken = io.StringIO()
    console = Console(file=spoken, force_terminal=True, width=80, highlight=False)
    monkeypatch.setattr(output, "OUT", console)
    return spoken


def test_a_table_and_three_stores_fit_into_eighty_columns(terminal: io.StringIO) -> None:
    now = datetime.now(UTC)
    rows = [("public.order_items", "streaming", "12,345", "12,340", "12,341", "12,342", now.isoformat())]
    output.print_table(("table", "state", "captured", "delta", "opensearch", "redis", "last commit"), rows)
    (line,) = (line for line in terminal.getvalue().splitlines() if "public.order_items" in line)
    assert all(cell in line for cell in ("streaming", "12,345", "12,342", f"{now:%H:%M:%SZ}"))


def test_a_time_of_another_day_has_its_date(terminal: io.StringIO) -> None:
    before = datetime.now(UTC) - timedelta(days=1)
    output.print_table(("at",), [(before.isoformat(),)])
    assert f"{before:%Y-%m-%d %H:%M:%SZ}" in terminal.getvalue()
