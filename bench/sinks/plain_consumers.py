"""Consumers of the same topics as people usually write them, for comparison.

    python -m bench.sinks.plain_consumers redis|opensearch|delta --settings JSON

`redis` and `opensearch` apply one change at a time, like a Kafka Connect sink without batching: parse the envelope,
write or delete the row, commit offsets every 500 changes. `delta` is the textbook solution: Spark's Kafka source,
`from_json`, the newest change of each key by a window, and MERGE in foreachBatch. Prints one line of JSON. None of them
prevents an older change from overwriting a newer row when changes are repeated.
"""

import argparse
import http.client
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import redis
from confluent_kafka import Consumer, TopicPartition

from bench.cpu_meter import tree_cpu

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COMMIT_EVERY = 500
_WARM = 500
"""First changes that are not counted: they include connecting and first query plans."""
_ROW = (
    "id bigint, qty int, amount decimal(12,2), note string, updated_at timestamp, attrs string, active boolean,"
    " ref string, due date, score double"
)
Write = Callable[[str, str | None], None]


def one_at_a_time(settings: Mapping[str, Any], write: Write) -> dict[str, float]:
    """Consume so many changes from an offset, not counting tombstones."""
    consumer = Consumer(
        {"bootstrap.servers": settings["bootstrap"], "group.id": f"peer-{os.getpid()}", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(settings["topic"], 0, settings["offset"])])
    done, begun, cpu = 0, 0.0, 0.0
    while done < settings["changes"]:
        message = consumer.poll(30)
        if message is None:
            raise RuntimeError(f"the topic ended after {done} changes")
        key, value = message.key(), message.value()
        if message.error() is not None or value is None or key is None:
            continue
        change = json.loads(value)
        identity = str(json.loads(key)["id"])
        write(identity, None if change["op"] == "d" else json.dumps(change["after"]))
        done += 1
        if done % _COMMIT_EVERY == 0:
            consumer.commit(asynchronous=False)
        if done == _WARM:
            begun, cpu = time.monotonic(), time.process_time()
    seconds = time.monotonic() - begun
    consumer.close()
    return {
        "changes_per_s": (done - _WARM) / seconds,
        "cpu_us_per_change": (time.process_time() - cpu) / (done - _WARM) * 1e6,
    }


def into_redis(settings: Mapping[str, Any]) -> dict[str, float]:
    """SET and DEL."""
    client = redis.Redis.from_url(settings["url"])

    def write(key: str, row: str | None) -> None:
        name = f"peer:{key}"
        client.delete(name) if row is None else client.set(name, row)

    return one_at_a_time(settings, write)


def into_opensearch(settings: Mapping[str, Any]) -> dict[str, float]:
    """PUT and DELETE of a document over one kept connection."""
    connection = http.client.HTTPConnection(settings["url"].removeprefix("http://"), timeout=60)

    def write(key: str, row: str | None) -> None:
        method = "DELETE" if row is None else "PUT"
        connection.request(method, f"/peer/_doc/{key}", row, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        answer.read()
        if answer.status >= 400 and (answer.status != 404 or row is not None):
            raise RuntimeError(f"OpenSearch answered {answer.status}")

    return one_at_a_time(settings, write)


def into_delta(settings: Mapping[str, Any]) -> dict[str, float]:
    """MERGE in foreachBatch. The existing rows are loaded from the beginning of the topic and not measured."""
    from cdc.artifacts.jars import spark_jars
    from sinks.spark.session import spark_session

    with tempfile.TemporaryDirectory(dir=settings["folder"]) as folder:
        conf = {"spark.driver.memory": "2g", "spark.sql.files.maxPartitionBytes": "64m"}
        spark = spark_session("textbook", spark_jars(), conf, Path(folder))
        table = f"{folder}/table"
        newest(envelopes(spark, settings, "earliest", settings["offset"])).where("op <> 'd'").selectExpr(
            "row.*"
        ).write.format("delta").save(table)
        found = merged(spark, settings, table, folder)
        spark.stop()
    return found


def merged(spark: "SparkSession", settings: Mapping[str, Any], table: str, folder: str) -> dict[str, float]:
    """Stream from the offset to the end; timed from the end of the first batch."""
    from delta.tables import DeltaTable

    target = DeltaTable.forPath(spark, table)
    marks: list[tuple[float, float, int]] = []

    def merge(batch: "DataFrame", _number: int) -> None:
        changes = newest(batch.selectExpr(*_PARSED).where("op is not null"))
        (
            target.alias("t")
            .merge(changes.selectExpr("id", "op", "row").alias("s"), "t.id = s.id")
            .whenMatchedDelete("s.op = 'd'")
            .whenMatchedUpdate(set={name: f"s.row.{name}" for name in target.toDF().columns})
            .whenNotMatchedInsert("s.op <> 'd'", {name: f"s.row.{name}" for name in target.toDF().columns})
            .execute()
        )
        marks.append((time.monotonic(), tree_cpu(os.getpid()), batch.where("value is not null").count()))

    stream = spark.readStream.format("kafka").options(**_kafka(settings)).option("maxOffsetsPerTrigger", 50_000)
    stream = stream.option("startingOffsets", json.dumps({settings["topic"]: {"0": settings["offset"]}}))
    query = stream.load().writeStream.foreachBatch(merge).option("checkpointLocation", f"{folder}/checkpoint")
    query.trigger(availableNow=True).start().awaitTermination()
    changes = sum(count for _, _, count in marks[1:])
    seconds, cpu = marks[-1][0] - marks[0][0], marks[-1][1] - marks[0][1]
    return {"changes_per_s": changes / seconds, "cpu_us_per_change": cpu / changes * 1e6}


_PARSED = (
    "offset",
    "from_json(cast(key as string), 'id bigint').id as id",
    "get_json_object(cast(value as string), '$.op') as op",
    f"from_json(get_json_object(cast(value as string), '$.after'), '{_ROW}') as row",
)


def envelopes(spark: "SparkSession", settings: Mapping[str, Any], start: str, end: int) -> "DataFrame":
    """Changes of the topic up to an offset."""
    reader = spark.read.format("kafka").options(**_kafka(settings)).option("startingOffsets", start)
    reader = reader.option("endingOffsets", json.dumps({settings["topic"]: {"0": end}}))
    return reader.load().selectExpr(*_PARSED).where("op is not null")


def newest(changes: "DataFrame") -> "DataFrame":
    """Of each key the last change in the topic."""
    ranked = changes.selectExpr("*", "row_number() over (partition by id order by offset desc) as place")
    return ranked.where("place = 1")


def _kafka(settings: Mapping[str, Any]) -> dict[str, str]:
    return {"kafka.bootstrap.servers": settings["bootstrap"], "subscribe": settings["topic"]}


PEERS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, float]]] = {
    "redis": into_redis,
    "opensearch": into_opensearch,
    "delta": into_delta,
}


def main() -> None:
    """One peer in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=tuple(PEERS))
    parser.add_argument("--settings", type=json.loads, required=True)
    given = parser.parse_args()
    print(json.dumps(PEERS[given.peer](given.settings)))


if __name__ == "__main__":
    main()
