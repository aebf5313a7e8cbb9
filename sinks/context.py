"""What a sink gets besides its settings."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The pipeline's state folder, a Spark session and a function that waits.

    The trap: `spark` is None in verify and in the CLI, which run without a JVM. Calling it starts a JVM: do so only for
    a batch that needs Spark.
    """

    state: Path
    spark: "Callable[[], SparkSession] | None" = None
    wait: Callable[[float], None] = time.sleep
