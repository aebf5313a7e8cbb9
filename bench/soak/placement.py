"""Where the soak's pipeline runs: on one machine, or on a Spark cluster with a log on Kafka and Delta tables in S3."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.local.cluster import s3, spark
from deploy.local.cluster.spark import MASTER, SparkWorker
from deploy.local.kafka import brokers
from deploy.local.servers import STANDARD, Servers, known_servers

_BROKERS = brokers(3)
_WORKERS = (SparkWorker(1), SparkWorker(2))
_SEVERAL = (*(broker.name for broker in _BROKERS), *(worker.name for worker in _WORKERS))
_TASKS = 3


@dataclass(frozen=True, slots=True)
class Placement:
    """The servers, the faults that are injected, and what the pipeline file says differently."""

    kinds: Sequence[str]
    server_names: Sequence[str]
    sections: Callable[[Servers, dict[str, Any]], None]
    results: str

    def servers(self, home: Path) -> Servers:
        """The servers, which die with the calling thread."""
        return Servers(home, known_servers(*_BROKERS, *_WORKERS), tied=True)


def _local(_servers: Servers, facts: dict[str, Any]) -> None:
    """A short retention, so that the run includes retention."""
    facts["log"] = {"kind": "segments", "retention_hours": 0.05, "hot_segments": 64}


def _spread(servers: Servers, facts: dict[str, Any]) -> None:
    """Tasks on the workers read three partitions of three brokers, and write to S3 among others."""
    running = servers.status()
    facts["log"] = {
        "kind": "kafka",
        "bootstrap": ",".join(running[broker.name].address for broker in _BROKERS),
        "prefix": "soak",
        "partitions": _TASKS,
        "replication": 3,
        "min_insync": 2,
    }
    facts["spark"] = {
        "master": running[MASTER].address,
        "memory": "600m",
        "conf": {"spark.authenticate": "true", "spark.default.parallelism": str(_TASKS)},
        "secrets": {"spark.authenticate.secret": spark.secret(servers.private()).reveal()},
    }
    delta = next(sink for sink in facts["sinks"] if sink["kind"] == "delta")
    options = s3.storage_options(running["s3"].address, servers.private())
    delta |= {"path": f"s3://{s3.BUCKET}/soak", "storage_options": options}


LOCAL = Placement(
    kinds=(
        "kill capture",
        "kill apply",
        "kill spark",
        "kill daemon",
        "stop daemon",
        "crash postgres",
        "kill postgres",
        "kill redis",
        "kill opensearch",
        "pause capture",
        "pause apply",
        "pause postgres",
        "pause redis",
    ),
    server_names=STANDARD,
    sections=_local,
    results="soak.json",
)
CLUSTER = Placement(
    kinds=(
        "kill capture",
        "kill apply",
        "kill daemon",
        "kill postgres",
        f"kill {MASTER}",
        f"kill {_WORKERS[0].name}",
        f"pause {_WORKERS[1].name}",
        f"kill {_BROKERS[0].name}",
        f"kill {_BROKERS[1].name}",
        "kill s3",
        "pause s3",
    ),
    server_names=(*STANDARD, "s3", MASTER, *_SEVERAL),
    sections=_spread,
    results="soak_cluster.json",
)
