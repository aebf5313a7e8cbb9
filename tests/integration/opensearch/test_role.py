"""deploy/opensearch/role.json allows every action of the sink, on its own indexes only.

The local distribution has no security plugin. So the test reads the server's log of tasks, which names every action,
and the role must allow each of them.
"""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

from cdc.key_range import KeyRange, Level
from cdc.model import Column, Lsn, TableSchema
from sinks.context import SinkContext
from sinks.opensearch.settings import OpenSearchSettings
from sinks.opensearch.sink import OpenSearchSink, open_sink
from tests.fix_servers import LocalServer, opensearch_request
from tests.scenes.histories import INT4, batch, change, table

ROLE = json.loads((Path(__file__).parents[3] / "deploy" / "opensearch" / "role.json").read_text(encoding="utf-8"))
ITEMS = table()
GROUPS = {
    "crud": ["indices:data/read*", "indices:data/write*", "indices:admin/mapping/put"],
    "create_index": ["indices:admin/create", "indices:admin/mapping/put"],
    "manage_aliases": ["indices:admin/aliases*"],
    "cluster_composite_ops": [
        "indices:data/write/bulk",
        "indices:admin/aliases*",
        "indices:data/write/reindex",
        "indices:data/read/mget",
        "indices:data/read/scroll",
    ],
}
"""The security plugin's groups, as far as the role uses them."""
_TASK = re.compile(r"register \d+ \[transport\] \[([^\]]+)\]")


@pytest.fixture
def traced(opensearch_server: LocalServer) -> Iterator[LocalServer]:
    """The server logs every task."""
    logger = "logger.org.opensearch.tasks.TaskManager"
    opensearch_request(opensearch_server, "PUT", "/_cluster/settings", {"persistent": {logger: "TRACE"}})
    yield opensearch_server
    opensearch_request(opensearch_server, "PUT", "/_cluster/settings", {"persistent": {logger: None}})


def exercise(server: LocalServer, prefix: str) -> None:
    """Every kind of request that the sink sends."""
    settings: dict[str, Any] = {"url": server.url, "prefix": prefix, "replicas": 0, "shards": 2}
    sink = open_sink(OpenSearchSettings(**settings, routing={"public.items": "label"}), SinkContext(Path("unused")))
    assert isinstance(sink, OpenSearchSink)
    sink.prepare(ITEMS)
    sink.apply(batch(ITEMS, [row(1, 10, "a"), row(2, 10, "b"), row(3, 10, "c")]))
    sink.apply(batch(ITEMS, [row(1, 11, "d"), change("d", '{"id":2}', 11)]))
    removed = KeyRange((Level(("id",), ("number",), ("3",), ("4",)),)).text()
    sink.apply(batch(ITEMS, [change("p", removed, 12)]))
    sink.apply(batch(ITEMS, [change("u", '{"id":1}', 12, '{"id":1,"label":"e"}', ["amount"])]))
    sink.compare_marks({ITEMS.table: sink.mark_table(ITEMS)}, Lsn(0))
    sink.recreate(ITEMS)
    sink.prepare(ITEMS)
    sink.stored(ITEMS)
    sink.apply(batch(ITEMS, [change("t", None, 20), row(4, 21, "f")]))
    columns = tuple(Column("amount", INT4) if column.name == "amount" else column for column in ITEMS.columns)
    sink.prepare(TableSchema(ITEMS.table, columns, id=2))
    sink.purge(ITEMS, datetime.now(UTC))
    sink.facts()


def row(key: int, version: int, label: str) -> dict[str, Any]:
    return change("u", f'{{"id":{key}}}', version, f'{{"id":{key},"label":"{label}","amount":1}}')


def allowed(action: str, permissions: list[str]) -> bool:
    patterns = [pattern for name in permissions for pattern in GROUPS.get(name, [name])]
    return any(fnmatchcase(action, pattern) for pattern in patterns)


def test_the_role_allows_every_action_of_the_sink(traced: LocalServer, index_prefix: str) -> None:
    start = traced.log.stat().st_size
    exercise(traced, index_prefix)
    with traced.log.open(encoding="utf-8") as log:
        log.seek(start)
        asked = set(_TASK.findall(log.read()))
    assert {"indices:data/write/bulk", "indices:admin/create", "indices:data/write/reindex"} <= asked
    (indices,) = ROLE["index_permissions"]
    own = ROLE["cluster_permissions"] + indices["allowed_actions"]
    internal = re.compile(r"\[|internal:|cluster:(admin/settings|monitor/nodes)|indices:admin/seq_no/|retention_lease_")
    assert {action for action in asked if not internal.match(action) and not allowed(action, own)} == set()


def test_the_role_allows_nothing_on_other_indexes() -> None:
    assert set(ROLE) == {"cluster_permissions", "index_permissions"}
    (indices,) = ROLE["index_permissions"]
    assert set(indices) == {"index_patterns", "allowed_actions"}
    assert indices["index_patterns"] == ["millrace-*"]
    every = ROLE["cluster_permissions"] + indices["allowed_actions"]
    assert not {"*", "all_access", "cluster_all", "indices_all", "unlimited", "manage"} & set(every)
    for action in ("cluster:admin/settings/update", "indices:admin/close", "cluster:admin/snapshot/delete"):
        assert not allowed(action, every)
