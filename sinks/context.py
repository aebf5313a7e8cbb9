"""What a sink is given beside its settings."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class SinkContext:
    """The surroundings of a sink: the pipeline's state folder, Spark where there is one, and how to wait.

    The trap: `spark` may be None (verify and the command line run without a JVM); ask for it only where a batch
    is worth it.
    """

    state: Path
    spark: "Callable[[], SparkSession] | None" = None
    wait: Callable[[float], None] = time.sleep
