"""`verify` of real stores: whatever is wrong in one of them is found, in tables of several ranges and kinds of keys."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from urllib.parse import quote

import orjson
import pyarrow as pa
import pytest
import redis

from cdc.capture.source.connect import connect
from cdc.config.settings import SourceSettings, TableSettings
from cdc.model import TableId, TableSchema
from cdc.ports import Batch, Sink
from sinks.fold.spark import FOLDED
from sinks.opensearch.mapping import document_id, index_name
from sinks.redis.keys import Names
from snapshots.tables import copy
from snapshots.tables.rows import describe, masking_of, read_images
from snapshots.verify.comparison import Differences, verify_table, whole_table
from tests.contract.sinks import BENCHES
from tests.fix_servers import Database, opensearch_request
from tests.scenes.snapshot import MakeSettings, pipeline

ITEMS = "create table items (id int primary key, label text, amount numeric, doc jsonb, good bool, ratio float8)"
FILL = (
    "insert into items select g, 'l' || g || chr(10) || '\"', g / 7.0, jsonb_build_object('g', array[g]), g % 2 = 0,"
    " 1.0 / g from generate_series(1, 1200) g"
)
PARTS = (
    "create table items (id int, part text, label text, primary key (id, part)) partition by list (part)",
    "create table items_a partition of items for values in ('a:1', 'b')",
    "create table items_c partition of items for values in ('c%')",
    "insert into items select g, (array['a:1', 'b', 'c%'])[g % 3 + 1], 'l' || g from generate_series(1, 1200) g",
)
TABLE = TableId("public", "items")
KINDS = ["delta", "redis", "redis-hash", "opensearch", "opensearch-routed"]


@dataclass(frozen=True, slots=True)
class Scene:
    """A table of the source and a store that was filled from it."""

    source: SourceSettings
    sink: Sink
    schema: TableSchema
    rows: dict[str, str]

    def verified(self) -> Differences:
        return verify_table(self.source, TableSettings(name=TABLE), self.sink)

    def put(self, version: int, rows: dict[str, str | None]) -> None:
        """Write rows into the store, None for a deleted one."""
        when = datetime(2026, 1, 1, tzinfo=UTC)
        changes = [
            {"table": str(TABLE), "key": key, "op": "d" if after is None else "u", "after": after, "unchanged": None,
             "version": version, "commit_lsn": version, "commit_ts": when, "schema_id": self.schema.id}
            for key, after in rows.items()
        ]  # fmt: skip
        self.sink.apply(Batch(self.schema, pa.Table.from_pylist(changes, schema=FOLDED)))

    def key(self, place: int) -> str:
        """One of the keys that the source has."""
        return list(self.rows)[place]

    def with_values_of(self, key: str, other: str) -> str:
        """The row of a key with another row's values."""
        mine, others = (orjson.loads(self.rows[one]) for one in (key, other))
        names = {column.name for column in self.schema.key}
        return orjson.dumps({name: (mine if name in names else others)[name] for name in mine}).decode()


def filled(source: SourceSettings, sink: Sink) -> Scene:
    with connect(source, "test") as connection:
        readable = describe(connection, TableSettings(name=TABLE), masking_of(source))
        blocks = [block.to_pylist() for block in read_images(connection, readable, whole_table(readable))]
    rows = {str(row["key"]): str(row["after"]) for row in chain.from_iterable(blocks)}
    scene = Scene(source, sink, readable.layout.schema, rows)
    sink.prepare(scene.schema)
    scene.put(100, dict(rows))
    return scene


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[(ITEMS, FILL), PARTS], ids=["plain", "partitioned"])
def scene(
    request: pytest.FixtureRequest, kind: str, database: Database, settings_of: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Scene]:  # fmt: skip
    monkeypatch.setattr(copy, "BLOCK_ROWS", 250)
    monkeypatch.setattr(copy, "_PART_BYTES", 4096)
    database.execute(*request.param)
    sink = BENCHES[kind](request).open()
    yield filled(pipeline(settings_of, database, str(TABLE)).source, sink)
    sink.close()


def test_changed_missing_extra_and_swapped_rows_are_found_in_any_range(scene: Scene) -> None:
    found = scene.verified()
    assert (found.equal, found.rows, found.undecided) == (True, 1200, 0)
    changed, gone, first, second = (scene.key(place) for place in (3, 300, 600, 1100))
    unknown = changed.replace('"id":', '"id":9000')
    scene.put(
        200,
        {
            changed: scene.rows[changed].replace('"label":"l', '"label":"wrong'),
            gone: None,
            unknown: scene.rows[changed].replace(changed[1:-1], unknown[1:-1]),
            first: scene.with_values_of(first, second),
            second: scene.with_values_of(second, first),
        },
    )
    found = scene.verified()
    assert (found.missing, found.extra, found.different, found.undecided) == (1, 1, 3, 0)
    assert "wrong" not in str(found.facts())


@pytest.mark.parametrize("kind", ["redis"], indirect=True)
def test_values_that_changed_places_in_redis_are_found(scene: Scene, request: pytest.FixtureRequest) -> None:
    """Each value alone looks right: it is the row of some key."""
    client = redis.Redis.from_url(request.getfixturevalue("redis_server").url)
    names = Names.of(scene.schema, scene.sink._settings.prefix, "{schema}.{table}:{key}")  # type: ignore[attr-defined]
    one, other = (names.row(scene.key(place)) for place in (10, 20))
    client.mset({one: client.get(other) or b"", other: client.get(one) or b""})
    client.set(names.row(scene.key(30)), b"\xff no JSON at all")
    client.delete(names.row(scene.key(40)))
    client.lpush(names.row(scene.key(40)), "a list")
    found = scene.verified()
    assert (found.missing, found.extra, found.different) == (1, 0, 3)


@pytest.mark.parametrize("kind", ["opensearch"], indirect=True)
def test_documents_that_others_wrote_are_found_in_opensearch(scene: Scene, request: pytest.FixtureRequest) -> None:
    """Under the id of a row, without our mark, or with text inside that looks like the answer of a search."""
    server, prefix = request.getfixturevalue("opensearch_server"), request.getfixturevalue("index_prefix")
    index = f"{index_name(prefix, TABLE)}-000001"
    hit = {"_index": index, "_id": "1", "_score": None, "_source": {"id": 1, "millrace": {"version": 1}}, "sort": [0]}
    other = document_id(scene.key(20))
    swapped = {**orjson.loads(scene.rows[scene.key(10)]), "millrace": {"version": 100}}
    for identity, body in ((other, swapped), ("foreign", {"id": 1, "doc": hit})):
        opensearch_request(server, "PUT", f"/{index}/_doc/{quote(identity, safe='')}?refresh=true", body)
    result = scene.verified()
    assert (result.missing, result.extra, result.different) == (0, 1, 1)
    assert result.examples == {"extra": ("foreign",), "different": (other,)}
