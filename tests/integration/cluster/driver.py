"""A driver on a cluster, as a program of its own: `python -m tests.integration.cluster.driver REQUEST ANSWER`.

The request is a JSON file with the section `spark` of the settings, the folder and the first offset of a segment log,
and a scratch folder.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cdc.config.settings import Settings, SparkSettings
from cdc.log.segments.storage import LogLocation
from cdc.log.spark.segments import source
from cdc.ports import Offset
from sinks.delta.settings import DeltaSettings
from sinks.spark.doctor import examine
from tests.fix_cluster import session_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def _imports(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Runs in a task: where it is, and where it finds this product."""
    import sinks.fold.arrow
    import sinks.redis.script  # reads its Lua program from the package

    for _ in batches:
        found = {"cwd": str(Path.cwd()), "module": sinks.fold.arrow.__file__, "script": sinks.redis.script.__file__}
        yield pa.RecordBatch.from_pylist([found])


def _imported(spark: "SparkSession") -> list[dict[str, str]]:
    frame = spark.range(0, 8, 1, 8).mapInArrow(_imports, "cwd string, module string, script string")
    return [row.asDict() for row in frame.collect()]


def _keys(spark: "SparkSession", root: Path, start: str, scratch: Path) -> list[str]:
    """The keys of the log, read by tasks in micro-batches."""
    keys: list[str] = []
    frame = source(LogLocation(str(root))).frame(spark, Offset(start), 0)
    query = (
        frame.select("key")
        .writeStream.foreachBatch(lambda batch, _: keys.extend(row.key for row in batch.collect()))
        .option("checkpointLocation", str(scratch / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return keys


def _parquet(spark: "SparkSession", path: Path) -> list[int]:
    """Written and read by executors through the local file system of the shipped jars."""
    spark.range(0, 20, 1, 2).write.parquet(str(path))
    return sorted(row.id for row in spark.read.parquet(str(path)).collect())


def _settings(asked: dict[str, Any]) -> Settings:
    """A pipeline with two sinks in folders: one that executors see, and one that every process takes for another."""
    lakes = {"lake": asked["scratch"], "other": "/proc/self/cwd"}
    sinks = [DeltaSettings(name=name, path=path) for name, path in lakes.items()]
    state = Path(asked["log"]).parent
    return Settings(state=state, spark=SparkSettings.model_validate(asked["spark"]), sinks=tuple(sinks))


def main(request: Path, answer: Path) -> None:
    """Do all of it in one session: a session on a cluster costs some ten seconds of CPU."""
    asked = json.loads(request.read_text())
    scratch = Path(asked["scratch"])
    with session_on(asked["spark"], scratch) as spark:
        found = {
            "imported": _imported(spark),
            "keys": _keys(spark, Path(asked["log"]), asked["start"], scratch),
            "parquet": _parquet(spark, scratch / "lake"),
            "own path": sys.path,
        }
    found["doctor"] = [asdict(finding) for finding in examine(_settings(asked))]
    answer.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
