"""Each change of a table in Postgres is one row of a stream, whatever log is between, over restarts of the query."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from cdc.config.secret import Secret
from cdc.config.settings import LogSettings
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.segments.log import SegmentSettings
from tests.fix_processes import RunProgram
from tests.fix_servers import Database
from tests.scenes.logs_elsewhere import ElsewhereRig
from tests.scenes.table_changes import LARGE, ORDERS, ChangeReader, error_of, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark


def in_folder(_request: pytest.FixtureRequest) -> LogSettings:
    return SegmentSettings()


def in_bucket(request: pytest.FixtureRequest) -> LogSettings:
    options = request.getfixturevalue("s3_server").storage_options
    secrets = {name: Secret(value) for name, value in options.items()}
    return SegmentSettings(uri=request.getfixturevalue("s3_url"), storage_options=secrets)


def in_kafka(request: pytest.FixtureRequest) -> LogSettings:
    server, prefix = request.getfixturevalue("kafka_server"), request.getfixturevalue("topic_prefix")
    return KafkaSettings(bootstrap=server.url, prefix=prefix)


LOGS = [
    pytest.param(in_folder, id="folder"),
    pytest.param(in_bucket, id="bucket"),
    pytest.param(in_kafka, id="kafka", marks=pytest.mark.kafka),
]
SETUP = (
    *ORDERS,
    "create table noise (id int primary key)",
    f"insert into orders select g, 'new', g / 4.0, {LARGE} from generate_series(1, 4) g",
)
FIRST = (
    "update orders set status = 'paid' where id = 1",
    "delete from orders where id = 2",
    "insert into noise select generate_series(1, 50)",
    "update orders set id = 30 where id = 3",
)
SECOND = (
    "alter table orders replica identity full",
    "update orders set amount = amount + 1, note = 'short' where id = 4",
    "delete from orders where id = 30",
    "update orders set status = 'sent' where id = 1",
)
ROWS = [  # change type, id, status, amount, begin of the note, missing
    *[("insert", number, "new", f"0.{25 * number:02}" if number < 4 else "1.00", "mill", []) for number in range(1, 5)],
    ("update_postimage", 1, "paid", "0.25", None, ["note"]),
    ("delete", 2, None, None, None, ["status", "amount", "note"]),
    ("delete", 3, None, None, None, ["status", "amount", "note"]),
    ("insert", 30, "new", "0.75", None, ["note"]),
    ("update_preimage", 4, "new", "1.00", "mill", []),
    ("update_postimage", 4, "new", "2.00", "shor", []),
    ("delete", 30, "new", "0.75", "mill", []),
    ("update_preimage", 1, "paid", "0.25", "mill", []),
    ("update_postimage", 1, "sent", "0.25", "mill", []),
]


@pytest.mark.parametrize("settings", LOGS)
def test_a_stream_that_is_started_again_gives_each_change_once_as_a_batch_does(
    settings: Callable[[pytest.FixtureRequest], LogSettings],
    spark: "SparkSession",
    database: Database,
    state_dir: Path,
    run_program: RunProgram,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    rig = ElsewhereRig(database, state_dir, run_program, settings(request))
    rig.capture_tables(*SETUP, snapshot="initial")
    rig.begin()
    rig.follow(*FIRST)
    reader = ChangeReader(spark, rig)
    reader.append_new(tmp_path, consumer="report")
    written = reader.log.head()[0]
    rig.follow(*SECOND)
    reader.append_new(tmp_path, consumer="report")

    columns = "id", "status", "cast(amount as string)", "left(note, 4)", "_missing"
    assert rows_of(reader.appended(tmp_path), *columns) == ROWS
    assert rows_of(reader.batch(), *columns) == ROWS
    kinds = {name: kind for name, kind in reader.batch().dtypes if not name.startswith("_")}
    assert kinds == {"id": "int", "status": "string", "amount": "decimal(12,2)", "note": "string"}
    (held,) = reader.log.consumers()
    assert (held.name, held.offset) == ("report", written)  # Spark tells a source when the next micro-batch begins


@pytest.mark.kafka
def test_messages_that_kafka_removed_unread_stop_the_query_which_names_its_table(
    spark: "SparkSession",
    database: Database,
    state_dir: Path,
    run_program: RunProgram,
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    settings = in_kafka(request)
    assert isinstance(settings, KafkaSettings)
    rig = ElsewhereRig(database, state_dir, run_program, settings)
    rig.capture_tables(*ORDERS)
    rig.begin()
    rig.follow("insert into orders values (1), (2), (3)")
    reader = ChangeReader(spark, rig)
    reader.append_new(tmp_path)
    rig.follow("insert into orders values (4), (5), (6)")
    topic = f"{settings.prefix}.public.orders"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    for future in admin.delete_records([TopicPartition(topic, part, -1) for part in range(3)]).values():
        future.result()
    said = error_of(lambda: reader.append_new(tmp_path))
    assert "Table public.orders cannot be read from offset " in said
    assert "Retention removed offsets" in said and topic in said
    assert reader.batch().count() == 0
