"""The Kafka log as a Spark stream: whole transactions a batch, and errors instead of holes."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from cdc.config.secret import Secret
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaSettings
from cdc.model import PROGRESS_TABLE
from cdc.ports import Offset
from tests.fix_servers import LocalServer
from tests.scenes.kafka_rows import batch, change, entry, writer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.kafka, pytest.mark.spark]


@pytest.fixture
def settings(kafka_server: LocalServer, topic_prefix: str) -> KafkaSettings:
    return KafkaSettings(bootstrap=kafka_server.url, prefix=topic_prefix)


def drain(
    spark: "SparkSession", reader: KafkaReader, checkpoint: Path, after: Offset | None = None
) -> list[list[dict[str, object]]]:
    """Everything that is there now, as the rows of each micro-batch."""
    batches: list[list[dict[str, object]]] = []

    def keep(rows: "DataFrame", _number: int) -> None:
        batches.append(rows.toArrow().to_pylist())

    stream = reader.frame(spark, after).writeStream.option("checkpointLocation", str(checkpoint))
    query = stream.foreachBatch(keep).trigger(availableNow=True).start()
    query.awaitTermination()
    return [rows for rows in batches if rows]


def test_a_stream_has_every_row_and_ends_each_batch_with_a_marker(
    spark: "SparkSession", settings: KafkaSettings, tmp_path: Path
) -> None:
    log = writer(settings, tmp_path)
    rows = [change(number, 10, table=f"public.t{number % 2}", note="1.50") for number in range(40)]
    log.append(entry(10, *rows))
    log.append(entry(20, change(1, 20, "d"), change(2, 20)))
    reader = KafkaReader(settings)
    (first,) = drain(spark, reader, tmp_path / "checkpoint")
    markers = [row for row in first if row["table"] == PROGRESS_TABLE]
    assert [(row["op"], row["version"]) for row in markers] == [("m", 20)]
    changes = [row for row in first if row["table"] != PROGRESS_TABLE]
    expected = [row for part in reader.read(reader.start()) for row in part.rows.to_pylist()]
    assert sorted(changes, key=lambda row: (row["commit_lsn"], row["ordinal"])) == expected
    log.append(entry(30))  # an idle heartbeat moves readers too
    log.append(batch(40, 3))
    (second,) = drain(spark, reader, tmp_path / "checkpoint")
    assert [row["version"] for row in second] == [40, 40, 40, 40]
    assert drain(spark, reader, tmp_path / "checkpoint") == []
    (third,) = drain(spark, reader, tmp_path / "other", after=reader.seek(30))  # type: ignore[arg-type]
    assert len(third) == 4


def test_what_retention_removed_unread_stops_the_stream(
    spark: "SparkSession", settings: KafkaSettings, tmp_path: Path
) -> None:
    log = writer(settings, tmp_path)
    log.append(batch(10, 9))
    reader = KafkaReader(settings)
    drain(spark, reader, tmp_path / "checkpoint")
    log.append(batch(20, 9))
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    log.append(batch(30, 9))
    topic = f"{settings.prefix}.public.orders"
    for future in admin.delete_records([TopicPartition(topic, part, -1) for part in range(3)]).values():
        future.result()
    with pytest.raises(Exception, match="Retention removed offsets") as caught:
        drain(spark, reader, tmp_path / "checkpoint")
    assert "millrace resync" in str(caught.value)


def test_passwords_are_in_no_plan_progress_or_checkpoint(
    spark: "SparkSession", settings: KafkaSettings, tmp_path: Path
) -> None:
    planted = {"password": Secret("planted-own-61f0"), "key_password": Secret("planted-key-61f0")}
    guarded = settings.model_copy(update=planted)
    writer(guarded, tmp_path).append(batch(10, 3))
    frame = KafkaReader(guarded).frame(spark)
    stream = frame.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
    query = stream.foreachBatch(lambda _rows, _number: None).trigger(availableNow=True).start()
    query.awaitTermination()
    plans = [frame._jdf.queryExecution().toString(), query._jsq.explainInternal(True)]
    progress = [str(each) for each in query.recentProgress]
    conf = [f"{name}={value}" for name, value in spark.sparkContext.getConf().getAll()]
    files = [path.read_bytes().decode("latin-1") for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()]
    assert len(progress) > 0 < len(files)
    assert not [each for each in (*plans, *progress, *conf, *files) if "61f0" in each]


def test_a_topic_made_again_stops_the_stream(spark: "SparkSession", settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    log.append(batch(10, 9))
    reader = KafkaReader(settings)
    drain(spark, reader, tmp_path / "checkpoint")
    log.append(batch(20, 9))
    topic = f"{settings.prefix}.public.orders"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    for future in admin.delete_topics([topic]).values():
        future.result()
    with pytest.raises(Exception, match=f"Topic {topic} is missing"):
        drain(spark, reader, tmp_path / "checkpoint")
    log._topics._cluster.admin.create(topic, 3, -1, {})
    with pytest.raises(Exception, match="was deleted and created again"):
        drain(spark, reader, tmp_path / "checkpoint")
