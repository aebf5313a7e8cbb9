"""Compares the source with each store of a pipeline, after waiting until the store has caught up."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from cdc.config.settings import Settings, SinkSettings, TableSettings
from cdc.errors import ConfigError
from cdc.model import TableId
from cdc.service.inspect.verified_views import VerifiedViews
from cdc.service.observe.positions import Positions
from sinks import registry
from sinks.context import SinkContext
from snapshots.verify.comparison import Compared, Differences, verify_table

Show = Callable[[dict[str, Any]], None]
"""Receives the progress of a comparison: table, state, rows, estimate, rows_per_second, eta_seconds."""


def differences(
    settings: Settings, sinks: Sequence[str], tables: Sequence[str], timeout: float, show: Show = lambda facts: None
) -> Iterator[Differences]:
    """The result for every table and view of every chosen sink, one after the other."""
    positions, views = Positions(settings), VerifiedViews(settings)
    for chosen in chosen_sinks(settings, sinks):
        with closing(registry.open_sink(chosen, SinkContext(settings.state))) as store:
            for captured in _tables(settings, chosen, tables):
                wait = partial(positions.wait_for, chosen.name, captured.name, timeout)
                report = _TableProgress(chosen.name, captured.name, show).report
                yield verify_table(settings.source, captured, store, wait, report=report)
            for view in views.of_sink(chosen, tables):
                wait = partial(positions.wait_for, chosen.name, view.table, timeout)
                show({"table": str(view.table), "state": f"compared with {chosen.name}", "rows": 0})
                yield views.verify(view, store, wait)


class _TableProgress:
    """Reports the progress of one table. A row counts once it was read on both sides."""

    def __init__(self, sink: str, table: TableId, show: Show, clock: Callable[[], float] = time.monotonic) -> None:
        self._show = show
        self._clock = clock
        self._started: float | None = None
        self._facts: dict[str, Any] = {"table": str(table), "state": f"compared with {sink}"}
        show({**self._facts, "rows": 0})

    def report(self, compared: Compared) -> None:
        now = self._clock()
        self._started = self._started or now
        rows, seconds = (compared.source + compared.stored) // 2, now - self._started
        facts = {**self._facts, "rows": rows, "estimate": compared.estimate}
        if seconds > 0 and rows:
            facts["rows_per_second"] = rate = rows / seconds
            facts["eta_seconds"] = max(0, compared.estimate - rows) / rate if compared.estimate else None
        self._show(facts)


def chosen_sinks(settings: Settings, names: Sequence[str]) -> list[SinkSettings]:
    """These sinks, or all if none is named; raises ConfigError for a name that does not exist."""
    known = {sink.name: sink for sink in settings.sinks}
    for name in names:
        if name not in known:
            raise ConfigError(f"No sink is called {name}.", f"Sinks: {', '.join(known)}.")
    return [sink for name, sink in known.items() if not names or name in names]


def _tables(settings: Settings, sink: SinkSettings, asked: Sequence[str]) -> list[TableSettings]:
    known = {table.name: table for table in settings.source.tables}
    views = {view.table for view in settings.views}
    for name in map(parsed_table, asked):
        if name not in known and name not in views:
            raise ConfigError(f"Table {name} is not captured.", f"Tables: {', '.join(map(str, known))}.")
    wanted = set(map(parsed_table, asked)) or set(known)
    return [table for name, table in known.items() if name in wanted and (not sink.tables or name in sink.tables)]


def parsed_table(text: str) -> TableId:
    """A table named on the command line."""
    try:
        return TableId.parse(text)
    except ValueError as error:
        raise ConfigError(f"{error}.") from None
