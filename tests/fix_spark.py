"""One Spark session for all tests: starting a second costs ten seconds of CPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark_jars() -> tuple[Path, ...]:
    """The jars beside Spark's own, from the cache."""
    from cdc.artifacts.jars import spark_jars

    return spark_jars()


@pytest.fixture(scope="session")
def spark(spark_jars: tuple[Path, ...], tmp_path_factory: pytest.TempPathFactory) -> "Iterator[SparkSession]":
    """A local session with the product's own settings. Tests must stop the queries that they start."""
    from sinks.spark.session import spark_session

    scratch = tmp_path_factory.mktemp("spark scratch")
    session = spark_session("tests", spark_jars, {"spark.local.dir": str(scratch)}, scratch, learn=True)
    yield session
    session.stop()
