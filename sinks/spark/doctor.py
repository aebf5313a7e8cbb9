"""Checks of a Spark cluster before a pipeline runs on it: authentication, the master, and what its executors see.

The last one starts a driver and runs a job, since only an executor can say what it sees. Nothing is left behind.
"""

import os
import secrets
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cdc.artifacts.jars import spark_jars
from cdc.capture.source.doctor import Finding, Verdict
from cdc.config.settings import Settings, SparkSettings
from cdc.durable_files import write_new
from sinks import registry
from sinks.spark.cluster import is_local, on_this_machine, standalone_hosts
from sinks.spark.probe import Marker, Sight, look

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OPTIONS = "spark.driver.extraJavaOptions"
_AUTHENTICATE, _SECRET = "spark.authenticate", "spark.authenticate.secret"
_ENCRYPTION = ("spark.network.crypto.enabled", "spark.ssl.rpc.enabled")
_CONNECT_SECONDS = 5.0
_EXECUTOR_SECONDS = 60.0
"""A container on a busy cluster takes tens of seconds to start."""
_NO_LOG = """\
rootLogger.level = off
rootLogger.appenderRef.none.ref = none
appender.none.type = Null
appender.none.name = none
logger.spark.name = org.apache.spark
logger.spark.level = off
"""
"""The appender is for Spark: it replaces a configuration without one by its own, which writes warnings."""
_SHARE = (
    "Mount it at the same path on every machine that runs executors and let their user use it, "
    "or keep it where all can reach it: log.kind kafka, an object store's URI as the sink's path."
)


def examine(settings: Settings) -> list[Finding]:
    """Check the cluster of `spark.master`; nothing for local threads. Executors are asked only if the rest is right."""
    spark = settings.spark
    if is_local(spark.master):
        return []
    found = [*_authentication(spark), *_reachable(spark.master)]
    if not any(finding.verdict is Verdict.FAIL for finding in found):
        found += _executors(settings)
    return found


def _authentication(spark: SparkSettings) -> Iterator[Finding]:
    if spark.conf.get(_AUTHENTICATE) != "true":
        message = "everybody who reaches the driver's or an executor's port can run code there"
        yield _fail(_AUTHENTICATE, spark.master, message, f"Set spark.conf: {{{_AUTHENTICATE}: 'true'}}.")
    elif standalone_hosts(spark.master) and not spark.secrets.get(_SECRET):
        message = "a standalone cluster shares one secret, and none is configured"
        remedy = f"Set spark.secrets: {{{_SECRET}: ${{SPARK_SECRET}}}} to the secret of the master and the workers."
        yield _fail(_AUTHENTICATE, spark.master, message, remedy)
    else:
        yield Finding("spark.authenticate", Verdict.OK, spark.master, "driver and executors know a secret")
    if not on_this_machine(spark.master) and not any(spark.conf.get(name) == "true" for name in _ENCRYPTION):
        message = "rows travel between driver and executors without encryption"
        remedy = f"Set spark.conf: {{{_ENCRYPTION[0]}: 'true'}} here and at the workers."
        yield Finding("spark.encryption", Verdict.WARN, spark.master, message, remedy)


def _reachable(master: str) -> Iterator[Finding]:
    """YARN's addresses are in Hadoop's settings, which only Spark reads."""
    addresses = standalone_hosts(master)
    if master.startswith("k8s://"):
        server = urlsplit(master.removeprefix("k8s://"))
        addresses = [(server.hostname or "", server.port or 443)]
    if master == "yarn" and not os.environ.get("HADOOP_CONF_DIR", os.environ.get("YARN_CONF_DIR")):
        remedy = "Set HADOOP_CONF_DIR to the folder with the cluster's core-site.xml and yarn-site.xml."
        yield _fail("spark.master", master, "Spark does not know where YARN is", remedy)
    refused = [reason for address in addresses if (reason := _refusal(*address))]
    if addresses and len(refused) == len(addresses):
        remedy = "Start the master, or correct spark.master; check names and firewalls."
        yield _fail("spark.master", master, f"the master does not answer: {refused[0]}", remedy)
    elif addresses:
        yield Finding("spark.master", Verdict.OK, master, "accepts connections")


def _refusal(host: str, port: int) -> str:
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECONDS):
            return ""
    except OSError as error:
        return f"{host}:{port}: {error.strerror or error}"


