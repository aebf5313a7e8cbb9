"""docker-compose.yml and the Dockerfile: what can be known without a Docker daemon."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdc.config import pipeline_file
from cdc.log import registry as log_registry
from sinks import registry as sink_registry

ROOT = Path(__file__).parents[3]
DOCKERFILE = (ROOT / "deploy/docker/Dockerfile").read_text()
# the keys of the Compose specification that we use; a misspelt one is not among them
_SERVICE_KEYS = frozenset(
    [
        "image",
        "build",
        "command",
        "environment",
        "ports",
        "volumes",
        "healthcheck",
        "user",
        "read_only",
        "cap_drop",
        "security_opt",
        "tmpfs",
        "stop_grace_period",
        "restart",
        "depends_on",
    ]
)


@pytest.fixture
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker-compose.yml").read_text()))


def test_compose_passes_dockers_own_check() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not on this machine")
    done = subprocess.run([docker, "compose", "config", "--quiet"], cwd=ROOT, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_compose_uses_only_known_keys(compose: dict[str, Any]) -> None:
    assert compose.keys() == {"name", "services", "volumes"}
    for name, service in compose["services"].items():
        assert service.keys() <= _SERVICE_KEYS, name
        assert "image" in service, name


def test_compose_publishes_on_loopback_only(compose: dict[str, Any]) -> None:
    published = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert published
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_what_compose_mounts_and_waits_for_exists(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (ROOT / source).is_file() if source.startswith(".") else source in compose["volumes"], mount
        for need in service.get("depends_on", {}):
            assert "healthcheck" in services[need]


def test_millrace_runs_without_rights(compose: dict[str, Any]) -> None:
    service = compose["services"]["millrace"]
    assert service["user"] == "10001:10001"
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True


def test_image_ends_as_an_ordinary_user() -> None:
    assert re.findall(r"^USER (.+)$", DOCKERFILE, re.MULTILINE)[-1] == "10001:10001"


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (ROOT / source).exists()
            assert source in allowed


def test_pipeline_of_the_composition_is_valid() -> None:
    given = {"MILLRACE_PASSWORD": "x", "MILLRACE_HTTP_TOKEN": "y"}
    path = ROOT / "deploy/docker/millrace.yaml"
    settings = pipeline_file.load(path, log_registry.settings_kinds(), sink_registry.settings_kinds(), given)
    assert settings.log.kind == "kafka"
    assert [sink.name for sink in settings.sinks] == ["delta", "opensearch", "redis"]
