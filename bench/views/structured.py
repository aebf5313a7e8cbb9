"""The measured views in plain Structured Streaming, as far as its operators can express them.

    python -m bench.views.structured JSON

The JSON object has `kind`, `bootstrap`, `topics` (by table), `out`, `home` and `limit`, the offsets per trigger.
Commands come line by line on standard input: `catch_up` processes what the topics have and prints what it measured;
`live` goes on until `stop`. Results are written to the topic `out` with the commit time, `ts_us`, of the newest change
that they have. LIMITS says what each result is not.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cpu_meter import tree_cpu

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LIMITS: Mapping[str, str] = {
    "documents": "flat rows of order, item and customer instead of documents: a list of current items cannot be made; "
    "orders without items are missing; every version of a row is joined with every version of the others and kept "
    "for ever; rows that no longer hold are not taken back",
    "joins": "every version of a post is joined with every version of a follow, and both are kept for ever; rows of "
    "deleted posts and follows are marked, not taken back",
    "windows": "what is later than the watermark is dropped, also corrections and cancellations of older sales; how "
    "much that is depends on the micro-batches",
}
_WATERMARK = "30 minutes"
_ROWS = {
    "public.customers": "id bigint, name string, city string",
    "public.orders": "id bigint, customer_id bigint, status string",
    "public.items": "id bigint, order_id bigint, product string, quantity int, price string",
    "public.posts": "id bigint, author bigint, title string",
    "public.follows": "follower bigint, followee bigint",
    "public.sales": "id bigint, placed_at timestamp, cents bigint",
}
Read = Callable[[str], "DataFrame"]


def changes(spark: "SparkSession", settings: Mapping[str, Any], table: str) -> "DataFrame":
    """The changes of a table: op, before, after, and `row`, the newer of the two."""
    reader = spark.readStream.format("kafka").option("kafka.bootstrap.servers", settings["bootstrap"])
    reader = reader.option("subscribe", settings["topics"][table]).option("startingOffsets", "earliest")
    messages = reader.option("maxOffsetsPerTrigger", settings["limit"]).load().where("value is not null")
    row = f"struct<{_ROWS[table].replace(' ', ': ')}>".replace(",: ", ", ")
    envelope = f"op string, before {row}, after {row}, source struct<ts_us: bigint>"
    parsed = messages.selectExpr(f"from_json(cast(value as string), '{envelope}') as change")
    return parsed.selectExpr(
        "change.op", "change.before", "change.after", "coalesce(change.after, change.before) as row",
        "change.source.ts_us as ts_us",
    )  # fmt: skip


def _named(rows: "DataFrame", name: str) -> "DataFrame":
    return rows.selectExpr(f"row as {name}", f"op as {name}_op", f"ts_us as {name}_us")


def documents(read: Read) -> "DataFrame":
    """Orders joined with their items and their customer."""
    orders, items = _named(read("public.orders"), "orders"), _named(read("public.items"), "item")
    customers = _named(read("public.customers"), "customer")
    joined = orders.join(items, orders["orders.id"] == items["item.order_id"])
    joined = joined.join(customers, joined["orders.customer_id"] == customers["customer.id"])
    return joined.selectExpr(
        "concat(orders.id, ':', item.id) as key",
        "to_json(struct(*, greatest(orders_us, item_us, customer_us) as ts_us)) as value",
    )


def joins(read: Read) -> "DataFrame":
    """Posts joined with follows of their author."""
    posts, follows = _named(read("public.posts"), "post"), _named(read("public.follows"), "follow")
    joined = posts.join(follows, posts["post.author"] == follows["follow.followee"])
    return joined.selectExpr(
        "concat(follow.follower, ':', post.id) as key",
        "to_json(struct(*, greatest(post_us, follow_us) as ts_us)) as value",
    )


def windows(read: Read) -> "DataFrame":
    """Cents and sales per minute."""
    from pyspark.sql import functions as f

    sides = "inline(array(struct(after as sale, 1 as sign), struct(before as sale, -1 as sign)))"
    signed = read("public.sales").selectExpr("ts_us", sides).where("sale.cents is not null")
    signed = signed.selectExpr("ts_us", "sale.placed_at as placed_at", "sign * sale.cents as cents", "sign")
    groups = signed.withWatermark("placed_at", _WATERMARK).groupBy(f.window("placed_at", "1 minute"))
    totals = groups.agg(f.sum("cents").alias("cents"), f.sum("sign").alias("sales"), f.max("ts_us").alias("ts_us"))
    return totals.selectExpr(
        "cast(window.start as string) as key", "to_json(struct(window.start, cents, sales, ts_us)) as value"
    )


KINDS: Mapping[str, tuple[Callable[[Read], "DataFrame"], str]] = {
    "documents": (documents, "append"),
    "joins": (joins, "append"),
    "windows": (windows, "update"),
}


class Job:
    """The query of a kind, which starts again at its checkpoint."""

    def __init__(self, spark: "SparkSession", settings: Mapping[str, Any]) -> None:
        self._spark, self._settings = spark, settings
        self._marks: list[tuple[float, float]] = []

    def catch_up(self) -> dict[str, Any]:
        """Process what the topics have. The first batch, with the start of the query, is not counted."""
        self._marks.clear()
        query = self._start(availableNow=True)
        query.awaitTermination()
        progress = [json.loads(each.json) for each in query.recentProgress]
        inputs = [each["numInputRows"] for each in progress if each["numInputRows"]]
        dropped = sum(state["numRowsDroppedByWatermark"] for each in progress for state in each["stateOperators"])
        first, last = self._marks[0], self._marks[-1]
        return {
            "seconds": last[0] - first[0],
            "cpu_seconds": last[1] - first[1],
            "share": sum(inputs[1:]) / max(1, sum(inputs)),
            "rows_dropped_as_late": dropped,
        }

    def live(self) -> None:
        """Micro-batches one after the other, until a line comes."""
        query = self._start(processingTime="0 seconds")
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        query.stop()

    def _start(self, **trigger: Any) -> "StreamingQuery":  # noqa: ANN401
        make, mode = KINDS[self._settings["kind"]]
        result = make(lambda table: changes(self._spark, self._settings, table))
        writer = result.writeStream.foreachBatch(self._write).outputMode(mode).trigger(**trigger)
        return writer.option("checkpointLocation", self._settings["home"]).start()

    def _write(self, batch: "DataFrame", _number: int) -> None:
        writer = batch.write.format("kafka").option("kafka.bootstrap.servers", self._settings["bootstrap"])
        writer.option("topic", self._settings["out"]).save()
        self._marks.append((time.monotonic(), tree_cpu(os.getpid())))


def main() -> None:
    """Follow the commands."""
    from bench.views.state.in_spark import session

    with tempfile.TemporaryDirectory(prefix="millrace-structured-") as scratch:
        spark = session(2, Path(scratch))
        job = Job(spark, json.loads(sys.argv[1]))
        for line in sys.stdin:
            if line.strip() == "catch_up":
                print(json.dumps(job.catch_up()), flush=True)
            elif line.strip() == "live":
                job.live()
            else:
                break
        spark.stop()


if __name__ == "__main__":
    main()
