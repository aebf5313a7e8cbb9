"""Runs an example: its pipeline, its steps one after the other, what the store holds after each, and the comparison."""

import contextlib
import json
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg
from rich.console import Console

from cdc.artifacts.jars import spark_jars
from cdc.config.settings import Settings
from cdc.errors import MillraceError
from cdc.service.inspect.verification import differences
from cdc.service.observe.health import nested
from cdc.service.observe.positions import Positions
from cdc.service.state import status
from deploy.demo import daemon, pipeline
from deploy.demo.screen import print_facts
from deploy.examples.example import Example
from deploy.examples.preparation import folder_of, prepare, servers_of, variables_path
from deploy.examples.stored_rows import Rows, found_documents, stored_rows
from deploy.local.servers import Servers

_PATIENCE = 180.0


@dataclass(slots=True)
class Run:
    """An example at work. `shown` is what each view had in its store when it was last shown."""

    example: Example
    settings: Settings
    console: Console
    output: Path
    process: subprocess.Popen[bytes]
    shown: dict[str, Rows] = field(default_factory=dict)

    def start(self) -> None:
        """Wait for the rows that were there before the pipeline, and show them."""
        self._wait()
        self._show("The pipeline has read the tables.")

    def step(self, owner: psycopg.Connection, sentence: str, sql: str) -> None:
        """Change the tables, wait for the store, and show what it then holds."""
        owner.execute(sql.encode())
        self._wait()
        self._show(sentence)

    def search(self) -> None:
        """Show what the example's search finds."""
        search = self.example.search
        if search is not None:
            self._say(search.sentence, *_lines({}, found_documents(self.settings.sinks[0], search)))

    def _wait(self) -> None:
        """Until every store holds what the source holds now. Raises MillraceError if the pipeline fails or is late."""
        wanted = pipeline.source_lsn(self.settings)
        deadline = time.monotonic() + _PATIENCE
        positions = Positions(self.settings)
        while positions.behind(wanted):
            daemon.require_running(self.process, self.settings, self.output)
            self._require_views()
            if time.monotonic() > deadline:
                raise MillraceError("The store did not catch up in time.", f"See {self.output}")
            time.sleep(0.05)

    def _require_views(self) -> None:
        for view in self.settings.views:
            error = nested(status.read(self.settings.state, "views"), "views", view.name, "error")
            if error and not error.get("transient"):
                raise MillraceError(f"View {view.name}: {error.get('message')}", str(error.get("remedy", "")))

    def _show(self, sentence: str) -> None:
        lines: list[str] = []
        for sink in self.settings.sinks:
            for table in self.settings.tables_of(sink):
                rows = stored_rows(sink, table)
                lines += _lines(self.shown.get(str(table), {}), rows)
                self.shown[str(table)] = rows
        self._say(sentence, *lines)

    def _say(self, sentence: str, *lines: str) -> None:
        self.console.print(f"\n{sentence}", style="bold", markup=False, soft_wrap=True)
        for line in lines:
            self.console.print(line, markup=False, soft_wrap=True)


def run(home: Path, console: Console, example: Example, keep: bool = False) -> bool:
    """Run an example; returns whether the store has in the end what the tables say."""
    servers = Servers(home, report=lambda line: console.print(line, markup=False, style="dim"))
    console.print(example.title, markup=False)
    with servers_of(example, servers, keep):
        settings = prepare(example, servers)
        output = servers.home / "logs" / "millrace.log"
        spark_jars(lambda line: console.print(line, markup=False, style="dim"))
        with daemon.running(example.config, output) as process:
            work = Run(example, settings, console, output, process)
            equal = _follow(work, servers)
            if keep:
                _stay(work, servers)
    return equal


def _follow(work: Run, servers: Servers) -> bool:
    with pipeline.connect(servers, work.example.name) as owner:
        work.start()
        for step in work.example.steps:
            work.step(owner, step.sentence, step.sql)
        work.search()
        compared = {**_verified(work.settings), **_expected(work, owner)}
    print_facts(work.console, "Compared with the tables in Postgres", compared)
    return bool(compared) and not any("DIFFER" in fact for fact in compared.values())


def _verified(settings: Settings) -> Mapping[str, str]:
    """What `millrace verify` says of the views that it can compute from the tables alone."""
    facts = {}
    for one in differences(settings, (), (), _PATIENCE):
        wrong = one.missing + one.extra + one.different + one.undecided
        facts[str(one.table)] = _verdict("millrace verify", one.rows, wrong)
    return facts


def _expected(work: Run, owner: psycopg.Connection) -> Mapping[str, str]:
    """Whether each view has the rows of the example's own query, as far as that has their columns."""
    if not work.example.expected:
        return {}
    query = f"select to_json(t)::text from ({work.example.expected}) t"
    expected = [_parsed(row) for (row,) in owner.execute(query.encode())]
    facts = {}
    for table, rows in work.shown.items():
        stored = [{name: _parsed(row).get(name) for name in expected[0]} for row in rows.values()]
        wrong = [row for row in (*expected, *stored) if row not in expected or row not in stored]
        facts[table] = _verdict("expected.sql", len(expected), len(wrong))
    return facts


def _verdict(by: str, rows: int, wrong: int) -> str:
    return f"{rows} rows compared by {by}, " + (f"{wrong} DIFFER" if wrong else "all equal")


def _parsed(row: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(row, parse_float=str)
    return found


def _lines(before: Rows, rows: Rows) -> list[str]:
    """Each row with what has become of it: + it is new, ~ it has changed, - it is gone."""
    lines = [_line(name, row, before.get(name)) for name, row in rows.items()]
    lines += [f"- {name}" for name in before if name not in rows]
    return [f"  {line}" for line in lines] or ["    nothing yet"]


def _line(name: str, row: str, before: str | None) -> str:
    if row == before:
        return f"  {name}  unchanged"
    return f"{'+' if before is None else '~'} {name}  {row}"


def _stay(work: Run, servers: Servers) -> None:
    variables = variables_path(folder_of(servers, work.example))
    work.console.print(f"\nStill running; the page: http://127.0.0.1:{work.settings.http.port}/", markup=False)
    look = f". {variables}; millrace status --config {work.example.config}"
    work.console.print(f"Its status: {look}", markup=False, soft_wrap=True)
    work.console.print("Ctrl-C stops the pipeline; the servers run until: millrace local down", soft_wrap=True)
    with contextlib.suppress(KeyboardInterrupt):
        work.process.wait()
