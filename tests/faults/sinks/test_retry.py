"""How long a store in trouble is waited for, and what happens then: as each sink's settings say."""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cdc.config.settings import RetrySettings, SinkSettings
from cdc.errors import GaveUp
from cdc.model import Lsn, TableId, TableSchema
from cdc.service.apply.runner import SinkRunner
from cdc.service.observe.health import reasons
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.apply.status import SinkStatus
from sinks.context import SinkContext
from sinks.fold.folded import Folded
from sinks.redis.settings import RedisSettings
from sinks.redis.sink import RedisSink, open_sink
from tests.contract.test_sinks import check
from tests.fix_log import FilledLog
from tests.fix_proxy import MakeProxy, Proxy
from tests.fix_servers import LocalServer
from tests.scenes.histories import WHEN, batch, change, table

ITEMS = table()


@dataclass
class Scene:
    """A Redis behind a proxy, an applier in front of it."""

    between: Proxy
    prefix: str
    log: FilledLog
    letters: DeadLetters

    def open(self) -> RedisSink:
        url = f"redis://127.0.0.1:{self.between.port}"
        sink = open_sink(RedisSettings(url=url, prefix=self.prefix), SinkContext(Path("unused")))
        assert isinstance(sink, RedisSink)
        return sink

    def applier(self, **retry: Any) -> Applier:
        policy = RetrySettings(**{"first_seconds": 0.01, "longest_seconds": 0.05, **retry})
        stop = threading.Event()
        return Applier("redis", open_sink=self.open, log=self.log.reader, letters=self.letters, stop=stop, retry=policy)

    def reached(self) -> Lsn:
        return next((item.reached for item in self.log.reader.consumers() if item.name == "redis"), Lsn(0))


@pytest.fixture
def scene(
    redis_server: LocalServer, redis_prefix: str, proxy: MakeProxy, filled_log: FilledLog, state_dir: Path
) -> Scene:
    filled_log.record(ITEMS)
    return Scene(proxy(redis_server.port), redis_prefix, filled_log, DeadLetters(state_dir / "letters"))


def row(key: int, version: int, label: str, gone: list[str] | None = None) -> dict[str, Any]:
    big = "" if gone else ',"big":"large"'
    return change("u", f'{{"id":{key}}}', version, f'{{"id":{key},"label":"{label}"{big}}}', gone)


def folded(*rows: dict[str, Any]) -> Folded:
    return Folded(Lsn(max(one["version"] for one in rows)), None, [batch(ITEMS, list(rows))])


def image(key: int, label: str) -> dict[str, str]:
    return {f'{{"id":{key}}}': f'{{"id":{key},"label":"{label}","big":"large"}}'}


def test_by_default_a_store_is_waited_for_however_long_it_takes(scene: Scene) -> None:
    applier = scene.applier()
    scene.between.cut()
    applying = threading.Thread(target=applier.apply, args=(folded(row(1, 10, "one")),))
    applying.start()
    deadline = time.monotonic() + 30
    while applier.status.state != "waiting" and time.monotonic() < deadline:
        applying.join(0.01)
    applying.join(0.5)  # dozens of attempts
    assert applying.is_alive()
    scene.between.pass_on()
    applying.join(30)
    assert applier.status.state == "running"
    check(scene.open(), image(1, "one"))


def test_a_sink_that_shall_stop_stops_after_its_attempts_and_keeps_its_position(scene: Scene) -> None:
    applier = scene.applier(attempts=3, then="stop")
    applier.apply(folded(row(1, 10, "one")))
    scene.between.cut()
    with pytest.raises(GaveUp, match="tried 3 times"):
        applier.apply(folded(row(1, 20, "two")))
    assert applier.status.state == "stopped"
    assert scene.reached() == 10
    assert scene.letters.count() == 0
    scene.between.pass_on()
    applier.apply(folded(row(1, 20, "two")))
    assert (applier.status.state, scene.reached()) == ("running", 20)
    check(scene.open(), image(1, "two"))


class Looks:
    """A look at the store that is always due."""

    lost: frozenset[TableId] = frozenset()

    def compare_marks(self, sink: object) -> frozenset[TableId]:
        assert isinstance(sink, RedisSink)
        sink.prepare(ITEMS)
        return self.lost

    def connected(self) -> None: ...

    def prepared(self, sink: object, schemas: Sequence[TableSchema]) -> None: ...

    def record_position(self, sink: object, reached: Lsn) -> None: ...

    def recreated(self, sink: object, schema: TableSchema) -> None: ...


