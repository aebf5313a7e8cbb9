"""Topics of a real Debezium connector, read as a log of ours."""

import json
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc.config.settings import Settings
from cdc.errors import ConfigError
from cdc.log.debezium.log import DebeziumReader, DebeziumSettings
from cdc.log.registry import open_reader, open_writer
from cdc.model import PROGRESS_TABLE, Lsn, TableId
from tests.fix_processes import wait_until
from tests.fix_servers import Database, LocalServer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.kafka
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))

SETUP = (
    "create table items (id int primary key, name text, price numeric(12,4), doc jsonb, at timestamptz, raw bytea)",
    "create table large (id int primary key, n int, t text, b bytea, a text[])",
    "alter table large alter t set storage external, alter b set storage external, alter a set storage external",
    "create table loose (n int, t text)",
    "alter table loose replica identity full",
    "insert into items values (1, 'one', 1.50, '{\"a\": 1.10}', '2024-02-29 12:00:00+00', '\\x00ff')",
)


def rest(server: LocalServer, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"}, method=method)
    with _OPENER.open(request, timeout=60) as answer:
        text = answer.read()
    return json.loads(text) if text else None


def connector(database: Database, prefix: str, more: Mapping[str, str]) -> dict[str, str]:
    return {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "plugin.name": "pgoutput",
        "topic.prefix": prefix,
        "slot.name": prefix,
        "publication.name": prefix,
        "publication.autocreate.mode": "filtered",
        "schema.include.list": "public",
        "skipped.operations": "none",
        "database.hostname": database.server.host,
        "database.port": str(database.server.port),
        "database.user": "postgres",
        "database.password": database.server.password,
        "database.dbname": database.name,
        "decimal.handling.mode": "string",
        "time.precision.mode": "isostring",
        "poll.interval.ms": "50",
        "topic.creation.default.replication.factor": "1",
        "topic.creation.default.partitions": "2",
        **more,
    }


@pytest.fixture
def captured(
    connect_server: LocalServer, kafka_server: LocalServer, database: Database, topic_prefix: str
) -> Iterator[DebeziumSettings]:
    """A connector that streams a database of the test's own."""
    database.execute(*SETUP)
    with_schemas = {
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter.schemas.enable": "true",
    }
    config = connector(database, topic_prefix, with_schemas)
    rest(connect_server, "POST", "/connectors", {"name": topic_prefix, "config": config})

    def streaming() -> bool:
        with database.connect() as connection:
            asked = "select 1 from pg_replication_slots where slot_name = %s and active"
            return connection.execute(asked, (topic_prefix,)).fetchone() is not None

    wait_until(streaming, 90, "the connector streams")
    yield DebeziumSettings(bootstrap=kafka_server.url, prefix=topic_prefix)
    rest(connect_server, "DELETE", f"/connectors/{topic_prefix}")


def changes(reader: DebeziumReader) -> list[dict[str, Any]]:
    return [row for part in reader.read(reader.start()) for row in part.rows.to_pylist()]


STATEMENTS = (
    "update items set name = 'uno', price = 2.25 where id = 1",
    "insert into items (id, name) values (2, 'zwei')",
    "update items set id = 3 where id = 2",
    "delete from items where id = 3",
    "insert into large select 1, 1, string_agg(md5(g::text), ''),"
    " decode(string_agg(repeat(md5(g::text), 3), ''), 'hex'), array_agg(md5(g::text)) from generate_series(1, 100) g",
    "update large set n = 2",
    "insert into loose values (1, 'x')",
    "update loose set t = 'y'",
    "delete from loose",
    "truncate loose",
    "insert into items (id) values (99)",
)
CHANGES = 7 + 2 + 5  # of items, of large, of loose: an update of a key is two


def test_its_changes_are_changes_of_ours(
    captured: DebeziumSettings, database: Database, spark: "SparkSession", tmp_path: Path
) -> None:
    database.execute(*STATEMENTS)
    reader = DebeziumReader(captured)
    # topics and partitions do not wait for each other: the last statement may arrive before others
    wait_until(lambda: len(changes(reader)) >= CHANGES, 90, "all changes")
    rows = changes(reader)
    _items(rows)
    _large([row for row in rows if row["table"] == "public.large"])
    _loose([row for row in rows if row["table"] == "public.loose"])
    _schemas(reader, rows, DebeziumReader(captured))
    _seek(reader, rows)
    _stream(reader, spark, tmp_path, rows)


def _items(rows: list[dict[str, Any]]) -> None:
    items = [row for row in rows if row["table"] == "public.items"]
    assert sorted(row["op"] for row in items) == sorted("rucdcdc")
    of_one = [row for row in items if row["key"] == '{"id":1}']
    assert [row["op"] for row in of_one] == ["r", "u"]
    assert of_one[0]["version"] == 0 < of_one[1]["version"]
    after = json.loads(of_one[1]["after"])
    assert (after["name"], after["price"], after["at"], after["raw"]) == (
        "uno", "2.2500", "2024-02-29T12:00:00.000000Z", "AP8=",
    )  # fmt: skip
    moved = [row for row in items if row["key"] in ('{"id":2}', '{"id":3}')]
    assert sorted((row["key"], row["op"]) for row in moved) == [
        ('{"id":2}', "c"), ('{"id":2}', "d"), ('{"id":3}', "c"), ('{"id":3}', "d"),
    ]  # fmt: skip
    assert all(row["before"] is None for row in items)
    for key in {row["key"] for row in items}:
        versions = [row["version"] for row in items if row["key"] == key]
        assert versions == sorted(set(versions))


def _large(rows: list[dict[str, Any]]) -> None:
    assert [row["op"] for row in rows] == ["c", "u"]
    assert rows[1]["after"] == '{"id":1,"n":2}'
    assert rows[1]["unchanged"] == ["t", "b", "a"]
    assert rows[0]["schema_id"] == rows[1]["schema_id"]


def _loose(rows: list[dict[str, Any]]) -> None:
    assert [(row["op"], row["key"]) for row in rows] == [
        ("c", '{"n":1,"t":"x"}'),
        ("d", '{"n":1,"t":"x"}'),
        ("c", '{"n":1,"t":"y"}'),
        ("d", '{"n":1,"t":"y"}'),
        ("t", None),
    ]


def _schemas(reader: DebeziumReader, rows: list[dict[str, Any]], other: DebeziumReader) -> None:
    schema_id = next(row["schema_id"] for row in rows if row["table"] == "public.items")
    schema = reader.schemas.get(TableId("public", "items"), schema_id)
    assert [(column.name, column.type.name) for column in schema.columns] == [
        ("id", "int4"), ("name", "text"), ("price", "text"), ("doc", "text"), ("at", "timestamptz"), ("raw", "bytea"),
    ]  # fmt: skip
    assert [column.name for column in schema.key] == ["id"]
    assert other.schemas.get(TableId("public", "items"), schema_id) == schema
    assert schema in other.schemas.newest()


def _seek(reader: DebeziumReader, rows: list[dict[str, Any]]) -> None:
    """A transaction that begins after the point is found; of those that ended before it hardly any."""
    for point in sorted({row["commit_lsn"] for row in rows}):
        found = [row for part in reader.read(reader.seek(Lsn(point))) for row in part.rows.to_pylist()]
        places = {(row["table"], row["ordinal"], row["op"]) for row in found}
        for row in rows:
            if row["commit_lsn"] >= point:
                assert (row["table"], row["ordinal"], row["op"]) in places
    last = reader.head()[1]
    assert len([row for part in reader.read(reader.seek(last)) for row in part.rows.to_pylist()]) < len(rows) / 2


def _stream(reader: DebeziumReader, spark: "SparkSession", folder: Path, rows: list[dict[str, Any]]) -> None:
    seen: list[dict[str, Any]] = []

    def keep(batch: "DataFrame", _number: int) -> None:
        seen.extend(batch.toArrow().to_pylist())

    stream = reader.frame(spark).writeStream.option("checkpointLocation", str(folder / "checkpoint"))
    stream.foreachBatch(keep).trigger(availableNow=True).start().awaitTermination()
    by_place = lambda row: (row["table"], row["ordinal"], row["op"], str(row["key"]))  # noqa: E731
    found = [row for row in seen if row["table"] != PROGRESS_TABLE]
    assert sorted(found, key=by_place) == sorted(rows, key=by_place)
    assert max(row["version"] for row in seen if row["table"] == PROGRESS_TABLE) == reader.head()[1]


def test_nobody_but_the_connector_writes(kafka_server: LocalServer, state_dir: Path, topic_prefix: str) -> None:
    log = DebeziumSettings(bootstrap=kafka_server.url, prefix=topic_prefix)
    pipeline = Settings(state=state_dir, log=log)
    with pytest.raises(ConfigError, match="written by its connector"):
        open_writer(pipeline)
    reader = open_reader(pipeline)
    assert reader.head()[1] == 0
    assert list(reader.read(reader.start())) == []
