"""A view of a real kind beside a real source: documents in the log, after changes and kills."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

import cdc.log
from cdc.service.daemon.process import settings_from
from tests.fix_processes import RunProgram, wait_until
from tests.fix_servers import Database
from tests.integration.service.test_daemon import Daemon

ORDERS = {"kind": "documents", "name": "orders", "root": "public.items", "include": [{"table": "public.lines"}]}


@pytest.fixture
def daemon(database: Database, state_dir: Path, tmp_path: Path, run_program: RunProgram) -> Daemon:
    database.execute(
        "create table items (id int primary key, label text)",
        "create table lines (id int primary key, item_id int references items, amount int)",
        "insert into items values (1, 'first')",
        "insert into lines values (10, 1, 5)",
    )
    found = Daemon(database, state_dir, tmp_path, run_program)
    source = {**_source(found), "tables": ["public.items", "public.lines"]}
    found.write(source=source, views=[ORDERS])
    return found


def _source(daemon: Daemon) -> dict[str, Any]:
    facts: dict[str, Any] = yaml.safe_load(daemon.config.read_text())["source"]
    return facts


def _documents(daemon: Daemon) -> dict[str, Any]:
    reader = cdc.log.open_reader(settings_from(daemon.config))
    found: dict[str, Any] = {}
    for piece in reader.read(reader.start()):
        for row in piece.rows.to_pylist():
            if row["table"] == "view.orders":
                found[row["key"]] = json.loads(row["after"]) if row["after"] else None
    return found


def _amounts(daemon: Daemon) -> list[int]:
    document = _documents(daemon).get('{"id":1}') or {}
    return sorted(line["amount"] for line in document.get("lines", ()))


def test_documents_follow_their_parts_through_kills_of_both_processes(daemon: Daemon) -> None:
    program = daemon.start()
    wait_until(lambda: _amounts(daemon) == [5], 90, "the first document")
    wait_until(lambda: daemon.readyz()[0] == 200, 60, "readiness")
    for number, part in enumerate(("views", "capture"), 1):
        daemon.database.execute(f"insert into lines values ({10 + number}, 1, {5 + number})")
        os.kill(int(daemon.facts(part)["pid"]), signal.SIGKILL)
        wait_until(lambda: _amounts(daemon) == list(range(5, 6 + number)), 90, f"the line after {part} was killed")  # noqa: B023
    daemon.database.execute("delete from lines where id = 10")
    wait_until(lambda: _amounts(daemon) == [6, 7], 60, "the end of a line")
    assert program.terminate(60) == 0
