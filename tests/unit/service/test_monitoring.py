"""Dashboard and alerts load, ask only for what is exported, and every alert has its page."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from cdc.artifacts.folders import cache_folder
from cdc.service.observe.metric_families import FAMILIES

ROOT = Path(__file__).parents[3]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "millrace.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
_NAME = re.compile(r"\bmillrace_\w+")


def exported() -> set[str]:
    histograms = {one.name for one in FAMILIES if one.kind == "histogram"}
    plain = {one.name for one in FAMILIES} - histograms
    return plain | {f"{name}_{end}" for name in histograms for end in ("bucket", "sum", "count")}


def panels() -> Iterator[dict[str, Any]]:
    yield from (panel for panel in DASHBOARD["panels"] if panel["type"] != "row")


def queries() -> list[str]:
    return [target["expr"] for panel in panels() for target in panel["targets"]]


def parsed(query: str) -> None:
    """Raises where it is no PromQL; Grafana's own variables stand for durations and patterns."""
    promql_parser.parse(query.replace("$__rate_interval", "5m").replace("$instance", ".*"))


@pytest.mark.parametrize("query", queries())
def test_every_query_of_the_dashboard_is_promql_over_what_is_exported(query: str) -> None:
    parsed(query)
    assert set(_NAME.findall(query)) <= exported()
    assert _NAME.search(query)


def test_the_dashboard_is_laid_out_as_grafana_wants_it() -> None:
    assert DASHBOARD["schemaVersion"] >= 36
    assert DASHBOARD["title"]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    places: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + dx, grid["y"] + dy) for dx in range(grid["w"]) for dy in range(grid["h"])}
        assert grid["x"] + grid["w"] <= 24
        assert not cells & places, panel["title"]
        places |= cells
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    assert {panel["datasource"]["uid"] for panel in panels()} == {"${datasource}"}
    assert variables == {"datasource", "instance"}


def test_the_dashboard_shows_every_family_that_a_person_looks_at() -> None:
    shown = {name for query in queries() for name in _NAME.findall(query)}
    unseen = {one.name for one in FAMILIES if not any(name.startswith(one.name) for name in shown)}
    assert unseen == {
        "millrace_build_info",
        "millrace_observed_seconds",
        "millrace_source_lsn",
        "millrace_log_head_lsn",
        "millrace_capture_bytes_total",
        "millrace_sink_running",
        "millrace_sink_paused",
        "millrace_table_lag_bytes",
        "millrace_view_lag_bytes",
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_every_alert_is_promql_over_what_is_exported_and_has_its_page(rule: dict[str, Any]) -> None:
    parsed(rule["expr"])
    assert set(_NAME.findall(rule["expr"])) <= exported()
    assert rule["labels"]["severity"] in ("page", "ticket")
    assert rule["annotations"]["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"


def test_every_alert_has_a_heading_that_says_what_to_do_and_no_heading_is_left_over() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    sections = dict(re.findall(r"^### (Millrace\w+)\n(.*?)(?=^##|\Z)", text, re.MULTILINE | re.DOTALL))
    assert set(sections) == {rule["alert"] for rule in RULES}
    assert [name for name, said in sections.items() if "**Do:**" not in said] == []


@pytest.fixture(scope="session")
def promtool() -> str:
    """Prometheus's own checker: the machine's, or Debian's package taken apart."""
    if found := shutil.which("promtool"):
        return found
    folder = cache_folder() / "promtool"
    tool = folder / "usr" / "bin" / "promtool"
    if not tool.exists():
        folder.mkdir(parents=True, exist_ok=True)
        got = subprocess.run(["apt-get", "download", "prometheus"], cwd=folder, capture_output=True, check=False)
        packages = sorted(folder.glob("prometheus_*.deb"))
        if got.returncode or not packages:
            pytest.skip("promtool is not on this machine, and apt gives no prometheus")
        subprocess.run(["dpkg-deb", "-x", str(packages[-1]), str(folder)], check=True)
    return str(tool)


@pytest.mark.parametrize(
    "arguments",
    [
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "--syntax-only", "prometheus.yml"],
    ],
    ids=" ".join,
)
def test_prometheus_itself_loads_the_rules_and_they_fire_as_they_should(promtool: str, arguments: list[str]) -> None:
    done = subprocess.run([promtool, *arguments], cwd=PROMETHEUS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_itself_reads_our_metrics(promtool: str) -> None:
    from cdc.service.observe.metrics import exposition
    from tests.unit.service.test_metrics import full

    text = exposition(full(), FAMILIES)
    done = subprocess.run([promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_figures_for_sizing_are_those_that_were_measured() -> None:
    """Within a half: machines differ, but nobody shall plan with figures of long ago."""
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    capture = json.loads((ROOT / "bench" / "results" / "capture.json").read_text(encoding="utf-8"))["contenders"]
    snapshot = json.loads((ROOT / "bench" / "results" / "snapshot.json").read_text(encoding="utf-8"))["contenders"]
    measured = {
        "capture into segments": capture["millrace_segments"]["cpu_us_per_change"],
        "capture into Kafka": capture["millrace_kafka"]["cpu_us_per_change"],
        "snapshot": snapshot["millrace_segments"]["cpu_us_per_row"],
    }
    said = {name: float(cost) for name, cost in re.findall(r"^\| ([\w ]+) \| ([\d.]+) µs", text, re.MULTILINE)}
    assert said == pytest.approx(measured, rel=0.5)
