"""Which engine writes a Delta table is decided by where the table lies, before its first batch."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from pydantic import ValidationError

from cdc.errors import SinkError
from sinks.context import SinkContext
from sinks.delta.settings import DeltaSettings
from sinks.delta.sink import DeltaSink
from sinks.delta.write import writer
from sinks.delta.write.writer import WriteOptions
from tests.scenes.histories import batch, change, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ITEMS = table()


def no_session() -> "SparkSession":
    raise AssertionError("Spark is asked for")


@pytest.mark.parametrize("scheme", ["", "s3://bucket", "abfss://container@account", "memory://"])
def test_in_an_object_store_deltalake_alone_writes_however_much_a_batch_touches(tmp_path: Path, scheme: str) -> None:
    path = f"{scheme}{tmp_path}"
    sink = DeltaSink(DeltaSettings(path=path), SinkContext(tmp_path, no_session))
    offered = sink._by_spark(sink.store(ITEMS.table))
    assert (offered is None) == bool(scheme)


def test_a_batch_that_touches_more_than_spark_is_for_is_merged_by_deltalake_where_spark_may_not_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "SPARK_LIMIT", -1)
    monkeypatch.setattr(writer, "REGION_LIMIT", -1)
    sink = DeltaSink(DeltaSettings(path=str(tmp_path), deletion_vectors=False), SinkContext(tmp_path, no_session))
    monkeypatch.setattr(sink, "_by_spark", lambda _: WriteOptions().by_spark)
    sink.prepare(ITEMS)
    for version, label in ((10, "old"), (20, "new")):
        rows = [change("u", f'{{"id":{key}}}', version, f'{{"id":{key},"label":"{label}"}}') for key in (1, 2)]
        sink.apply(batch(ITEMS, rows))
    assert sink.stored(ITEMS).column("label").to_pylist() == ["new", "new"]


def test_with_engine_native_spark_is_never_asked_for(tmp_path: Path) -> None:
    sink = DeltaSink(DeltaSettings(path=str(tmp_path), engine="native"), SinkContext(tmp_path, no_session))
    assert sink._by_spark(sink.store(ITEMS.table)) is None


def test_with_engine_spark_and_no_session_nothing_is_written(tmp_path: Path) -> None:
    sink = DeltaSink(DeltaSettings(path=str(tmp_path), engine="spark"), SinkContext(tmp_path))
    sink.prepare(ITEMS)
    with pytest.raises(SinkError, match="engine: spark"):
        sink.apply(batch(ITEMS, [change("u", '{"id":1}', 10, '{"id":1,"label":"a"}')]))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"path": "s3://bucket/lake"}, "hadoop-aws"),
        ({"path": "/lake", "append_only": True}, "current rows only"),
        ({"path": "/lake", "stored_as_scd_type": 2}, "current rows only"),
    ],
    ids=["object store", "changelog", "history"],
)
def test_engine_spark_is_refused_where_it_cannot_write(more: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        DeltaSettings.model_validate({"engine": "spark", **more})
