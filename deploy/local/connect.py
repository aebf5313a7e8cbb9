"""Kafka Connect with the Debezium connector for Postgres, for tests of the Debezium log and for benchmarks."""

import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cdc.artifacts import downloads, java, maven
from cdc.artifacts.account import account, write_private_file
from cdc.artifacts.class_archive import class_archive
from cdc.artifacts.progress import Report, silent
from deploy.local.kafka import write_logging
from deploy.local.server import HOST, Launch, Site

SET = "connect-4.3.1"
POM = Path(__file__).with_name("connect.xml")
_DEBEZIUM = "3.6.2.Final"
PLUGIN = f"debezium-{_DEBEZIUM}"
ARTIFACT = f"io.debezium:debezium-connector-postgres:{_DEBEZIUM}:tar.gz:plugin"
# the connector's parent pom is not published; this old version of Maven's plugin does not need it
OLD_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:2.10"
_SETTINGS = {
    "group.id": "connect-local",
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
    "key.converter.schemas.enable": "false",
    "value.converter.schemas.enable": "false",
    "config.storage.topic": "connect-configs",
    "config.storage.replication.factor": "1",
    "offset.storage.topic": "connect-offsets",
    "offset.storage.replication.factor": "1",
    "offset.storage.partitions": "1",
    "status.storage.topic": "connect-status",
    "status.storage.replication.factor": "1",
    "status.storage.partitions": "1",
    "plugin.discovery": "service_load",
}
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class Connect:
    """A Connect worker. `settings` override the defaults."""

    settings: Mapping[str, str] = field(default_factory=dict)
    heap: str = "1g"
    name: str = "connect"
    after: tuple[str, ...] = ("kafka",)
    port_count: int = 1
    patience: float = 240
    own_user: bool = False

    def install(self, report: Report) -> None:
        """The worker's jars, the connector and a Java."""
        java.java17_or_newer(report)
        _jars(report)
        _connector(report)

    def prepare(self, site: Site) -> Launch:
        """Write the worker's settings; its state is in Kafka."""
        own = {
            "bootstrap.servers": site.peers["kafka"].address,
            "listeners": f"http://{HOST}:{site.port}",
            "plugin.path": str(_connector(silent)),
        }
        properties = site.data / "connect.properties"
        lines = [f"{name}={value}" for name, value in {**_SETTINGS, **self.settings, **own}.items()]
        write_private_file(properties, "\n".join(lines) + "\n", account())
        write_logging(site.data)
        runtime = java.java17_or_newer(silent)
        classpath = ":".join(str(jar) for jar in sorted(_jars(silent).glob("*.jar")))
        flags = (f"-Xmx{self.heap}", f"-Dlog4j2.configurationFile={site.data / 'log4j2.xml'}")
        command = (str(runtime), *class_archive(runtime, SET, classpath, account()), *flags, "-cp", classpath)
        return Launch((*command, "org.apache.kafka.connect.cli.ConnectDistributed", str(properties)))

    def ready(self, site: Site) -> bool:
        """The list of connectors can be read: the worker has joined its group."""
        try:
            with _OPENER.open(f"http://{HOST}:{site.port}/connectors", timeout=5) as answer:
                return isinstance(json.load(answer), list)
        except (OSError, urllib.error.URLError, ValueError):
            return False

    def address(self, site: Site) -> str:
        """The worker's REST URL."""
        return f"http://{HOST}:{site.port}"


def _jars(report: Report) -> Path:
    return downloads.provide(SET, lambda folder: maven.copy_dependencies(POM, folder, report), None, report)


def _connector(report: Report) -> Path:
    return downloads.provide(
        PLUGIN, lambda folder: maven.copy(ARTIFACT, folder, report, plugin=OLD_PLUGIN), _unpack, report
    )


def _unpack(folder: Path) -> None:
    for archive in list(folder.glob("*.tar.gz")):
        with tarfile.open(archive) as content:
            content.extractall(folder, filter="data")
        archive.unlink()
