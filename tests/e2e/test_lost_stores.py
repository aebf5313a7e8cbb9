"""Stores that lose what they held under a whole pipeline: noticed by every process, filled again beside the stream."""

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from cdc.service.state import status
from tests.fix_pipeline import Pipeline
from tests.fix_processes import RunProgram, wait_until
from tests.fix_servers import LocalServer, opensearch_request

pytestmark = pytest.mark.spark


def losses(pipeline: Pipeline, sink: str) -> set[str]:
    """The tables that a sink says are lost."""
    sinks: Any = status.read(pipeline.settings.state, "apply").get("sinks") or {}
    return set(sinks.get(sink, {}).get("losses", {}))


def test_every_store_loses_what_it_held_says_so_and_is_filled_again(
    pipeline: Pipeline,
    run_program: RunProgram,
    redis_url: str,
    opensearch_server: LocalServer,
    index_prefix: str,
    tmp_path: Path,
) -> None:
    facts = yaml.safe_load(pipeline.config.read_text())
    for sink in facts["sinks"]:
        sink["on_loss"] = "stop" if sink["kind"] == "redis" else "refill"
    pipeline.config.write_text(yaml.safe_dump(facts))
    pipeline.reopen()
    daemon = pipeline.start()
    pipeline.settle()
    pipeline.database.execute("delete from users where id = 3", "update users set name = 'newer' where id = 4")
    pipeline.settle()

    redis.Redis.from_url(redis_url).flushdb()
    opensearch_request(opensearch_server, "DELETE", f"/{index_prefix}public.users-000001")
    shutil.rmtree(tmp_path / "lake" / "public.users")
    wait_until(lambda: "public.users" in losses(pipeline, "redis"), 60, "the loss of Redis is said")
    pipeline.database.execute("update users set name = 'newest' where id = 5")
    wait_until(lambda: daemon.said().count("its rows are read again") >= 2, 60, "search and lake are made anew")
    wait_until(lambda: not losses(pipeline, "opensearch") | losses(pipeline, "delta"), 120, "both are filled again")

    assert set(pipeline.positions.behind(pipeline.positions.head())) == {"redis"}
    address = f"http://127.0.0.1:{pipeline.settings.http.port}"
    lost = 'millrace_table_lost{sink="redis",table="public.users"} 1'
    wait_until(lambda: lost in httpx.get(f"{address}/metrics", trust_env=False).text, 30, "the metric of the alert")
    answer = httpx.get(f"{address}/readyz", trust_env=False)
    assert answer.status_code == 503
    (reason,) = [one for one in answer.json()["reasons"] if "flushed" in json.dumps(one)]
    assert "public.users" in reason["message"] and "millrace refill redis" in reason["remedy"]
    command = run_program("-m", "cdc.cli.main", "refill", "redis", "--config", str(pipeline.config))
    assert command.wait(60) == 0, command.said()
    pipeline.settle()
    wait_until(lambda: not losses(pipeline, "redis"), 30)
    pipeline.assert_equal()
    assert daemon.terminate(60) == 0
