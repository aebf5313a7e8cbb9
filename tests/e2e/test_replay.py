"""Reading the log again changes nothing that is right and heals what was lost."""

import json
from contextlib import closing

import pytest
import redis

from deploy.demo.shop import Customers
from tests.fix_pipeline import Pipeline
from tests.fix_processes import RunProgram

pytestmark = pytest.mark.spark


def test_a_replay_beside_the_live_pipeline_heals_a_cache_and_takes_nothing_back(
    pipeline: Pipeline, run_program: RunProgram
) -> None:
    daemon = pipeline.start()
    pipeline.settle()
    with pipeline.database.connect() as owner:
        customers = Customers(owner)
        for _ in range(100):
            customers.act()
    pipeline.settle()
    url = next(str(getattr(sink, "url")) for sink in pipeline.settings.sinks if sink.kind == "redis")  # noqa: B009
    with closing(redis.Redis.from_url(url)) as cache:
        for key in cache.scan_iter(count=1000):
            if b"~store:" not in key:  # with it, the loss of the whole cache is noticed (test_lost_stores)
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
    assert daemon.terminate(60) == 0
