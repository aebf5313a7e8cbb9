"""Kafka: one KRaft node, broker and controller in one process, started from its jars."""

import os
import socket
import subprocess
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cdc.artifacts import downloads, java, maven
from cdc.artifacts.account import account, write_private_file
from cdc.artifacts.class_archive import class_archive
from cdc.artifacts.progress import Report, silent
from cdc.errors import EnvironmentFault
from deploy.local.server import HOST, Launch, Site

SET = "kafka-4.3.1"
POM = Path(__file__).with_name("kafka.xml")
_QUICK = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_SETTINGS = {
    "process.roles": "broker,controller",
    "node.id": "1",
    "controller.listener.names": "CONTROLLER",
    "listener.security.protocol.map": "CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT",
    "inter.broker.listener.name": "PLAINTEXT",
    "num.partitions": "1",
    "default.replication.factor": "1",
    "min.insync.replicas": "1",
    "offsets.topic.replication.factor": "1",
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "transaction.state.log.num.partitions": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "auto.create.topics.enable": "false",
    # 128 MB by default, half of the whole heap
    "log.cleaner.dedupe.buffer.size": "16777216",
    "log.cleaner.threads": "1",
    "num.network.threads": "2",
    "num.io.threads": "4",
    "background.threads": "2",
}


@dataclass(frozen=True, slots=True)
class Kafka:
    """A Kafka node. `settings` override server.properties. `advertised` is another port for clients, that of a proxy.

    `quick` halves the CPU of a start; do not use it to measure throughput.
    """

    settings: Mapping[str, str] = field(default_factory=dict)
    advertised: int | None = None
    heap: str = "256m"
    quick: bool = True
    name: str = "kafka"
    after: tuple[str, ...] = ()
    port_count: int = 2
    patience: float = 120
    own_user: bool = False

    def install(self, report: Report) -> None:
        """The jars and a Java."""
        java.java17_or_newer(report)
        jars(report)

    def prepare(self, site: Site) -> Launch:
        """Write server.properties, and format the storage if it is new."""
        properties = site.data / "server.properties"
        lines = [f"{name}={value}" for name, value in {**_SETTINGS, **self.settings, **self._own(site)}.items()]
        write_private_file(properties, "\n".join(lines) + "\n", account())
        write_logging(site.data)
        if not (site.data / "log" / "meta.properties").exists():
            _format(_java(site.data, "kafka-format", self.heap, _QUICK), properties, site)
        command = _java(site.data, SET, self.heap, _QUICK if self.quick else ())
        return Launch((*command, "kafka.Kafka", str(properties)))

    def _own(self, site: Site) -> dict[str, str]:
        client, controller = site.ports
        return {
            "controller.quorum.voters": f"1@{HOST}:{controller}",
            "listeners": f"PLAINTEXT://{HOST}:{client},CONTROLLER://{HOST}:{controller}",
            "advertised.listeners": f"PLAINTEXT://{HOST}:{self.advertised or client}",
            "log.dirs": str(site.data / "log"),
        }

    def ready(self, site: Site) -> bool:
        """Whether the broker answers an ApiVersions request, which it does only once it serves clients."""
        return answers(site.port)

    def address(self, site: Site) -> str:
        """Bootstrap servers."""
        return f"{HOST}:{self.advertised or site.port}"


def answers(port: int) -> bool:
    """Send ApiVersions v0 (key 18, correlation 7, client `m`) and check the correlation id and error code 0."""
    request = bytes.fromhex("0012 0000 00000007 0001 6d")
    try:
        with socket.create_connection((HOST, port), timeout=2) as connection:
            connection.sendall(len(request).to_bytes(4) + request)
            return connection.recv(10)[4:] == bytes.fromhex("00000007 0000")
    except OSError:
        return False


def jars(report: Report) -> Path:
    """The folder with the broker's jars."""
    return downloads.provide(SET, lambda folder: maven.copy_dependencies(POM, folder, report), None, report)


def write_logging(folder: Path) -> None:
    """log4j2.xml beside the settings."""
    write_private_file(folder / "log4j2.xml", _LOGGING, account())


def _java(folder: Path, archive: str, heap: str, flags: tuple[str, ...]) -> tuple[str, ...]:
    runtime = java.java17_or_newer(silent)
    classpath = ":".join(str(jar) for jar in sorted(jars(silent).glob("*.jar")))
    logging = f"-Dlog4j2.configurationFile={folder / 'log4j2.xml'}"
    archived = class_archive(runtime, archive, classpath, account())
    return (str(runtime), *archived, *flags, f"-Xmx{heap}", logging, "-cp", classpath)


def _format(command: tuple[str, ...], properties: Path, site: Site) -> None:
    cluster = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=").replace("-", "A")
    who = account()
    done = subprocess.run(
        [*command, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(properties)],
        cwd=site.data,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ.get("PATH", "")},
        user=who.uid if who else None,
        group=who.gid if who else None,
        extra_groups=[] if who else None,
    )
    if done.returncode != 0:
        last = ((done.stderr or done.stdout).strip().splitlines() or ["no message"])[-1]
        raise EnvironmentFault(
            f"Kafka could not format {site.data}: {last}", "Check the free disk space and try again."
        )


_LOGGING = """<Configuration status="WARN">
  <Appenders><Console name="c"><PatternLayout pattern="%d{ISO8601} %-5p %c{1} %m%n"/></Console></Appenders>
  <Loggers>
    <Root level="INFO"><AppenderRef ref="c"/></Root>
    <Logger name="org.apache.kafka.clients" level="WARN"/>
  </Loggers>
</Configuration>
"""
