"""A Spark standalone cluster from the jars of the installed PySpark: one master and workers, with a shared secret.

Started with `java` directly: Spark's shell scripts first run another JVM. Master, workers and executors run as the user
of this process, not as the servers' user: executors read the pipeline's state folder, which only its owner may enter.
"""

import importlib.util
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cdc.artifacts import java
from cdc.artifacts.account import secret_in, write_private_file
from cdc.artifacts.class_archive import class_archive
from cdc.artifacts.jars import SET
from cdc.artifacts.progress import Report, silent
from cdc.config.secret import Secret
from cdc.errors import EnvironmentFault
from deploy.local.server import HOST, Launch, Site

MASTER = "spark-master"
_QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m")
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_MASTER_SETTINGS = {
    # a restarted master remembers its workers and applications
    "spark.deploy.recoveryMode": "FILESYSTEM",
    "spark.ui.killEnabled": "false",
    # on by default: it takes submissions from everybody, without the secret
    "spark.master.rest.enabled": "false",
}
_WORKER_SETTINGS = {
    # folders of ended applications, with what was shipped to them
    "spark.worker.cleanup.enabled": "true",
    "spark.ui.killEnabled": "false",
}


@dataclass(frozen=True, slots=True)
class SparkMaster:
    """The master. It hands out executors; applications that have theirs run on while it is down."""

    name: str = MASTER
    after: tuple[str, ...] = ()
    port_count: int = 2
    patience: float = 120
    own_user: bool = True

    def install(self, report: Report) -> None:
        """A Java; PySpark is a dependency of this package."""
        java.java17(report)
        _jars()

    def prepare(self, site: Site) -> Launch:
        """Write the settings; the recovery folder keeps what a former master knew."""
        recovery = site.data / "recovery"
        recovery.mkdir(mode=0o700, exist_ok=True)
        own = {**_MASTER_SETTINGS, "spark.deploy.recoveryDirectory": str(recovery)}
        arguments = ("--host", HOST, "--port", str(site.port), "--webui-port", str(site.ports[1]))
        # the workers, which load the same classes, use the archive that the master writes when it ends
        return _launch(site, "org.apache.spark.deploy.master.Master", arguments, own, learn=True)

    def ready(self, site: Site) -> bool:
        """Whether it says that it is active; not while it recovers."""
        return _master_state(site.ports[1]).get("status") == "ALIVE"

    def address(self, site: Site) -> str:
        """The master's URL, for `spark.master`."""
        return f"spark://{HOST}:{site.port}"


@dataclass(frozen=True, slots=True)
class SparkWorker:
    """A worker, which starts executors. `cores` is how many tasks run on it at the same time, whatever the machine has:
    tasks that wait for a store need none."""

    number: int = 1
    cores: int = 2
    memory: str = "1g"
    after: tuple[str, ...] = (MASTER,)
    port_count: int = 2
    patience: float = 120
    own_user: bool = True

    @property
    def name(self) -> str:
        """`spark-worker-<number>`."""
        return f"spark-worker-{self.number}"

    def install(self, report: Report) -> None:
        """Nothing beside what the master needs."""

    def prepare(self, site: Site) -> Launch:
        """Write the settings. Executors have working directories in the data folder, so that `down` finds them."""
        offered = ("--cores", str(self.cores), "--memory", self.memory, "--work-dir", str(site.data / "work"))
        listens = ("--host", HOST, "--port", str(site.port), "--webui-port", str(site.ports[1]))
        arguments = (*offered, *listens, site.peers[MASTER].address)
        return _launch(site, "org.apache.spark.deploy.worker.Worker", arguments, _WORKER_SETTINGS, learn=False)

    def ready(self, site: Site) -> bool:
        """Whether the master counts this worker among those that it can use."""
        workers = _master_state(site.peers[MASTER].ports[1]).get("workers", [])
        return isinstance(workers, list) and any(
            worker.get("port") == site.port and worker.get("state") == "ALIVE" for worker in workers
        )

    def address(self, site: Site) -> str:
        """The worker's page, with the output of its executors."""
        return f"http://{HOST}:{site.ports[1]}"


def secret_file(private: Path) -> Path:
    """The file with `spark.authenticate.secret` of the cluster, one line."""
    return private / "spark-secret"


def secret(private: Path) -> Secret:
    """The cluster's secret."""
    return secret_in(secret_file(private))


def _launch(site: Site, program: str, arguments: tuple[str, ...], own: Mapping[str, str], *, learn: bool) -> Launch:
    settings = {
        "spark.authenticate": "true",
        "spark.authenticate.secret": secret(site.private).reveal(),
        **own,
    }
    properties, logging = site.data / "spark.properties", site.data / "log4j2.properties"
    write_private_file(properties, "".join(f"{name} {value}\n" for name, value in settings.items()), None)
    write_private_file(logging, _LOGGING, None)
    runtime, classpath = java.java17(silent), f"{_jars()}/*"
    archive = class_archive(runtime, f"cluster-{SET}", classpath, None, learn=learn)
    flags = (*_QUICK, *archive, f"-Dlog4j2.configurationFile={logging}", "-cp", classpath)
    environment = {
        "SPARK_HOME": str(_jars().parent),
        # otherwise a script of Spark's sets it, and a worker without it starts no executor
        "SPARK_SCALA_VERSION": "2.13",
        "JAVA_HOME": str(runtime.parent.parent),
        # without it the web page and the executors listen on every address
        "SPARK_LOCAL_IP": HOST,
    }
    return Launch((str(runtime), *flags, program, "--properties-file", str(properties), *arguments), environment)


def _jars() -> Path:
    found = importlib.util.find_spec("pyspark")
    if found is None or found.origin is None:
        raise EnvironmentFault("PySpark is not installed.", "Install Millrace with its dependencies.")
    return Path(found.origin).parent / "jars"


def _master_state(port: int) -> dict[str, object]:
    try:
        with _OPENER.open(f"http://{HOST}:{port}/json/", timeout=5) as answer:
            return dict(json.load(answer))
    except (OSError, urllib.error.URLError, ValueError):
        return {}


_LOGGING = """\
rootLogger.level = warn
rootLogger.appenderRef.stderr.ref = stderr
appender.console.type = Console
appender.console.name = stderr
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d{HH:mm:ss} %-5p %c{1}: %m%n%ex
"""