def test_a_look_at_a_store_that_is_down_keeps_no_batch_from_its_policy_and_an_idle_sink_comes_back(
    scene: Scene,
) -> None:
    applier = scene.applier(attempts=3, then="stop")
    applier.apply(folded(row(1, 10, "one")))
    applier._store.recorder = Looks()
    scene.between.cut()
    looking = threading.Thread(target=applier.check_losses, daemon=True)
    looking.start()
    looking.join(30)
    assert not looking.is_alive()
    assert applier.status.state == "waiting"
    scene.between.pass_on()
    applier.check_losses()
    assert applier.status.state == "running"
    scene.between.cut()
    applier.check_losses()
    with pytest.raises(GaveUp, match="tried 3 times"):
        applier.apply(folded(row(1, 20, "two")))
    applier.check_losses()
    assert applier.status.state == "stopped"


def test_a_sink_that_shall_park_goes_on_and_a_retry_brings_what_it_parked(scene: Scene) -> None:
    applier = scene.applier(attempts=2, then="park")
    applier.apply(folded(row(1, 10, "one"), row(2, 10, "two")))
    scene.between.cut()
    applier.apply(folded(row(1, 20, "newer"), row(2, 20, "newer", ["big"])))
    assert scene.reached() == 20
    assert [(letter.key, letter.version, letter.attempts) for letter in scene.letters.list()] == [
        ('{"id":1}', 20, 1),
        ('{"id":2}', 20, 1),
    ]
    assert {letter.reason for letter in scene.letters.list()} == {
        "given up: sink 'redis': Redis cannot be reached (ConnectionError)."
    }
    scene.letters.ask_retry()
    applier.retry_dead_letters()
    assert {letter.attempts for letter in scene.letters.list()} == {2}
    scene.between.pass_on()
    applier.apply(folded(row(1, 30, "newest")))
    assert [letter.key for letter in scene.letters.list()] == ['{"id":2}']
    scene.letters.ask_retry()
    applier.retry_dead_letters()
    assert scene.letters.count() == 0
    check(scene.open(), image(1, "newest") | image(2, "newer"))


def test_a_truncate_is_never_parked(scene: Scene) -> None:
    applier = scene.applier(attempts=1, then="park")
    applier.apply(folded(row(1, 10, "one")))
    scene.between.cut()
    cut = Folded(Lsn(20), None, [batch(ITEMS, [change("t", None, 20), row(2, 21, "two")])])
    applying = threading.Thread(target=applier.apply, args=(cut,))
    applying.start()
    applying.join(0.3)
    assert applying.is_alive()
    scene.between.pass_on()
    applying.join(30)
    assert scene.letters.count() == 0
    check(scene.open(), image(2, "two"))


@dataclass
class EndedQuery:
    """A query that ends as soon as it is looked at."""

    starts: int = 0
    settings: SinkSettings = field(default_factory=lambda: SinkSettings(kind="memory", name="one"))
    applier: Any = None

    def start(self, spark: object) -> None:
        self.starts += 1

    def failure(self) -> str:
        return "ended"


@dataclass
class Shown:
    status: SinkStatus = field(default_factory=SinkStatus)


@pytest.mark.parametrize(("state", "again"), [("stopped", False), ("waiting", True)])
def test_only_a_stopped_sink_is_not_started_again_by_itself(state: str, again: bool) -> None:
    query = EndedQuery(applier=Shown(SinkStatus(state=state, error="gave up")))
    runner = SinkRunner(query)  # type: ignore[arg-type]
    runner.start(None)  # type: ignore[arg-type]
    runner.tend(None)  # type: ignore[arg-type]
    assert (runner.restart_at is not None and runner.restart_at < math.inf) == again
    assert query.applier.status.state == ("failed" if again else "stopped")


def test_health_names_the_way_to_go_on() -> None:
    facts = {"state": "running", "at": WHEN.isoformat()}
    apply = {**facts, "sinks": {"redis": {"state": "stopped", "error": "Redis cannot be reached."}}}
    found = reasons({**facts, "state": "streaming"}, apply, ("redis",), WHEN)
    assert [(item.part, "millrace resume redis" in item.remedy) for item in found] == [("sink redis", True)]
