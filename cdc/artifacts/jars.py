"""The jars that Spark needs beside its own: Delta, the Kafka source, and a local file system that forks no `chmod`."""

import importlib.util
import os
from pathlib import Path

from cdc.artifacts import downloads, java, maven
from cdc.artifacts.class_archive import class_archive
from cdc.artifacts.progress import Narrate, silent

SET = "spark-4.2.0"
POM = Path(__file__).with_name("spark.xml")


def spark_jars(narrate: Narrate = silent) -> tuple[Path, ...]:
    """Paths for Spark's class path; fetched the first time, offline afterwards. Raises EnvironmentFault."""
    folder = downloads.provide(SET, lambda aside: maven.copy_dependencies(POM, aside, narrate), None, narrate)
    return tuple(sorted(folder.glob("*.jar")))


def spark_java(narrate: Narrate = silent) -> Path:
    """JAVA_HOME for Spark: Java 17 or newer."""
    return java.java17(narrate).parent.parent


def spark_archive(classpath: str, *, learn: bool) -> tuple[str, ...]:
    """JVM flags for the driver: its class archive, if one was learned. `learn` writes it when the JVM ends.

    The JVM refuses, in silence, an archive whose class path differs: each installation of PySpark has one of its own.
    """
    spark = importlib.util.find_spec("pyspark")
    whole = os.pathsep.join([classpath, spark.origin if spark and spark.origin else ""])
    return class_archive(java.java17(silent), SET, whole, None, learn=learn)
