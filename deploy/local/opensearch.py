"""OpenSearch: one node without a security plugin, from the minimal distribution on Maven Central with fewer modules.

Started with `java` directly: the distribution's shell script first runs three more JVMs. The C1 compiler alone and a
class archive halve the CPU of a start; a busy production node should use neither.
"""

import json
import shutil
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from cdc.artifacts import downloads, java, maven
from cdc.artifacts.account import account, set_owner, write_private_file
from cdc.artifacts.class_archive import class_archive
from cdc.artifacts.progress import Report, silent
from deploy.local.server import HOST, Launch, Site

VERSION = "3.8.0"
SET = f"opensearch-{VERSION}"
ARTIFACT = f"org.opensearch.distribution.integ-test-zip:opensearch:{VERSION}:zip"
_MODULES = (
    "transport-netty4",
    "lang-painless",
    "percolator",
    "reindex",
    "mapper-extras",
    "ingest-common",
    "parent-join",
    "analysis-common",
)
_SETTINGS: Mapping[str, object] = {
    "cluster.name": "millrace-local",
    "node.name": "local",
    "discovery.type": "single-node",
    "network.host": HOST,
    "cluster.routing.allocation.disk.threshold_enabled": False,
    "action.destructive_requires_name": False,
}
_FLAGS = (
    "-XX:+UseSerialGC",
    "-Xss1m",
    "-Djava.awt.headless=true",
    "-Dfile.encoding=UTF-8",
    "-Djna.nosys=true",
    "-XX:-OmitStackTraceInFastThrow",
    "-Dio.netty.noUnsafe=true",
    "-Dio.netty.noKeySetOptimization=true",
    "-Dio.netty.recycler.maxCapacityPerThread=0",
    "-Dio.netty.allocator.numDirectArenas=0",
    "-Dlog4j.shutdownHookEnabled=false",
    "-Dlog4j2.disable.jmx=true",
    "-Dorg.apache.lucene.store.MMapDirectory.sharedArenaMaxPermits=1",
    "--add-opens=java.base/java.nio=ALL-UNNAMED",
)
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class OpenSearch:
    """A node. `settings` override opensearch.yml. `quick` halves the CPU of a start; not for measuring throughput."""

    settings: Mapping[str, object] = field(default_factory=dict)
    heap: str = "512m"
    quick: bool = True
    name: str = "opensearch"
    after: tuple[str, ...] = ()
    port_count: int = 2
    patience: float = 240
    own_user: bool = False

    def install(self, report: Report) -> None:
        """Download the distribution, and find a Java for it."""
        java.java21(report)
        distribution(report)

    def prepare(self, site: Site) -> Launch:
        """Write settings and create folders in the data folder; the distribution itself is never written to."""
        runtime, full = java.java21(silent)
        home = distribution(silent, full=full)
        config = _write_config(site, self.settings)
        temporary = _folder(site.data / "tmp")
        flags = (
            *class_archive(runtime, SET, _classpath(home), account()),
            *(("-XX:TieredStopAtLevel=1",) if self.quick else ()),
            *_FLAGS,
            f"-Xms{self.heap}",
            f"-Xmx{self.heap}",
            f"-Djava.io.tmpdir={temporary}",
            f"-XX:ErrorFile={site.data}/hs_err.log",
            f"-Dopensearch.path.home={home}",
            f"-Dopensearch.path.conf={config}",
            "-Dopensearch.distribution.type=zip",
            "-Dopensearch.bundled_jdk=false",
        )
        return Launch((str(runtime), *flags, "-cp", _classpath(home), "org.opensearch.bootstrap.OpenSearch"))

    def ready(self, site: Site) -> bool:
        """Whether the cluster's health is yellow or green."""
        try:
            with _OPENER.open(f"http://{HOST}:{site.port}/_cluster/health", timeout=5) as answer:
                return bool(json.load(answer)["status"] != "red")
        except (OSError, urllib.error.URLError, ValueError):
            return False

    def address(self, site: Site) -> str:
        """An HTTP URL."""
        return f"http://{HOST}:{site.port}"


def distribution(report: Report, *, full: bool = True) -> Path:
    """The unpacked distribution; without `full` it lacks the analysis module, which the Java from PyPI cannot run."""
    folder = downloads.provide(SET, lambda folder: maven.copy(ARTIFACT, folder, report), _unpack, report)
    return folder / ("full" if full else "small")


def _classpath(home: Path) -> str:
    """The class path, with the classes of the security agent: the server needs them, but not the agent itself."""
    agent = (home / "agent").glob("opensearch-agent-bootstrap-*.jar")
    return ":".join(str(jar) for jar in (*sorted((home / "lib").glob("*.jar")), *agent))


def _unpack(folder: Path) -> None:
    archive = folder / f"opensearch-{VERSION}.zip"
    with zipfile.ZipFile(archive) as content:
        content.extractall(folder)
    archive.unlink()
    home = folder / "full"
    (folder / f"opensearch-{VERSION}").rename(home)
    for module in (home / "modules").iterdir():
        if module.name not in _MODULES:
            shutil.rmtree(module)
    (home / "plugins").mkdir(exist_ok=True)
    small = folder / "small"
    shutil.copytree(home, small, copy_function=_link)
    shutil.rmtree(small / "modules/analysis-common")


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def _folder(path: Path) -> Path:
    if not path.exists():
        path.mkdir(mode=0o700)
        set_owner(path, account())
    return path


def _write_config(site: Site, extra: Mapping[str, object]) -> Path:
    config = _folder(site.data / "config")
    own = {
        "http.port": site.ports[0],
        "transport.port": site.ports[1],
        "path.data": str(_folder(site.data / "data")),
        "path.logs": str(_folder(site.data / "logs")),
    }
    write_private_file(config / "opensearch.yml", yaml.safe_dump({**_SETTINGS, **extra, **own}), account())
    write_private_file(config / "log4j2.properties", _LOGGING, account())
    return config


_LOGGING = """status = error
appender.console.type = Console
appender.console.name = console
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = [%d{ISO8601}][%-5p][%-25c{1.}] %m%n
rootLogger.level = info
rootLogger.appenderRef.console.ref = console
"""
