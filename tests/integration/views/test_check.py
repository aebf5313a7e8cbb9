"""`millrace view check` and `explain`, against a source that has not been captured yet."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from cdc.cli.main import app
from tests.fix_servers import Database

RIGHT = {
    "kind": "documents",
    "name": "order_documents",
    "root": "public.orders",
    "include": [{"table": "public.lines"}],
}
WRONG = {**RIGHT, "name": "wrong", "include": [{"table": "public.lines", "columns": ["amont"]}]}


@pytest.fixture
def config(database: Database, tmp_path: Path) -> Path:
    database.execute(
        "create table orders (id int primary key, label text)",
        "create table lines (id int primary key, order_id int references orders, amount int)",
    )
    source = {
        "host": database.server.host,
        "port": database.server.port,
        "database": database.name,
        "user": "postgres",
        "password": database.server.password,
        "tables": ["public.orders", "public.lines"],
    }
    path = tmp_path / "millrace.yaml"
    path.write_text(yaml.safe_dump({"state": str(tmp_path / "state"), "source": source, "views": [RIGHT, WRONG]}))
    return path


def run(config: Path, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["view", *words, "--config", str(config)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_every_view_is_checked_and_an_error_names_the_place(config: Path) -> None:
    right, wrong = json.loads(run(config, "check", "--json", code=2))["views"]
    assert right == {"name": "order_documents", "error": ""}
    assert "public.lines has no column amont; did you mean amount?" in wrong["error"]


def test_a_view_is_explained(config: Path) -> None:
    found = json.loads(run(config, "explain", "order_documents", "--json"))
    assert "public.lines: amount, id, order_id" in found["reads"]
    assert found["key"] == "id"
