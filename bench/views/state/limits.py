"""What Spark's streaming operators refuse, and what depends on where its micro-batches are cut: found by running them.

    python -m bench.views.state.limits FOLDER

FOLDER has the same changes of `Amounts` in folders that are named by the size of their batches.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pyspark.errors import PySparkException

from bench.views.state import spark_jobs
from bench.views.state.in_spark import session
from bench.views.state.measured import Figures

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_LATENESS, _WINDOW = "10 minutes", "1 minute"


def main() -> None:
    """Print one line of JSON."""
    folder = Path(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="millrace-limits-") as scratch:
        spark = session(2, Path(scratch))
        sizes = sorted((int(path.name) for path in folder.iterdir()), reverse=True)
        windows = {str(size): _windows(spark, folder / str(size), Path(scratch) / f"w{size}") for size in sizes}
        found = {"window_with_watermark_by_batch_size": windows, "refused": _refused(spark, folder / str(sizes[0]))}
        spark.stop()
    print(json.dumps(found))


def _windows(spark: "SparkSession", folder: Path, home: Path) -> Figures:
    """The sum of amounts per minute with a watermark: rows dropped as late, and what all windows add up to."""
    totals: dict[object, int] = {}

    def take(batch: "DataFrame", _number: int) -> None:
        totals.update({row["start"]: row["amount"] for row in batch.collect()})

    result = _revenue(spark_jobs.stream(spark, spark_jobs.EVENTS, folder))
    writer = result.selectExpr("window.start as start", "amount").writeStream.foreachBatch(take).outputMode("update")
    query = writer.option("checkpointLocation", str(home)).trigger(availableNow=True).start()
    query.awaitTermination()
    dropped = [
        operator["numRowsDroppedByWatermark"]
        for progress in query.recentProgress
        for operator in json.loads(progress.json)["stateOperators"]
    ]
    return {"batches": len(query.recentProgress), "rows_dropped": sum(dropped), "sum_of_windows": sum(totals.values())}


def _revenue(events: "DataFrame") -> "DataFrame":
    from pyspark.sql import functions as f

    late = events.where("key is not null").withWatermark("at", _LATENESS)
    return late.groupBy(f.window("at", _WINDOW)).agg(f.sum("amount").alias("amount"))


def _refused(spark: "SparkSession", folder: Path) -> Mapping[str, str]:
    """By query: the condition of the error that Spark answers, or that it runs."""
    from pyspark.sql import functions as f

    def changes() -> "DataFrame":
        return spark_jobs.stream(spark, spark_jobs.EVENTS, folder)

    def outer() -> "DataFrame":
        right = changes().withColumnRenamed("key", "other").select("other", "lsn")
        left = changes().select("key", "amount")
        return left.join(right, left["key"] == right["other"], "left_outer")

    def pairs() -> "DataFrame":
        return spark_jobs.joined(*(spark_jobs.stream(spark, spark_jobs.CHANGES, folder) for _ in range(2)))

    totals = spark_jobs.signed(changes()).groupBy("key").agg(f.sum("amount").alias("amount"))
    tries: dict[str, tuple[Callable[[], DataFrame], str]] = {
        "inner join in update mode": (pairs, "update"),
        "outer join in update mode": (outer, "update"),
        "outer join without a watermark in append mode": (outer, "append"),
        "aggregate of an aggregate in update mode": (lambda: totals.groupBy().agg(f.sum("amount")), "update"),
        "list of items of a joined order in update mode": (
            lambda: pairs().groupBy("order_id").agg(f.collect_list("item_id")),
            "update",
        ),
        "session window in update mode": (
            lambda: changes().withWatermark("at", _LATENESS).groupBy(f.session_window("at", "5 minutes")).count(),
            "update",
        ),
        "aggregate in append mode without a watermark": (lambda: totals, "append"),
    }
    return {name: _answered(make, mode) for name, (make, mode) in tries.items()}


def _answered(make: Callable[[], "DataFrame"], mode: str) -> str:
    try:
        query = make().writeStream.format("noop").outputMode(mode).trigger(availableNow=True).start()
        query.awaitTermination()
    except PySparkException as error:
        return f"{error.getCondition() or type(error).__name__}: {str(error).splitlines()[0][:200]}"
    return "runs"


if __name__ == "__main__":
    main()
