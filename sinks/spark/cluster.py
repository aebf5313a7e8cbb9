"""What a Spark session needs beside the driver's own settings where its tasks run in executors of a cluster.

The driver runs in this process (Spark's client mode), under the supervisor. Executors get the product's packages as a
zip file; what these depend on (pyarrow, redis, …) must be installed in their Python.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from cdc.config.loopback import is_loopback

PYTHON = "spark.pyspark.python"
JARS = "spark.jars"
CLASS_PATH = "spark.executor.extraClassPath"
OPTIONS = "spark.executor.extraJavaOptions"
_STANDALONE = "spark://"


def is_local(master: str) -> bool:
    """Whether tasks run in the driver's own JVM."""
    return master.startswith("local")


def standalone_hosts(master: str) -> list[tuple[str, int]]:
    """Host and port of each master in a `spark://` URL; empty for another kind of cluster."""
    if not master.startswith(_STANDALONE):
        return []
    addresses = (address.rpartition(":") for address in master.removeprefix(_STANDALONE).split(","))
    return [(host.strip("[]"), int(port)) for host, _, port in addresses if port.isdigit()]


def on_this_machine(master: str) -> bool:
    """Whether executors run on the driver's machine and see its files: local threads, or a master on loopback."""
    hosts = standalone_hosts(master)
    return is_local(master) or (bool(hosts) and all(is_loopback(host) for host, _ in hosts))


def executor_settings(
    master: str, jars: Sequence[Path], flags: Sequence[str], conf: Mapping[str, str]
) -> dict[str, str]:
    """Settings for the executors; none for local threads.

    On this machine executors use the driver's jars and, with the same class path, its class archive (`flags`).
    Elsewhere the driver sends its jars, unless `conf` names a class path that the executors have already.
    """
    if is_local(master):
        return {}
    if on_this_machine(master):
        options = " ".join([*(f'"{flag}"' for flag in flags), conf.get(OPTIONS, "")]).rstrip()
        return {CLASS_PATH: os.pathsep.join(str(jar) for jar in jars), OPTIONS: options}
    if CLASS_PATH in conf:
        return {}
    return {JARS: ",".join(filter(None, [conf.get(JARS, ""), *(str(jar) for jar in jars)]))}
