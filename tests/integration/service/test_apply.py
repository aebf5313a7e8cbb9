"""The apply process as a whole: `python -m cdc.service.apply.process`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from cdc.service.state import status
from tests.fix_log import FilledLog
from tests.fix_processes import Program, RunProgram, wait_until
from tests.scenes.histories import change, table

pytestmark = pytest.mark.spark
ITEMS = table()


@pytest.fixture
def start(run_program: RunProgram, state_dir: Path, tmp_path: Path) -> Callable[..., Program]:
    """Starts the process with these sinks."""

    def run(*sinks: dict[str, Any], env: dict[str, str] | None = None) -> Program:
        config = tmp_path / "millrace.yaml"
        spark = {"memory": "600m"}
        config.write_text(yaml.safe_dump({"state": str(state_dir), "sinks": list(sinks), "spark": spark}))
        return run_program("-m", "cdc.service.apply.process", "--config", str(config), env=env)

    return run


def said(state: Path, sink: str) -> dict[str, Any]:
    facts: Any = status.read(state, "apply").get("sinks") or {}
    return dict(facts.get(sink, {}))


def row(key: int, version: int, label: str) -> dict[str, Any]:
    return change("u", f'{{"id":{key}}}', version, f'{{"id":{key},"label":"{label}"}}')


def test_a_dead_store_does_not_stop_the_others_nor_does_a_huge_transaction_and_sigterm_ends_tidily(
    start: Callable[..., Program], filled_log: FilledLog, redis_url: str, state_dir: Path
) -> None:
    filled_log.record(ITEMS)
    filled_log.append([row(1, 10, "one")])
    program = start(
        {"kind": "redis", "url": redis_url},
        {"kind": "opensearch", "url": "http://127.0.0.1:1", "name": "dead"},
    )
    client = redis.Redis.from_url(redis_url)
    wait_until(lambda: client.get("public.items:1"), 180, "the first row")
    filled_log.append([row(1, 20, "two"), row(2, 21, "other")])
    wait_until(lambda: json.loads(client.get("public.items:1") or b"{}").get("label") == "two", 30)
    huge = filled_log.append([row(key, 30, "x" * 50_000) for key in range(3, 6003)])  # 300 MB

    def applied() -> bool:
        assert program.running(), program.said()[-4000:]
        return bool(said(state_dir, "redis").get("changes") == {"public.items": 6003})

    wait_until(applied, 120, "a huge transaction")
    wait_until(lambda: {item.name: item.reached for item in filled_log.reader.consumers()}["redis"] == huge, 30)
    assert said(state_dir, "redis")["state"] == "running"
    assert said(state_dir, "redis")["facts"] == {"eviction policy": "noeviction"}
    assert said(state_dir, "dead")["state"] == "waiting"
    assert "cannot be reached" in said(state_dir, "dead")["error"]
    assert {item.name: item.reached for item in filled_log.reader.consumers()} == {"redis": huge, "dead": 0}
    assert program.terminate() == 0
    assert status.read(state_dir, "apply")["state"] == "stopped"
    assert " WARN " not in program.said(), "Spark tells of itself"


@pytest.mark.parametrize(
    "points",
    [
        ("sink.mid_batch", "sink.after_apply"),
        pytest.param(("sink.before_apply", "sink.mid_batch", "sink.after_apply"), marks=pytest.mark.soak),
    ],
    ids=["written", "all"],
)
def test_a_kill_anywhere_in_a_batch_repeats_it_without_effect(
    start: Callable[..., Program], filled_log: FilledLog, redis_url: str, points: tuple[str, ...]
) -> None:
    """In CI only where something is written already: each point takes a driver of its own."""
    filled_log.record(ITEMS)
    for version, point in enumerate(points, 1):
        end = filled_log.append([row(1, 10 * version, point), row(2, 10 * version + 1, point)])
        victim = start({"kind": "redis", "url": redis_url}, env={"MILLRACE_FAIL": f"{point}:kill"})
        assert victim.wait(180) == -9
    start({"kind": "redis", "url": redis_url})
    wait_until(lambda: [item.reached for item in filled_log.reader.consumers()] == [end], 180)
    client = redis.Redis.from_url(redis_url)
    assert [client.get(f"public.items:{key}") for key in (1, 2)] == [
        b'{"id":1,"label":"sink.after_apply"}',
        b'{"id":2,"label":"sink.after_apply"}',
    ]
