"""`sum(balance)` of a topic of accounts, as the documentation of Structured Streaming leads to.

    python -m bench.views.textbook_total JSON

`last_balances`: the last balance of each account in complete mode, then their total in each micro-batch. `differences`:
the sum of what each change adds, in update mode. Prints one line of JSON: total and accounts of each micro-batch.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ENVELOPE = "op string, before struct<id: bigint, balance: bigint>, after struct<id: bigint, balance: bigint>"


def changes(spark: "SparkSession", settings: dict[str, Any]) -> "DataFrame":
    """The envelopes of a topic; tombstones are left out."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", settings["bootstrap"])
    reader = reader.option("subscribe", settings["topic"]).option("startingOffsets", "earliest")
    rows = reader.option("maxOffsetsPerTrigger", settings["limit"]).load().where("value is not null")
    return rows.selectExpr(f"from_json(cast(value as string), '{_ENVELOPE}') as change", "offset").select(
        "change.*", "offset"
    )


def last_balances(rows: "DataFrame") -> "DataFrame":
    """The last balance of each account; the changes of an account are in one partition, in order."""
    from pyspark.sql import functions as f

    last = rows.selectExpr("coalesce(after.id, before.id) as id", "after.balance as balance", "offset")
    return last.groupBy("id").agg(f.max_by("balance", "offset").alias("balance"))


def differences(rows: "DataFrame") -> "DataFrame":
    """What the changes add to the total and to the number of accounts."""
    from pyspark.sql import functions as f

    added = f.coalesce("after.balance", f.lit(0)) - f.coalesce("before.balance", f.lit(0))
    one = f.when(f.col("op").isin("c", "r"), 1).when(f.col("op") == "d", -1).otherwise(0)
    return rows.groupBy().agg(f.sum(added).alias("total"), f.sum(one).alias("accounts"))


def totals(spark: "SparkSession", settings: dict[str, Any], home: str) -> list[tuple[int, int]]:
    """Total and number of accounts as of the end of each micro-batch."""
    found: list[tuple[int, int]] = []

    def take(batch: "DataFrame", _number: int) -> None:
        if settings["query"] == "last_balances":
            batch = batch.where("balance is not null").selectExpr("sum(balance) as total", "count(*) as accounts")
        found.extend((row["total"], row["accounts"]) for row in batch.collect())

    query, mode = {"last_balances": (last_balances, "complete"), "differences": (differences, "update")}[
        settings["query"]
    ]
    writer = query(changes(spark, settings)).writeStream.foreachBatch(take).outputMode(mode)
    writer.option("checkpointLocation", home + "/checkpoint").trigger(availableNow=True).start().awaitTermination()
    return found


def main() -> None:
    """Run the query over everything that the topic has."""
    from cdc.artifacts.jars import spark_jars
    from sinks.spark.session import spark_session

    settings = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="millrace-textbook-") as folder:
        spark = spark_session("textbook", spark_jars(), {"spark.driver.memory": "2g"}, Path(folder))
        print(json.dumps(totals(spark, settings, folder)))
        spark.stop()


if __name__ == "__main__":
    main()
