"""Stores that lose what they held under a whole pipeline: a replay brings rows back beside the live stream, and a store
that lost a table is noticed by every process and filled again."""

import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from cdc.service.state import status
from deploy.demo.shop import Customers
from tests.fix_pipeline import Pipeline
from tests.fix_processes import RunProgram, wait_until
from tests.fix_servers import LocalServer, opensearch_request

pytestmark = pytest.mark.spark


def losses(pipeline: Pipeline, sink: str) -> set[str]:
    """The tables that a sink says are lost."""
    sinks: Any = status.read(pipeline.settings.state, "apply").get("sinks") or {}
    return set(sinks.get(sink, {}).get("losses", {}))


@pytest.fixture(scope="module")
def pipeline(shared_pipeline: Pipeline) -> Iterator[Pipeline]:
    """The shop's pipeline, running."""
    pipeline = shared_pipeline
    facts = yaml.safe_load(pipeline.config.read_text())
    for sink in facts["sinks"]:
        sink["on_loss"] = "stop" if sink["kind"] == "redis" else "refill"
    pipeline.config.write_text(yaml.safe_dump(facts))
    pipeline.reopen()
    daemon = pipeline.start()
    pipeline.settle()
    yield pipeline
    assert daemon.terminate(60) == 0


def cache_of(pipeline: Pipeline) -> redis.Redis:
    return redis.Redis.from_url(next(sink.url for sink in pipeline.settings.sinks if sink.kind == "redis"))  # type: ignore[attr-defined]


def test_a_replay_beside_the_live_pipeline_heals_a_cache_and_takes_nothing_back(
    pipeline: Pipeline, run_program: RunProgram
) -> None:
    with pipeline.database.connect() as owner:
        customers = Customers(owner)
        for _ in range(100):
            customers.act()
    pipeline.settle()
    with closing(cache_of(pipeline)) as cache:
        for key in cache.scan_iter(count=1000):
            if b"~store:" not in key:  # with it, the loss of the whole cache would be noticed
                cache.delete(key)
    arguments = ["-m", "cdc.cli.main", "replay", "--config", str(pipeline.config), "--json"]
    counted = run_program(*arguments, "--dry-run", "--table", "public.users")
    assert counted.wait(60) == 0, counted.said()
    assert json.loads(counted.output.read_text())["changes"] >= 500
    replayed = run_program(*arguments)
    assert replayed.wait(180) == 0, replayed.said()
    with pipeline.database.connect() as owner:
        Customers(owner, seed=8).act()
    pipeline.settle()
    pipeline.assert_equal()


def test_every_store_loses_what_it_held_says_so_and_is_filled_again(
    pipeline: Pipeline, run_program: RunProgram, shared_opensearch: LocalServer
) -> None:
    daemon, sinks = pipeline.daemon, {sink.kind: sink for sink in pipeline.settings.sinks}
    assert daemon is not None
    pipeline.database.execute("delete from users where id = 3", "update users set name = 'newer' where id = 4")
    pipeline.settle()

    with closing(cache_of(pipeline)) as cache:
        cache.flushdb()
    index = f"{sinks['opensearch'].prefix}public.users-000001"  # type: ignore[attr-defined]
    opensearch_request(shared_opensearch, "DELETE", f"/{index}")
    shutil.rmtree(Path(sinks["delta"].path) / "public.users")  # type: ignore[attr-defined]
    wait_until(lambda: "public.users" in losses(pipeline, "redis"), 60, "the loss of Redis is said")
    pipeline.database.execute("update users set name = 'newest' where id = 5")
    wait_until(lambda: daemon.said().count("its rows are read again") >= 2, 60, "search and lake are made anew")
    wait_until(lambda: not losses(pipeline, "opensearch") | losses(pipeline, "delta"), 120, "both are filled again")

    def behind() -> set[str]:
        return set(pipeline.positions.behind(pipeline.positions.head()))

    wait_until(lambda: behind() == {"redis"}, 30, "only Redis lacks something: the others reach the head")
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
