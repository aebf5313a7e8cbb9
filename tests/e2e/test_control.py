"""Steering a pipeline that runs: pause, resume and reload, through every process."""

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import httpx
import pytest
import redis
import yaml

from cdc.service.state import pauses, status
from tests.fix_pipeline import Pipeline
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_servers import Database, LocalServer

pytestmark = pytest.mark.spark
_DEPLOY = Path(__file__).parents[2] / "deploy"
_MONITORING = ("grafana/millrace.json", "prometheus/alerts.yml")


@pytest.fixture
def millrace(run_program: RunProgram, pipeline: Pipeline) -> Callable[..., Program]:
    def run(*words: str) -> Program:
        return run_program("-m", "cdc.cli.main", *words, "--config", str(pipeline.config))

    return run


def edited(pipeline: Pipeline, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change the pipeline file."""
    facts = yaml.safe_load(pipeline.config.read_text())
    edit(facts)
    pipeline.config.write_text(yaml.safe_dump(facts))


def state_of(pipeline: Pipeline, sink: str) -> dict[str, Any]:
    sinks: Any = status.read(pipeline.settings.state, "apply").get("sinks") or {}
    return dict(sinks.get(sink, {}))


def said(program: Program, code: int = 0) -> str:
    assert program.wait(120) == code, program.said()
    return program.said()


def test_a_paused_sink_a_paused_table_and_a_sink_that_gave_up_stand_still_and_then_catch_up(
    pipeline: Pipeline, millrace: Callable[..., Program], redis_url: str, redis_server: LocalServer
) -> None:
    edited(pipeline, _gives_up_soon)
    pipeline.reopen()
    daemon = pipeline.start()
    pipeline.settle()
    sampled = _sampled(pipeline)
    store = redis.Redis.from_url(redis_url, decode_responses=True)
    said(millrace("pause", "opensearch"))
    said(millrace("pause", "public.users"))
    wait_until(lambda: state_of(pipeline, "opensearch").get("state") == "paused", 60)
    wait_until(lambda: state_of(pipeline, "redis").get("held") == ["public.users"], 60)
    with pipeline.database.connect() as owner:
        owner.execute("update users set name = 'held' where id = 1")
        owner.execute("update products set title = 'not held' where id = 1")
    wait_until(lambda: json.loads(store.get("public.products:1") or "{}").get("title") == "not held", 60)
    assert json.loads(store.get("public.users:1") or "{}")["name"] != "held"
    assert "paused" in said(millrace("status"), 1)
    assert daemon.terminate(60) == 0

    daemon = pipeline.start()
    pipeline.database.execute("update products set title = 'after' where id = 2", "delete from users where id = 2")
    wait_until(lambda: json.loads(store.get("public.products:2") or "{}").get("title") == "after", 120)
    assert state_of(pipeline, "opensearch")["state"] == "paused"
    assert store.get("public.users:2")
    assert set(pipeline.positions.behind(pipeline.positions.head())) >= {"redis", "opensearch"}

    for target in ("public.users", "opensearch"):
        said(millrace("resume", target))
    pipeline.settle()
    assert json.loads(store.get("public.users:1") or "{}")["name"] == "held"
    assert state_of(pipeline, "redis")["held"] == []
    assert pauses.read(pipeline.settings.state) == pauses.Paused()
    _stops_for_good_and_goes_on(pipeline, millrace, redis_server)
    sampled |= _one_table_waits_alone_is_skipped_and_comes_back(pipeline, millrace)
    pipeline.assert_equal()
    _why_tells_what_each_store_holds(millrace)
    _dashboard_and_alerts_find_what_they_ask_for(pipeline, sampled)
    assert daemon.terminate(60) == 0


def _gives_up_soon(facts: dict[str, Any]) -> None:
    redis = next(sink for sink in facts["sinks"] if sink["kind"] == "redis")
    facts["source"]["wal_room_gb"] = 1
    redis["retry"] = {"attempts": 3, "first_seconds": 0.1, "then": "stop"}


def _stops_for_good_and_goes_on(pipeline: Pipeline, millrace: Callable[..., Program], server: LocalServer) -> None:
    """`then: stop` in a whole pipeline: the others go on, its position stays, health names the way out."""
    server.kill()
    pipeline.database.execute("update products set title = 'given up' where id = 1")
    wait_until(lambda: state_of(pipeline, "redis").get("state") == "stopped", 60, "redis given up")
    head = pipeline.positions.head()
    wait_until(lambda: pipeline.positions.behind(head) == ["redis"], 60, "the others at work")
    server.start()
    facts = json.loads(said(millrace("status", "--json"), 1))
    reason = next(one for one in facts["reasons"] if one["part"] == "sink redis")
    assert "It was tried 3 times" in reason["message"]
    assert "millrace pause redis && millrace resume redis" in reason["remedy"]
    assert state_of(pipeline, "redis")["state"] == "stopped"  # also once its store is back: somebody must look at it
    for command in ("pause", "resume"):
        said(millrace(command, "redis"))
        wait_until(lambda: state_of(pipeline, "redis").get("state") in ("paused", "running"), 60)
    pipeline.settle()


def _one_table_waits_alone_is_skipped_and_comes_back(pipeline: Pipeline, millrace: Callable[..., Program]) -> set[str]:
    """A type that Delta does not follow: the lake goes on with its other tables, and ends without a ghost."""
    orders = "public.orders"
    database, address = pipeline.database, f"http://127.0.0.1:{pipeline.settings.http.port}"

    def waited(**query: str) -> dict[str, Any]:
        with database.connect() as owner:
            (lsn,) = owner.execute("select pg_current_wal_lsn()::text").fetchone() or ("",)
        asked = {"lsn": lsn, "timeout": "60", **query}
        return dict(httpx.get(f"{address}/v1/wait", params=asked, timeout=90, trust_env=False).json())

    database.execute("insert into orders (user_id, status, total) values (1, 'new', 10.50), (1, 'new', 20.25)")
    assert waited()["reached"]
    database.execute(
        "alter table orders alter column total type numeric(12, 4)", "update orders set note = 'longer' where id = 1"
    )
    wait_until(lambda: orders in state_of(pipeline, "delta").get("tables_waiting", {}), 60, "orders waits")
    database.execute("update users set name = 'flows' where id = 1")
    assert waited(sink="delta", table="public.users") == {"reached": True, "lsn": ANY, "except": []}
    left_out = waited(except_waiting="true")
    assert (left_out["reached"], [item["table"] for item in left_out["except"]]) == (True, [orders])
    assert waited(sink="delta", timeout="0.1")["behind"] == ["delta"]
    shown = said(millrace("status"), 1)
    assert f"table {orders} waits: table {orders}: column total is" in shown
    assert f"millrace skip {orders} --sink delta" in shown
    sampled = _sampled(pipeline)

    said(millrace("skip", orders, "--sink", "delta"))
    wait_until(lambda: state_of(pipeline, "delta")["tables_skipped"] == [orders], 60)
    database.execute("delete from orders where id = 2")
    assert [(item["kind"], item["table"]) for item in waited()["except"]] == [("skipped", orders)]
    wait_until(lambda: "millrace_table_skipped" in _sampled(pipeline), 30)
    sampled |= _sampled(pipeline)
    database.execute("alter table orders alter column total type numeric(12, 2)")
    database.execute("checkpoint")  # so that the slot's restart_lsn moves: it beats what was skipped
    said(millrace("resume", orders, "--sink", "delta"))
    wait_until(lambda: not state_of(pipeline, "delta")["tables_skipped"], 120)
    wait_until(lambda: not state_of(pipeline, "delta")["tables_waiting"], 120)
    wait_until(lambda: not state_of(pipeline, "delta")["tables_refilling"], 120, "read again")
    pipeline.settle()
    return sampled


def _dashboard_and_alerts_find_what_they_ask_for(pipeline: Pipeline, before: set[str]) -> None:
    """Every name is answered by a real daemon, with a sample and not only a heading; a snapshot while it is known."""
    asked = set(re.findall(r"\bmillrace_\w+", "".join((_DEPLOY / path).read_text() for path in _MONITORING)))
    left = {name for name in asked - before - _sampled(pipeline) if not name.startswith("millrace_view_")}
    assert left == {"millrace_table_lost"}  # tests/e2e/test_lost_stores.py samples that, test_views.py those of views


def _sampled(pipeline: Pipeline) -> set[str]:
    answer = httpx.get(f"http://127.0.0.1:{pipeline.settings.http.port}/metrics", trust_env=False).raise_for_status()
    return set(re.findall(r"^(millrace_\w+)[{ ]", answer.text, re.MULTILINE))


def _why_tells_what_each_store_holds(millrace: Callable[..., Program]) -> None:
    told = json.loads(said(millrace("why", "public.products", '{"id":1}', "--json")))
    newest = told["events"][-1]
    assert {(held["state"], held["version"]) for held in told["stored"].values()} == {
        ("there", newest["event"]["version"])
    }
    assert set(newest["sinks"].values()) == {"applied"}
    assert all(batch["first"] > 0 for batch in newest["batches"].values())
    gone = json.loads(said(millrace("why", "public.users", '{"id":2}', "--json")))
    assert {held["state"] for held in gone["stored"].values()} == {"deleted"}
    assert gone["events"][-1]["batches"]["redis"] is None  # it was paused then: which batch brought it is not recorded


def test_tables_and_sinks_come_and_go_by_reload_and_a_wrong_file_changes_nothing(
    pipeline: Pipeline, millrace: Callable[..., Program], database: Database, redis_url: str
) -> None:
    edited(pipeline, lambda facts: facts["sinks"].pop(1))  # no search: Redis and the lake are enough here
    pipeline.reopen()
    daemon = pipeline.start()
    pipeline.settle()
    parts = {name: pipeline.part(name) for name in ("capture", "apply")}
    database.execute("create table extra (id int primary key, t text)", "insert into extra values (1, 'before')")

    edited(pipeline, lambda facts: facts["sinks"].append({"kind": "nonsense"}))
    refused = said(millrace("reload"), 2)
    assert "nonsense" in refused
    edited(pipeline, lambda facts: facts["sinks"].pop())
    edited(pipeline, lambda facts: facts["source"].update(slot="another"))
    assert "source.slot cannot change" in said(millrace("reload"), 2)
    edited(pipeline, lambda facts: facts["source"].update(slot=database.name))
    assert "nothing changed" in said(millrace("reload"))

    second = {"kind": "redis", "name": "copy", "url": redis_url, "prefix": "copy:"}
    edited(pipeline, lambda facts: facts["sinks"].append(second))
    edited(pipeline, lambda facts: facts["source"]["tables"].append("public.extra"))
    outcome = json.loads(said(millrace("reload", "--json")))
    assert outcome["changed"] == ["table public.extra added", "sink copy added"]
    pipeline.reopen()
    database.execute("insert into extra values (2, 'after')")
    store = redis.Redis.from_url(redis_url, decode_responses=True)
    for prefix in ("", "copy:"):
        for key in (1, 2):
            wait_until(lambda: store.get(f"{prefix}public.extra:{key}"), 120, f"{prefix}extra:{key}")  # noqa: B023
    pipeline.settle()
    pipeline.assert_equal()
    assert parts == {name: pipeline.part(name) for name in parts}, "nothing had to be started again"

    edited(pipeline, lambda facts: facts["sinks"].pop())
    assert "sink copy removed" in said(millrace("reload"))
    wait_until(lambda: not state_of(pipeline, "copy"), 60)
    os.kill(daemon.pid, 0)
    assert daemon.terminate(60) == 0
