"""Rows read back from the log, folded as a live batch is."""

from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.ports import Schemas
from sinks.fold import fold
from sinks.folded import Folded, gather

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def folded(spark: "SparkSession", rows: pa.Table, schemas: Schemas) -> Folded:
    """Fold rows of LOG_SCHEMA. Says of no position that it is reached: there is no progress marker among them."""
    # in one chunk: of a table whose first chunk is empty, PySpark 4.2 makes an empty frame without a word
    frame = spark.createDataFrame(rows.combine_chunks())
    return gather(fold(frame).toArrow(), schemas)
