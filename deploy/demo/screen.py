"""The output of a running demo: a live table in a terminal, a line every two seconds in a pipe."""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from rich.console import Console
from rich.live import Live
from rich.table import Table


@dataclass(frozen=True, slots=True)
class SinkView:
    """The state of one sink. `lag_bytes` is None until it has the first snapshot."""

    name: str
    state: str
    changes: int
    lag_bytes: int | None


@dataclass(frozen=True, slots=True)
class View:
    """The state of the whole pipeline."""

    seconds: float
    committed: int
    captured: int
    capture_state: str
    sinks: tuple[SinkView, ...]


def _lag(view: SinkView) -> str:
    if view.lag_bytes is None:
        return "no snapshot"
    if not view.lag_bytes:
        return "up to date"
    return f"{view.lag_bytes / 1e6:,.1f} MB" if view.lag_bytes >= 1e6 else f"{view.lag_bytes / 1e3:,.1f} kB"


def table(view: View) -> Table:
    """The state as a table."""
    grid = Table(title=f"Postgres → log → stores   ({view.seconds:4.0f} s)", title_justify="left", box=None)
    for heading, width in (("", 11), ("state", 11), ("changes", 9), ("behind", 11)):
        grid.add_column(heading, justify="left" if heading in {"", "state"} else "right", min_width=width, no_wrap=True)
    grid.add_row("Postgres", "committing" if view.committed else "up", f"{view.committed:,} tx", "")
    grid.add_row("log", view.capture_state, f"{view.captured:,}", "")
    for sink in view.sinks:
        grid.add_row(sink.name, sink.state, f"{sink.changes:,}", _lag(sink))
    return grid


@dataclass(slots=True)
class Screen:
    """Shows the state: in a pipe only one line every two seconds, so that a build log stays readable."""

    console: Console
    _live: Live | None = None
    _last: float = field(default=0.0)

    def __enter__(self) -> "Screen":
        if self.console.is_terminal:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def show(self, view: View) -> None:
        """Show the state once."""
        if self._live:
            self._live.update(table(view), refresh=True)
        elif time.monotonic() - self._last >= 2.0:
            self._last = time.monotonic()
            sinks = "  ".join(f"{sink.name}: {sink.changes:,} ({_lag(sink)})" for sink in view.sinks)
            line = f"{view.seconds:5.1f} s  {view.committed:,} tx  log {view.captured:,}  {sinks}"
            self.console.print(line, soft_wrap=True)


def print_facts(console: Console, title: str, facts: Mapping[str, str]) -> None:
    """A small titled list."""
    console.print(f"\n{title}", style="bold")
    width = max([12, *map(len, facts)])
    for name, fact in facts.items():
        console.print(f"  {name:<{width}} {fact}", markup=False, soft_wrap=True)
