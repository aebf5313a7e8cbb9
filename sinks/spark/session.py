"""Builds the Spark session of the apply process, the tests and the benchmarks."""

import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark.sql import SparkSession

from cdc.artifacts.class_archive import note_classpath
from cdc.artifacts.jars import spark_archive, spark_java
from cdc.config.secret import Secret
from cdc.durable_files import open_new
from sinks.spark.cluster import PYTHON, executor_settings, is_local, on_this_machine
from sinks.spark.shipped_packages import write_packages
from sinks.spark.worker_python import worker_python

_OPTIONS = "spark.driver.extraJavaOptions"
_SUBMIT = "PYSPARK_SUBMIT_ARGS"
_NO_SECRETS: Mapping[str, Secret] = {}
_STREAMING = "org.apache.spark.sql.execution.streaming"
_SETTINGS = {
    "spark.ui.enabled": "false",
    # with the default of 15 s, the source's Python worker did not authenticate in time on a busy machine
    "spark.python.authenticate.socketTimeout": "120s",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    # folded batches are small: the default of 200 (Delta: 50) means 200 tasks for ten rows
    "spark.sql.shuffle.partitions": "2",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    # A reader of a persisted batch keeps every object since the last reset: with the default of 100 that is 400 MB
    # of a huge transaction, more than a small driver has.
    "spark.serializer.objectStreamReset": "1",
    # Hadoop's own local file system forks a chmod for every file: 40 ms instead of 2 ms per commit of a micro-batch
    "spark.hadoop.fs.file.impl": "com.globalmentor.apache.hadoop.fs.BareLocalFileSystem",
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
# Executors elsewhere could not reach it: there, the operator sets both, or Spark takes the address of the host's name.
_LOOPBACK = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
# Only the C1 compiler: half the CPU in the first minutes of small batches, but a warm fold of a million rows costs
# 2.8 s of CPU instead of 1.9. For long runs of large batches, set -XX:TieredStopAtLevel=4 in `spark.conf`.
_JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseParallelGC")
_LOG4J = "log4j2.properties"
_LOGGING = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.console.type = Console
appender.console.name = stderr
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} spark    %-7p %c{1}: %m%n%ex
logger.spark.name = org.apache.spark
logger.spark.level = error
"""
"""Read by the JVM at its start: by default Spark logs the host name, native libraries and its settings. Without a level
for org.apache.spark beside the root's, Spark sets it to WARN and logs that."""


def spark_session(
    app: str,
    jars: Sequence[Path],
    conf: Mapping[str, str],
    scratch: Path,
    master: str = "local[2]",
    *,
    secrets: Mapping[str, Secret] = _NO_SECRETS,
    learn: bool = False,
) -> SparkSession:
    """The session of this process, with `conf` over the defaults; its extraJavaOptions are appended to ours.

    `secrets` are settings too, passed to the JVM in a file that only its owner can read: other users can see the
    arguments of a process. `scratch` gets the files that Spark would write into the current folder. With `learn` the
    JVM writes its class archive when it ends, which takes seconds, and later sessions start with half the CPU. The
    trap: the class path and the JVM's options apply only to the first session of a process, which starts the JVM.
    """
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = _python(master, conf, scratch)
    os.environ["JAVA_HOME"] = str(spark_java())
    builder = SparkSession.Builder().master(master).appName(app)
    classpath = os.pathsep.join(str(jar) for jar in jars)
    archive = spark_archive(classpath, learn=learn)
    fixed = _fixed(classpath, (*_JVM, *archive), scratch, conf.get(_OPTIONS, ""))
    shared = (*_JVM, *spark_archive(classpath, learn=False), f"-Dlog4j2.configurationFile={scratch / _LOG4J}")
    cluster = executor_settings(master, jars, shared, conf)
    for name, value in {**_SETTINGS, **_network(master), **conf, **cluster, **fixed}.items():
        builder = builder.config(name, value)
    with _secrets_file(secrets, scratch):
        session = _without_handler(builder.getOrCreate)
    session.sparkContext.setLogLevel("ERROR")
    if not is_local(master):
        _ship_packages(session, scratch)
    if learn and (jvm := session.sparkContext._jvm) is not None:
        note_classpath(archive, jvm.System.getProperty("java.class.path"))
    return session


def _without_handler(make: Callable[[], SparkSession]) -> SparkSession:
    """Spark installs a handler of SIGINT that ends in a traceback: put the caller's handler back."""
    before = signal.getsignal(signal.SIGINT)
    session = make()
    if before is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, before)
    return session


def _python(master: str, conf: Mapping[str, str], scratch: Path) -> str:
    """The Python of tasks and of Spark's Python processes beside the driver. The trap: it is one path for both, so a
    path in an executor's environment must also exist here."""
    if not is_local(master) and (chosen := conf.get(PYTHON)):
        return chosen
    return str(worker_python(scratch)) if on_this_machine(master) else sys.executable


def _network(master: str) -> dict[str, str]:
    """The driver's ports require a secret, also on this machine. On a cluster, the operator configures it."""
    return {
        **(_LOOPBACK if on_this_machine(master) else {}),
        **({"spark.authenticate": "true"} if is_local(master) else {}),
    }


def _ship_packages(session: SparkSession, scratch: Path) -> None:
    """Let executors import this product. Takes back the entry that Spark puts on this process's own path."""
    path = list(sys.path)
    session.sparkContext.addPyFile(str(write_packages(scratch / "millrace.zip")))
    sys.path[:] = path


@contextmanager
def _secrets_file(secrets: Mapping[str, Secret], scratch: Path) -> Iterator[None]:
    """A properties file for the JVM that starts inside the block; deleted at the end of the block."""
    if not secrets:
        yield
        return
    path = scratch / "secrets.properties"
    with os.fdopen(open_new(path), "w", encoding="ascii") as file:
        file.writelines(f"{_property(name)}={_property(secret.reveal())}\n" for name, secret in secrets.items())
    os.environ[_SUBMIT] = f"--properties-file {shlex.quote(str(path))} pyspark-shell"
    try:
        yield
    finally:
        del os.environ[_SUBMIT]
        path.unlink()


def _property(text: str) -> str:
    """A name or a value in the syntax of java.util.Properties."""
    units = text.encode("utf-16-be")
    codes = [int.from_bytes(units[at : at + 2], "big") for at in range(0, len(units), 2)]
    return "".join(chr(code) if chr(code).isascii() and chr(code).isalnum() else f"\\u{code:04x}" for code in codes)


def _fixed(classpath: str, flags: Sequence[str], scratch: Path, more: str) -> dict[str, str]:
    """Settings that the pipeline's `conf` must not replace. Options are quoted: a folder's name may contain a space."""
    logging = scratch / _LOG4J
    logging.write_text(_LOGGING, encoding="utf-8")
    properties = {"derby.system.home": scratch, "java.io.tmpdir": scratch, "log4j2.configurationFile": logging}
    ours = (*flags, *(f"-D{name}={value}" for name, value in properties.items()))
    return {
        "spark.driver.extraClassPath": classpath,
        _OPTIONS: " ".join([*(f'"{flag}"' for flag in ours), more]).rstrip(),
        "spark.sql.warehouse.dir": str(scratch / "warehouse"),
        "spark.ui.showConsoleProgress": "false",
    }
