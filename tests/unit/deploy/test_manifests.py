"""What is shipped for deployment loads, and is as closed as it says."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from cdc.log.segments.log import location_of
from cdc.service.daemon.process import settings_from
from cdc.service.http.guard import guard

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"


def test_the_unit_is_hardened() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    unit = DEPLOY / "systemd" / "millrace.service"
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:]


def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    text = (DEPLOY / "systemd" / "millrace.service").read_text(encoding="utf-8")
    unit = tmp_path / "millrace.service"
    unit.write_text(text.replace("/opt/millrace/bin/millrace", "/bin/true"), encoding="utf-8")
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert [line for line in done.stderr.splitlines() if "millrace.service" in line] == []


def manifests(name: str = "millrace.yaml") -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", ["millrace.yaml", "executors.yaml"])
def test_the_manifests_are_what_kubernetes_takes(name: str) -> None:
    for document in manifests(name):
        kubernetes_validate.validate(document, "1.29", strict=True)


def test_the_pipeline_files_that_are_shipped_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGPASSWORD", "MILLRACE_HTTP_TOKEN", "MILLRACE_PASSWORD"):
        monkeypatch.setenv(name, "from-the-environment")
    (config,) = [document for document in manifests() if document["kind"] == "ConfigMap"]
    path = tmp_path / "millrace.yaml"
    path.write_text(config["data"]["millrace.yaml"], encoding="utf-8")
    for file in (path, DEPLOY / "docker" / "millrace.yaml"):
        settings = settings_from(file)
        guard(settings.http)
        assert settings.http.token.reveal() == "from-the-environment"


def test_the_pipelines_in_the_page_about_clusters_load_and_authenticate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for name in ("PGHOST", "PGPASSWORD", "MILLRACE_HTTP_TOKEN", "SPARK_SECRET", *keys):
        monkeypatch.setenv(name, "from-the-environment")
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    masters = []
    for number, example in enumerate(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(example, encoding="utf-8")
        settings = settings_from(path)
        spark = settings.spark
        if example.startswith("log:"):
            assert location_of(settings).root == "s3://bucket/logs/shop"
            continue
        masters.append(spark.master.partition(":")[0])
        assert spark.conf["spark.authenticate"] == "true"
        assert (spark.master.startswith("spark:")) == ("spark.authenticate.secret" in spark.secrets)
    assert masters == ["spark", "spark", "k8s", "yarn"]


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_image_is_pinned_small_and_runs_as_nobody_in_particular() -> None:
    found = instructions()
    bases = [rest.split()[0] for verb, rest in found if verb == "FROM"]
    assert all(re.search(r":\d", base) for base in bases), bases
    last = max(place for place, (verb, _) in enumerate(found) if verb == "FROM")
    runtime = found[last:]
    assert ("USER", "10001:10001") in runtime
    verbs = [verb for verb, _ in runtime]
    assert verbs.index("USER") < verbs.index("ENTRYPOINT")
    assert "ADD" not in verbs
    assert not any("RUN" in verb for verb in verbs[verbs.index("USER") :])
    for verb, rest in found:
        if verb == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest
            assert "rm -rf /var/lib/apt/lists" in rest
    assert any("/livez" in rest for verb, rest in runtime if verb == "HEALTHCHECK")
    assert any("--require-hashes" in rest for verb, rest in found if verb == "RUN")


def test_everything_that_the_image_copies_exists() -> None:
    for verb, rest in instructions():
        if verb == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists(), source


def test_the_manifests_run_one_unprivileged_pod() -> None:
    documents = manifests()
    (stateful,) = [document for document in documents if document["kind"] == "StatefulSet"]
    pod = stateful["spec"]["template"]["spec"]
    assert stateful["spec"]["replicas"] == 1
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["containers"][0]["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["containers"][0]["livenessProbe"]["httpGet"]["path"] == "/livez"