def _executors(settings: Settings) -> Iterator[Finding]:
    master = settings.spark.master
    with ExitStack() as stack:
        try:
            session = stack.enter_context(_session(settings))
        except Exception as error:
            message = f"no driver could register: {type(error).__name__}"
            remedy = "Compare spark.authenticate.secret with the cluster's, and read the master's log."
            yield _fail("spark.driver", master, message, remedy)
            return
        if not _await_executor(session):
            driver = session.sparkContext.getConf().get("spark.driver.host")
            message = f"no executor registered within {_EXECUTOR_SECONDS:.0f} s"
            remedy = (
                "Look at the cluster's page for free cores and memory: this pipeline, if it runs, may have them all."
                f" Let executors reach the driver at {driver}"
                " (spark.driver.host, spark.driver.port, spark.driver.blockManager.port)."
            )
            yield _fail("spark.executors", master, message, remedy)
            return
        markers = [stack.enter_context(_marker(folder, write)) for folder, write in _folders(settings)]
        yield from _reported(master, markers, _sights(session, settings, markers))


@contextmanager
def _session(settings: Settings) -> "Iterator[SparkSession]":
    from sinks.spark.session import spark_session

    spark = settings.spark
    with tempfile.TemporaryDirectory(prefix="millrace-doctor-") as folder:
        conf = {"spark.driver.memory": "512m", "spark.local.dir": folder, **spark.conf, _OPTIONS: _quiet(folder, spark)}
        session = spark_session(
            "millrace doctor", spark_jars(), conf, Path(folder), spark.master, secrets=spark.secrets
        )
        try:
            yield session
        finally:
            session.stop()


def _quiet(folder: str, spark: SparkSettings) -> str:
    """JVM options without Spark's own log: a wrong secret would show a hundred lines of stack traces."""
    logging = Path(folder) / "quiet.properties"
    logging.write_text(_NO_LOG, encoding="ascii")
    return f"{spark.conf.get(_OPTIONS, '')} -Dlog4j2.configurationFile={logging}".strip()


def _await_executor(session: "SparkSession") -> bool:
    deadline = time.monotonic() + _EXECUTOR_SECONDS
    tracker = session.sparkContext._jsc.sc().statusTracker()
    while len(tracker.getExecutorInfos()) < 2:  # the driver is one of them
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def _folders(settings: Settings) -> list[tuple[Path, bool]]:
    """Local folders that tasks read, and whether they write there too: the segment log, the folders of sinks."""
    in_folder = settings.log.kind == "segments" and not getattr(settings.log, "uri", "")
    log = [(settings.state, False)] if in_folder else []
    paths = [str(getattr(sink, "path", "")) for sink in settings.sinks]
    return [*log, *((Path(path), True) for path in paths if path and "://" not in path)]


@contextmanager
def _marker(folder: Path, write: bool) -> Iterator[Marker]:
    """A file in the folder, or in the first parent that exists yet, for the time of the check."""
    place = folder.absolute()
    while not place.is_dir():
        place = place.parent
    word = secrets.token_hex(8)
    path = place / f".millrace-doctor-{word}"
    write_new(path, word.encode())
    try:
        yield Marker(str(path), word, write)
    finally:
        path.unlink(missing_ok=True)


def _sights(session: "SparkSession", settings: Settings, markers: Sequence[Marker]) -> list[Sight]:
    """One of each executor that took part. As many tasks as there are cores, so that each gets some."""
    shapes = {"sinks.shape.sink"} if any(sink.shape for sink in settings.sinks) else set()
    modules = sorted({"pyarrow", "cdc.log", *shapes, *(registry.module_of(sink.kind) for sink in settings.sinks)})
    context = session.sparkContext
    tasks = context.parallelize(range(max(2, context.defaultParallelism)), max(2, context.defaultParallelism))
    sights: list[Sight] = tasks.mapPartitions(lambda _: look(markers, modules)).collect()
    return list({sight.executor: sight for sight in sights}.values())


def _reported(master: str, markers: Sequence[Marker], sights: Sequence[Sight]) -> Iterator[Finding]:
    hosts = ", ".join(sorted({sight.host for sight in sights}))
    yield Finding("spark.executors", Verdict.OK, master, f"{len(sights)} executor(s) ran a task, on {hosts}")
    for marker in markers:
        folder = str(Path(marker.path).parent)
        hidden = [(sight.host, reason) for sight in sights for path, reason in sight.hidden if path == marker.path]
        use = "write" if marker.write else "read"
        if hidden:
            message = f"executors on {hidden[0][0]} cannot {use} it: {hidden[0][1]}"
            yield _fail("spark.shared_folder", folder, message, _SHARE)
        else:
            yield Finding("spark.shared_folder", Verdict.OK, folder, f"executors can {use} it")
    missing = {module: (sight, reason) for sight in sights for module, reason in sight.missing}
    for module, (sight, reason) in sorted(missing.items()):
        remedy = f"Install Millrace's dependencies into {sight.python} on every machine (docs/cluster.md)."
        yield _fail("spark.python", module, f"executors on {sight.host} cannot import it: {reason}", remedy)


def _fail(check: str, about: str, message: str, remedy: str) -> Finding:
    return Finding(check, Verdict.FAIL, about, message, remedy)
