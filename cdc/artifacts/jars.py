"""The jars that Spark needs beside its own: Delta, Kafka, and a local file system that runs no `chmod` process."""

import importlib.util
import os
from pathlib import Path

from cdc.artifacts import downloads, java, maven
from cdc.artifacts.class_archive import class_archive
from cdc.artifacts.progress import Report, silent

SET = "spark-4.2.0"
POM = Path(__file__).with_name("spark.xml")


def spark_jars(report: Report = silent) -> tuple[Path, ...]:
    """Paths for Spark's class path; downloads them the first time only. Raises EnvironmentFault."""
    folder = downloads.provide(SET, lambda folder: maven.copy_dependencies(POM, folder, report), None, report)
    return tuple(sorted(folder.glob("*.jar")))


def spark_java(report: Report = silent) -> Path:
    """JAVA_HOME for Spark: Java 17 or newer."""
    return java.java17(report).parent.parent


def spark_archive(classpath: str, *, learn: bool) -> tuple[str, ...]:
    """JVM flags for the driver to use its class archive, if there is one. With `learn` the JVM writes it when it ends.

    The JVM silently ignores an archive with another class path, so each installation of PySpark has its own archive.
    """
    spark = importlib.util.find_spec("pyspark")
    whole = os.pathsep.join([classpath, spark.origin if spark and spark.origin else ""])
    return class_archive(java.java17(silent), SET, whole, None, learn=learn)
