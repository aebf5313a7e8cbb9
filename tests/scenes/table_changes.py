"""A real pipeline up to its log, and what Spark reads from it: rows as plain tuples, in the order of the changes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import cdc.log
import pyspark_millrace
from cdc.ports import LogReader
from tests.fix_capture import Rig

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ORDERS = (
    "create table orders (id int primary key, status text, amount numeric(12,2), note text)",
    "alter table orders alter note set storage external",
)
LARGE = "repeat('millrace ', 1000)"
"""Stored out of line: an update that does not touch it does not send it."""


class ChangeReader:
    """Reads one table of a rig's log with the format `millrace`."""

    def __init__(self, spark: "SparkSession", rig: Rig, table: str = "public.orders") -> None:
        pyspark_millrace.register(spark)
        self.spark = spark
        self._rig = rig
        self.config = write_pipeline(rig)
        self.options = {"pipeline": str(self.config), "table": table}

    @property
    def password(self) -> str:
        """That of the source, as the pipeline file has it."""
        return str(self._rig.source["password"])

    def add_sink(self, name: str) -> None:
        """Name a sink in the pipeline file."""
        data = yaml.safe_load(self.config.read_text())
        data["sinks"] = [{"kind": "redis", "name": name}]
        self.config.write_text(yaml.safe_dump(data))

    @property
    def log(self) -> LogReader:
        """The log as every other program reads it."""
        return cdc.log.open_reader(self._rig.settings)

    def batch(self, **options: str) -> "DataFrame":
        """A batch read."""
        return self.spark.read.format("millrace").options(**{**self.options, **named(options)}).load()

    def stream(self, **options: str) -> "DataFrame":
        """A stream."""
        return self.spark.readStream.format("millrace").options(**{**self.options, **named(options)}).load()

    def append_new(self, folder: Path, **options: str) -> None:
        """Append what is in the log now to a Delta table, from the checkpoint on if there is one."""
        writer = self.stream(**options).writeStream.format("delta").option("mergeSchema", "true")
        query = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(availableNow=True)
        query.start(str(folder / "table")).awaitTermination()

    def appended(self, folder: Path) -> "DataFrame":
        """The Delta table of `append_new`."""
        return self.spark.read.format("delta").load(str(folder / "table"))


def named(options: dict[str, str]) -> dict[str, str]:
    """`begin` is the option `from`, a word that Python keeps for itself."""
    return {"from" if name == "begin" else name: value for name, value in options.items()}


def write_pipeline(rig: Rig) -> Path:
    """The pipeline file of a rig. Its log may be elsewhere than in the state folder."""
    log = {"kind": rig.settings.log.kind, **rig.settings.log.model_dump(exclude_defaults=True, mode="json")}
    secrets = getattr(rig.settings.log, "storage_options", {})
    if secrets:
        log["storage_options"] = {name: secret.reveal() for name, secret in secrets.items()}
    path = rig.state.parent / "millrace.yaml"
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump({"state": str(rig.state), "source": rig.source, "log": log}))
    return path


def rows_of(frame: "DataFrame", *columns: str) -> Sequence[tuple[Any, ...]]:
    """The rows in the order of the changes, an old row before the new one: the change type, then these expressions."""
    from pyspark.sql.functions import col

    ordered = frame.orderBy("_commit_version", "_ordinal", "id", col("_change_type").desc())
    return [tuple(row) for row in ordered.selectExpr("_change_type", *columns).collect()]


def error_of(action: Callable[[], Any]) -> str:
    """What Spark says of an action that fails."""
    with pytest.raises(Exception, match="millrace") as caught:
        action()
    return str(caught.value)
