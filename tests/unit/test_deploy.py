"""What is shipped for deployment loads, and is as closed as it says."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def test_the_unit_is_hardened() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not on this machine")
    unit = DEPLOY / "systemd" / "millrace.service"
    command = ["systemd-analyze", "security", "--offline=yes", "--threshold=25", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:]


def test_the_manifests_run_one_unprivileged_pod() -> None:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "millrace.yaml").read_text(encoding="utf-8")))
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


def test_the_search_role_is_bound_to_its_own_indexes() -> None:
    role = json.loads((DEPLOY / "opensearch" / "role.json").read_text(encoding="utf-8"))
    assert [permission["index_patterns"] for permission in role["index_permissions"]] == [["millrace-*"]]
