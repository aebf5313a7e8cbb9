"""A contender of the bake-off that is a query of Spark."""

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from bench.views.state import spark_jobs
from bench.views.state.measured import PARTITIONS, Figures, Mark, Settings, answer

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def run(settings: Settings) -> Figures:
    """A query that ends when it has processed every batch in the folder."""
    with tempfile.TemporaryDirectory(prefix="millrace-state-") as scratch:
        spark = session(settings.cores, Path(scratch))
        try:
            if settings.warm:
                _processed(spark, settings, Path(settings.warm), Path(scratch) / "warm")
            start = Mark.now()
            marks, kept = _processed(spark, settings, Path(settings.folder), Path(settings.home))
            return answer(start, marks, kept, _read(spark, settings) if settings.warm else {})
        finally:
            spark.stop()


def session(cores: int, scratch: Path) -> "SparkSession":
    """Spark with RocksDB as state store, and the C2 compiler, which suits long runs."""
    from cdc.artifacts.jars import spark_jars
    from sinks.spark.session import spark_session

    os.environ["PYTHONPATH"] = str(Path(__file__).parents[3])
    conf = {
        **spark_jobs.STATE,
        "spark.sql.streaming.numRecentProgressUpdates": "1000",
        "spark.sql.shuffle.partitions": str(PARTITIONS),
        "spark.driver.memory": "3g",
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=4",
        "spark.local.dir": str(scratch),
    }
    return spark_session("state", spark_jars(), conf, scratch, f"local[{cores}]")


def _processed(spark: "SparkSession", settings: Settings, folder: Path, home: Path) -> tuple[list[Mark], list[Figures]]:
    marks: list[Mark] = []
    kept: list[Figures] = []

    def take(batch: "DataFrame", number: int) -> None:
        if settings.keep:
            kept.extend({"batch": number, **row.asDict()} for row in batch.collect())
        else:
            batch.write.format("noop").mode("overwrite").save()
        marks.append(Mark.now())

    result = spark_jobs.query(spark, settings.contender, settings.job, folder)
    writer = result.writeStream.foreachBatch(take).outputMode(spark_jobs.mode(settings.contender, settings.job))
    writer.option("checkpointLocation", str(home)).trigger(availableNow=True).start().awaitTermination()
    return marks, kept


def _read(spark: "SparkSession", settings: Settings) -> Figures:
    """The state as of the batch before the last, by Spark's reader of state stores."""
    home = Path(settings.home)
    last = max(int(path.name) for path in (home / "commits").iterdir() if path.name.isdigit())
    reader = spark.read.format("statestore").option("batchId", last - 1)
    for name, value in _variable(settings).items():
        reader = reader.option(name, value)
    begun = Mark.now()
    rows = reader.load(settings.home).count()
    figures = Mark.now().since(begun)
    size = sum(path.stat().st_size for path in (home / "state").rglob("*") if path.is_file())
    return {"read": {"rows": rows, **figures}, "bytes": size}


def _variable(settings: Settings) -> dict[str, str]:
    if settings.contender == "built_in":
        return {"joinSide": "right"} if settings.job == "pairs" else {}
    return {"stateVarName": "total" if settings.job == "totals" else "items"}
