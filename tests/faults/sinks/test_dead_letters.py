"""A row that OpenSearch refuses for ever: only its key waits, and a mended mapping heals it."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cdc.model import Lsn
from cdc.ports import Sink
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.context import SinkContext
from sinks.fold.folded import Folded
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import open_sink
from tests.contract.test_sinks import check
from tests.fix_log import FilledLog
from tests.fix_servers import LocalServer
from tests.scenes.histories import batch, change, table

ITEMS = table()


@pytest.fixture
def opened(opensearch_server: LocalServer, index_prefix: str) -> Callable[..., Sink]:
    def make(fields: dict[str, Any]) -> Sink:
        settings = OpenSearchSettings(
            url=opensearch_server.url, prefix=index_prefix, replicas=0, fields={"public.items": fields}
        )
        return open_sink(settings, SinkContext(Path("unused")))

    return make


def row(key: int, version: int, label: str) -> dict[str, Any]:
    return change("u", f'{{"id":{key}}}', version, f'{{"id":{key},"label":"{label}"}}')


def test_only_the_refused_key_waits_and_a_retry_after_mending_the_mapping_heals_it(
    opened: Callable[..., Sink], filled_log: FilledLog, state_dir: Path
) -> None:
    filled_log.record(ITEMS)
    letters = DeadLetters(state_dir / "letters")

    def applier(fields: dict[str, Any]) -> Applier:
        stop = threading.Event()
        return Applier("search", open_sink=lambda: opened(fields), log=filled_log.reader, letters=letters, stop=stop)

    strict = applier({"label": {"type": "integer"}})
    rows = [row(1, 10, "1"), row(2, 11, "planted-value"), row(3, 12, "3")]
    strict.apply(Folded(Lsn(12), None, [batch(ITEMS, rows)]))
    strict.apply(Folded(Lsn(20), None, [batch(ITEMS, [row(1, 20, "21")])]))
    check(opened({}), {'{"id":1}': '{"id":1,"label":"21"}', '{"id":3}': '{"id":3,"label":"3"}'})
    letter = letters.list()[0]
    assert (letter.key, letter.version, letter.attempts) == ('{"id":2}', 11, 1)
    assert "planted-value" not in letter.reason
    letters.ask_retry()
    assert strict.retry_dead_letters() == 0
    assert letters.list()[0].attempts == 2
    mended = applier({})
    letters.ask_retry(key='{"id":2}')
    mended.retry_dead_letters()
    assert letters.count() == 0
    check(opened({}), {one["key"]: one["after"] for one in (row(1, 20, "21"), *rows[1:])})
