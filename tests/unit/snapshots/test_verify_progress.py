"""What people see while tables are compared."""

from typing import Any

from cdc.cli.progress import progress_line
from cdc.model import TableId
from cdc.service.inspect import verification
from snapshots.verify.comparison import Compared


def test_a_comparison_tells_its_rate_and_the_time_left() -> None:
    clock = iter([10.0, 12.0])
    shown: list[dict[str, Any]] = []
    pace = verification._TableProgress("cache", TableId("public", "orders"), shown.append, lambda: next(clock))
    pace.report(Compared(0, 0, 4000))
    pace.report(Compared(1500, 500, 4000))
    assert (
        progress_line(shown[-1])
        == "public.orders compared with cache: 1,000 of about 4,000 rows, 500 rows/s, 0:00:06 left"
    )


def test_a_table_without_statistics_has_no_time_left() -> None:
    clock = iter([10.0, 12.0])
    shown: list[dict[str, Any]] = []
    pace = verification._TableProgress("cache", TableId("public", "orders"), shown.append, lambda: next(clock))
    pace.report(Compared(0, 0, 0))
    pace.report(Compared(1000, 1000, 0))
    assert progress_line(shown[-1]) == "public.orders compared with cache: 1,000 rows, 500 rows/s"
