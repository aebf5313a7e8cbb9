"""A driver of a user, to be killed: `python -m tests.integration.reader.driver PIPELINE FOLDER`.

It appends the changes of public.orders to a Delta table, an entry of the log a micro-batch.
"""

import sys
from pathlib import Path

import pyspark_millrace
from cdc.artifacts.jars import spark_jars
from sinks.spark.session import spark_session


def main(pipeline: str, folder: Path) -> None:
    scratch = folder / "scratch"
    scratch.mkdir()
    spark = spark_session("driver", spark_jars(), {"spark.local.dir": str(scratch)}, scratch)
    pyspark_millrace.register(spark)
    changes = spark.readStream.format("millrace").option("pipeline", pipeline).option("table", "public.orders")
    writer = changes.option("maxChangesPerTrigger", "1").load().writeStream.format("delta")
    writer.option("checkpointLocation", str(folder / "checkpoint")).start(str(folder / "table")).awaitTermination()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
