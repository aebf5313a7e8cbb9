"""The Spark session: one way to build it, for the apply process, the tests and the benchmarks alike."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pyspark.sql import SparkSession

from deploy.local.archive import note_classpath
from deploy.local.jars import spark_archive, spark_java

_OPTIONS = "spark.driver.extraJavaOptions"
_STREAMING = "org.apache.spark.sql.execution.streaming"
_SETTINGS = {
    "spark.ui.enabled": "false",
    # 15 s by default: on a machine that is busy with something else, the source's Python did not shake hands in time
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # folded batches are small: the default of 200 (and Delta's 50) is 200 tasks for ten rows
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # Hadoop's own local file system forks a chmod for every file: 40 ms instead of 2 for each commit of a micro-batch
    "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
# C1 alone: half the CPU for a driver's first minutes of small batches, but a warm fold of a million rows costs 2.8 s
# of CPU instead of 1.9. A driver that folds much for long is better with -XX:TieredStopAtLevel=4 in its conf.
_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseParallelGC")


def spark_session(
    app: str,
    jars: Sequence[Path],
    conf: Mapping[str, str],
    scratch: Path,
    master: str = "local[2]",
    *,
    learn: bool = False,
) -> SparkSession:
    """The session of this process, with `conf` over our own settings; its extraJavaOptions are put behind ours.

    `scratch` takes what Spark would otherwise leave in the current folder. With `learn` the JVM writes its class
    archive when it ends, which takes seconds, and later sessions start with half the CPU. The trap: the class path
    and the JVM's options count only for the first session of a process, since its JVM is started with them.
    """
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["JAVA_HOME"] = str(spark_java())
    builder = SparkSession.Builder().master(master).appName(app)
    classpath = os.pathsep.join(str(jar) for jar in jars)
    archive = spark_archive(classpath, learn=learn)
    own = _own(classpath, (*_JVM, *archive), scratch, conf.get(_OPTIONS, ""))
    for name, value in {**_SETTINGS, **conf, **own}.items():
        builder = builder.config(name, value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    if learn and (jvm := session.sparkContext._jvm) is not None:
        note_classpath(archive, jvm.System.getProperty("java.class.path"))
    return session


def _own(classpath: str, flags: Sequence[str], scratch: Path, more: str) -> dict[str, str]:
    """What a pipeline's own settings must not replace. Quoted: a folder's name may hold a space."""
    ours = (*flags, f"-Dderby.system.home={scratch}", f"-Djava.io.tmpdir={scratch}")
    return {
        "spark.driver.extraClassPath": classpath,
        _OPTIONS: " ".join([*(f'"{flag}"' for flag in ours), more]).rstrip(),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.showConsoleProgress": "false",
    }
