"""`millrace view …`, and what other commands say of a view."""

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import cdc.log
from cdc.cli.main import app
from cdc.errors import ConfigError, MillraceError
from cdc.model import Column, PgType, TableId, TableSchema
from cdc.ports import LogWriter
from cdc.service.daemon.process import settings_from
from cdc.service.state import status
from cdc.service.views.view_run import OpenView
from tests.contract.logs import entry
from views.dropped import is_dropped
from views.output_files import OutputFolder

ITEMS = TableSchema(
    TableId("public", "items"), (Column("id", PgType(23, "int4"), key=True), Column("name", PgType(25, "text")))
)
COPY = {"kind": "copied", "name": "totals", "source": "public.items"}
pytestmark = pytest.mark.usefixtures("copy_engine")


@pytest.fixture
def config(tmp_path: Path, copy_engine: Callable[[], OpenView]) -> Path:
    path = tmp_path / "millrace.yaml"
    sections = {"state": str(tmp_path / "state"), "source": {"tables": ["public.items"]}, "views": [COPY]}
    path.write_text(yaml.safe_dump({**sections, "sinks": [{"kind": "memory"}]}))
    return path


@pytest.fixture
def writer(config: Path) -> Iterator[LogWriter]:
    with closing(cdc.log.open_writer(settings_from(config))) as log:
        log.schemas.record(ITEMS)
        yield log


def run(config: Path, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, [*words, "--config", str(config)], catch_exceptions=False)
    assert result.exit_code == code, result.output
    return result.stdout


def test_a_view_is_run_in_the_foreground_and_leaves_nothing_behind(config: Path, writer: LogWriter) -> None:
    for number in (1, 2, 3):
        writer.append(entry(number, size=2))
    lines = [json.loads(line) for line in run(config, "view", "run", "totals").splitlines()]
    assert [(line["op"], line["version"], line["key"]["id"]) for line in lines][:3] == [
        ("u", "0/62", 1),
        ("u", "0/63", 2),
        ("u", "0/C6", 2),
    ]
    assert lines[-1]["after"] == {"id": 4, "name": "n4@300"}
    assert len(lines) == 6
    assert len(run(config, "view", "run", "view.totals", "--limit", "2").splitlines()) == 2
    state = settings_from(config).state
    assert not (state / "views").exists()
    assert cdc.log.open_reader(settings_from(config)).consumers() == []


def test_a_view_that_cannot_reach_an_lsn_says_where_it_is(config: Path, writer: LogWriter) -> None:
    writer.append(entry(1))
    with pytest.raises(MillraceError, match=r"View totals is live at 0/6E: nothing has come for 0\.2 s"):
        run(config, "view", "run", "totals", "--until", "0/FFFF", "--seconds", "0.2")


def test_the_list_shows_what_the_process_said(config: Path, writer: LogWriter) -> None:
    found = json.loads(run(config, "view", "list", "--json"))
    assert [(view["view"], view["table"], view["kind"], view["state"]) for view in found] == [
        ("totals", "view.totals", "copied", "not running")
    ]
    said = {"state": "live", "lsn": "0/6E", "rows": 3, "state_bytes": 1000, "error": {}}
    settings = settings_from(config)
    status.publish(settings.state, "views", {"state": "running", "views": {"totals": said}})
    status.publish(settings.state, "capture", {"state": "streaming", "watermark": 110})
    writer.append(entry(1))
    (view,) = json.loads(run(config, "view", "list", "--json"))
    assert (view["state"], view["lsn"], view["rows"], view["state_bytes"]) == ("live", "0/6E", 3, 1000)
    assert isinstance(view["lag_seconds"], float)
    assert "totals\tcopied\tlive\t0/6E\t3" in run(config, "view", "list")


def test_a_failed_view_shows_its_error_and_remedy(config: Path) -> None:
    said = {"state": "failed", "error": {"message": "a column is gone", "remedy": "Change it."}}
    status.publish(settings_from(config).state, "views", {"state": "running", "views": {"totals": said}})
    assert "! totals: a column is gone Change it." in run(config, "view", "list")


def test_emit_leaves_a_request_for_the_view(config: Path) -> None:
    assert json.loads(run(config, "view", "emit", "totals", "--json")) == {"view": "totals", "asked": True}
    assert OutputFolder(settings_from(config).state, "totals").asked_to_emit_again()


def test_a_drop_is_asked_for_and_can_be_taken_back(config: Path) -> None:
    assert "will be dropped" in run(config, "view", "drop", "totals", "--yes")
    state = settings_from(config).state
    assert is_dropped(state, "totals")
    assert json.loads(run(config, "view", "list", "--json"))[0]["state"] == "dropped"
    run(config, "resume", "view.totals")
    assert not is_dropped(state, "totals")


@pytest.mark.parametrize("command", ["run", "emit"])
def test_a_view_that_does_not_exist_is_named_with_those_that_do(config: Path, command: str) -> None:
    with pytest.raises(ConfigError, match=r"no view totls\. Views: totals\."):
        run(config, "view", command, "totls")
    with pytest.raises(ConfigError, match=r"There is no view totls\. Views: totals\."):
        run(config, "view", "drop", "totls", "--yes")


def test_a_view_is_not_read_from_the_source(config: Path) -> None:
    with pytest.raises(ConfigError, match=r"view\.totals is a view.*millrace replay.*millrace view emit totals"):
        run(config, "backfill", "view.totals")


def test_a_views_table_is_paused_and_listed_as_any_table(config: Path) -> None:
    assert json.loads(run(config, "pause", "view.totals", "--json"))["tables"] == ["view.totals"]
    tables = {facts["table"]: facts["state"] for facts in json.loads(run(config, "tables", "--json"))}
    assert tables["view.totals"] == "paused"
    assert json.loads(run(config, "skip", "view.totals", "--sink", "memory", "--json"))["skipped"] == {
        "memory": ["view.totals"]
    }
    assert json.loads(run(config, "validate", "--json"))["views"] == ["totals"]


def test_a_sink_cannot_name_a_view_that_does_not_exist(config: Path) -> None:
    sections = yaml.safe_load(config.read_text())
    sections["sinks"] = [{"kind": "memory", "tables": ["view.totls"]}]
    config.write_text(yaml.safe_dump(sections))
    with pytest.raises(
        ConfigError, match=r"sink memory names view\.totls, which is no view.*did you mean view\.totals"
    ):
        run(config, "validate")


def test_a_connectors_log_has_no_views(config: Path) -> None:
    sections = yaml.safe_load(config.read_text())
    sections["log"] = {"kind": "debezium", "bootstrap": "127.0.0.1:1", "prefix": "x"}
    config.write_text(yaml.safe_dump(sections))
    with pytest.raises(ConfigError, match="written by a connector"):
        run(config, "validate")
