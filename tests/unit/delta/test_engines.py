"""Which engine writes a Delta table is decided by where the table lies, before its first batch."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

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
