"""A view in a store as any table: applied, waited for, paused, lost and filled again, dropped."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml

from cdc.service.daemon.process import settings_from
from cdc.service.observe.metric_families import FAMILIES
from cdc.service.state import status
from cdc.service.views.view_run import OpenView
from deploy.local import ports
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_servers import Database
from tests.fix_views import ENVIRONMENT

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("copy_engine")]


class Shop:
    """Table items, a view that copies it, and Redis."""

    def __init__(self, database: Database, redis_url: str, state: Path, folder: Path, run_program: RunProgram) -> None:
        self.database, self.state, self.config = database, state, folder / "millrace.yaml"
        self.store = redis.Redis.from_url(redis_url, decode_responses=True)
        self.port = ports.pick()
        self._run = run_program
        source = {
            "host": database.server.host,
            "port": database.server.port,
            "database": database.name,
            "user": "postgres",
            "password": database.server.password,
            "slot": database.name,
            "tables": ["public.items"],
            "heartbeat_seconds": 1,
        }
        views = [{"kind": "copied", "name": "copy", "source": "public.items"}]
        sinks = [{"kind": "redis", "url": redis_url, "on_loss": "refill"}]
        facts = {"state": str(state), "source": source, "http": {"port": self.port}, "views": views, "sinks": sinks}
        self.config.write_text(yaml.safe_dump(facts))

    def millrace(self, *words: str) -> Program:
        return self._run("-m", "cdc.cli.main", *words, "--config", str(self.config), env=ENVIRONMENT)

    def said(self, *words: str, code: int = 0) -> str:
        program = self.millrace(*words)
        assert program.wait(60) == code, program.said()
        return program.said()

    def label(self, number: int, table: str = "view.copy") -> str | None:
        found = self.store.get(f"{table}:{number}")
        return None if found is None else str(json.loads(str(found))["label"])

    def change(self, number: int, label: str) -> str:
        """Change a row; returns an LSN after the commit."""
        with self.database.connect() as connection:
            connection.execute(
                "insert into items values (%s, %s) on conflict (id) do update set label = excluded.label",
                (number, label),
            )
            row = connection.execute("select pg_current_wal_lsn()::text").fetchone()
        assert row is not None
        return str(row[0])

    def ready(self) -> bool:
        try:
            answer = httpx.get(f"http://127.0.0.1:{self.port}/readyz", trust_env=False, verify=False, timeout=5)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    def sink(self) -> dict[str, Any]:
        sinks: Any = status.read(self.state, "apply").get("sinks") or {}
        return dict(sinks.get("redis", {}))


@pytest.fixture
def shop(
    database: Database,
    redis_url: str,
    state_dir: Path,
    tmp_path: Path,
    run_program: RunProgram,
    copy_engine: Callable[[], OpenView],
) -> Iterator[Shop]:
    database.execute("create table items (id int primary key, label text)", "insert into items values (1, 'first')")
    yield Shop(database, redis_url, state_dir, tmp_path, run_program)


def test_a_view_is_a_table_in_the_store(shop: Shop) -> None:
    daemon = shop.millrace("run")
    wait_until(shop.ready, 120, "readiness")
    wait_until(lambda: shop.label(1) == "first", 60, "the first row of the view")
    for number in range(20):
        lsn = shop.change(2, f"changed {number}")
        shop.said("wait", lsn, "--timeout", "60")
        assert shop.label(2) == f"changed {number}", "what was waited for is there"
    assert "view.copy" in shop.said("why", "view.copy", '{"id":2}', "--json")
    assert json.loads(shop.said("lag", "--json"))["views"]["copy"]["seconds"] < 30
    _metrics_of_views_have_samples(shop)
    _a_paused_view_stands_still(shop)
    _a_lost_view_is_filled_again(shop)
    _a_dropped_view_leaves_the_store(shop)
    assert daemon.terminate(60) == 0


def _metrics_of_views_have_samples(shop: Shop) -> None:
    answer = httpx.get(f"http://127.0.0.1:{shop.port}/metrics", trust_env=False).raise_for_status()
    sampled = set(re.findall(r"^(millrace_view_\w+)[{ ]", answer.text, re.MULTILINE))
    assert sampled == {one.name for one in FAMILIES if one.name.startswith("millrace_view_")}


def _a_paused_view_stands_still(shop: Shop) -> None:
    shop.said("pause", "view.copy")
    wait_until(lambda: shop.sink().get("held") == ["view.copy"], 60, "the pause")
    shop.change(3, "while paused")
    wait_until(lambda: shop.label(3, "public.items") == "while paused", 60, "the row of the table")
    assert shop.label(3) is None
    shop.said("resume", "view.copy")
    wait_until(lambda: shop.label(3) == "while paused", 60, "the row of the view")


def _a_lost_view_is_filled_again(shop: Shop) -> None:
    shop.store.flushdb()
    wait_until(lambda: shop.label(1) == "first", 120, "the rows of the view again")
    wait_until(lambda: not shop.sink().get("losses") and shop.ready(), 30, "the end of the loss")
    assert [shop.label(number) for number in (1, 2, 3)] == ["first", "changed 19", "while paused"]
    assert shop.label(3, "public.items") == "while paused"


def _a_dropped_view_leaves_the_store(shop: Shop) -> None:
    assert "is dropped" in shop.said("view", "drop", "copy", "--yes")
    wait_until(lambda: not shop.store.keys("view.copy:*"), 60, "the end of the rows")
    lsn = shop.change(4, "after the drop")
    shop.said("wait", lsn, "--timeout", "60")
    assert shop.label(4, "public.items") == "after the drop"
    assert shop.label(4) is None
    assert shop.ready()
    facts = yaml.safe_load(shop.config.read_text())
    del facts["views"]
    shop.config.write_text(yaml.safe_dump(facts))
    shop.said("reload")
    assert settings_from(shop.config).views == ()
    wait_until(shop.ready, 60, "readiness without views")
