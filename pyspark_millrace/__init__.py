"""A table's changes from a Millrace log as a Spark DataFrame: `spark.readStream.format("millrace")`, `spark.read…`.

    import pyspark_millrace

    pyspark_millrace.register(spark)
    changes = spark.readStream.format("millrace").option("pipeline", "millrace.yaml").option("table", "public.orders")

Options, columns and guarantees: docs/spark-reader.md. Nothing of Millrace imports this package.
"""

from pyspark.sql import SparkSession

from cdc.log.spark import source as log_source
from pyspark_millrace.source import MillraceSource

__all__ = ["MillraceSource", "register"]


def register(spark: SparkSession) -> None:
    """Let a session find the format `millrace`. Calling it again changes nothing."""
    log_source.register(spark, MillraceSource)
