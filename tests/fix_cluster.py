"""Clusters for tests: Spark standalone, and Kafka with three brokers. Started when the first test of the session asks,
gone when pytest is gone.

One driver process has one Spark context, and that of pytest's own process is local (`spark`). So a driver on the
cluster is a child: a pipeline whose settings have `cluster.settings` as `spark`, or a program that calls `session_on`.
"""

import contextlib
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from deploy.local.cluster import spark
from deploy.local.cluster.spark import MASTER, SparkMaster, SparkWorker
from deploy.local.kafka import brokers
from deploy.local.process import inside
from deploy.local.server import Server
from deploy.local.servers import Servers
from tests.fix_servers import LocalServer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_MOST_WORKERS = 8


class SparkCluster:
    """A master and some workers, each a `LocalServer` with `kill`, `pause`, `start` and `pid`."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self.master = LocalServer(servers, MASTER)
        self.workers: list[LocalServer] = []

    def scale(self, workers: int) -> None:
        """Have a running master and exactly so many running workers, whatever an earlier test has killed."""
        self.master.start()
        names = [SparkWorker(number).name for number in range(1, _MOST_WORKERS + 1)]
        if surplus := [name for name in names[workers:] if name in self._servers.status()]:
            self._servers.down(surplus)
        self._servers.up(names[:workers])
        self.workers = [LocalServer(self._servers, name) for name in names[:workers]]

    def executors(self, worker: int) -> list[int]:
        """Process ids of the executors of a worker, counted from 0, and of their Python processes."""
        own = self.workers[worker]
        return [found.pid for found in inside(own.data / "work")]

    @property
    def master_page(self) -> int:
        """The port of the master's web page; `/json/` has the workers and applications."""
        return self._servers.status()[MASTER].ports[1]

    @property
    def settings(self) -> dict[str, Any]:
        """The section `spark` of a pipeline on this cluster."""
        return {
            "master": self.master.url,
            "conf": {"spark.authenticate": "true"},
            "secrets": {"spark.authenticate.secret": spark.secret(self._servers.private()).reveal()},
        }


@contextlib.contextmanager
def session_on(section: dict[str, Any], scratch: Path, conf: dict[str, str] | None = None) -> "Iterator[SparkSession]":
    """A session of this process on the cluster with those settings. Not in pytest's own process: see above."""
    from cdc.artifacts.jars import spark_jars
    from cdc.config.secret import Secret
    from sinks.spark.session import spark_session

    scratch.mkdir(mode=0o700, parents=True, exist_ok=True)
    settings = {"spark.local.dir": str(scratch), **section["conf"], **(conf or {})}
    secrets = {name: Secret(value) for name, value in section["secrets"].items()}
    session = spark_session("tests", spark_jars(), settings, scratch, section["master"], secrets=secrets)
    try:
        yield session
    finally:
        session.stop()


@pytest.fixture(scope="session")
def shared_spark_cluster(session_home: Path) -> Iterator[SparkCluster]:
    """Not for tests: see `spark_cluster`."""
    every: tuple[Server, ...] = (SparkMaster(), *(SparkWorker(number) for number in range(1, _MOST_WORKERS + 1)))
    servers = Servers(session_home / "cluster", {server.name: server for server in every}, tied=True)
    session_home.mkdir(mode=0o711, parents=True, exist_ok=True)
    yield SparkCluster(servers)
    servers.down()
    shutil.rmtree(session_home / "cluster", ignore_errors=True)


@pytest.fixture
def spark_cluster(shared_spark_cluster: SparkCluster) -> SparkCluster:
    """The session's cluster, with a running master and two running workers of two cores; see `scale`."""
    shared_spark_cluster.scale(2)
    return shared_spark_cluster


class KafkaCluster:
    """Three brokers, each a `LocalServer`. Topics have three replicas, two of which must have a message."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._names = [node.name for node in brokers(3)]
        self.start()
        self.brokers = [LocalServer(servers, name) for name in self._names]

    def start(self) -> None:
        """Start those that a test has killed."""
        self._servers.up(self._names)

    @property
    def bootstrap(self) -> str:
        """All of them, so that a client finds the cluster when one is down."""
        return ",".join(broker.url for broker in self.brokers)


@pytest.fixture(scope="session")
def shared_kafka_cluster(session_home: Path) -> Iterator[KafkaCluster]:
    """Not for tests: see `kafka_cluster`."""
    session_home.mkdir(mode=0o711, parents=True, exist_ok=True)
    servers = Servers(session_home / "brokers", {node.name: node for node in brokers(3)}, tied=True)
    yield KafkaCluster(servers)
    servers.down(how=signal.SIGKILL)
    shutil.rmtree(session_home / "brokers", ignore_errors=True)


@pytest.fixture
def kafka_cluster(shared_kafka_cluster: KafkaCluster) -> KafkaCluster:
    """The session's three brokers, running."""
    shared_kafka_cluster.start()
    return shared_kafka_cluster
