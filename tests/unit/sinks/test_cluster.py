"""A session's settings for executors, and what `doctor` says about a cluster before it asks it."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.capture.source.doctor import Verdict
from cdc.config.settings import Settings, SparkSettings
from sinks.spark import doctor
from sinks.spark.cluster import executor_settings, on_this_machine, standalone_hosts
from sinks.spark.shipped_packages import write_packages

JARS = (Path("/jars/a.jar"), Path("/jars/b.jar"))
SECRET = {"spark.authenticate.secret": "s3cret"}
AUTHENTICATE = {"spark.authenticate": "true"}


def test_local_threads_need_no_settings_for_executors() -> None:
    assert executor_settings("local[4]", JARS, ("-XX:A",), {}) == {}


def test_executors_on_this_machine_share_the_jars_and_the_class_archive() -> None:
    conf = {"spark.executor.extraJavaOptions": "-XX:B"}
    assert executor_settings("spark://127.0.0.1:7077", JARS, ("-XX:A",), conf) == {
        "spark.executor.extraClassPath": "/jars/a.jar:/jars/b.jar",
        "spark.executor.extraJavaOptions": '"-XX:A" -XX:B',
    }


@pytest.mark.parametrize("master", ["spark://node1:7077", "yarn", "k8s://https://kubernetes:6443"])
def test_executors_elsewhere_are_sent_the_jars_unless_they_have_them(master: str) -> None:
    more = {"spark.jars": "/own.jar"}
    assert executor_settings(master, JARS, (), more) == {"spark.jars": "/own.jar,/jars/a.jar,/jars/b.jar"}
    assert executor_settings(master, JARS, (), {"spark.executor.extraClassPath": "/opt/millrace/*"}) == {}


def test_all_masters_of_a_standby_pair_count() -> None:
    assert standalone_hosts("spark://127.0.0.1:7077,[::1]:7078") == [("127.0.0.1", 7077), ("::1", 7078)]
    assert on_this_machine("spark://127.0.0.1:7077,localhost:7078")
    assert not on_this_machine("spark://127.0.0.1:7077,node2:7077")
    assert not on_this_machine("yarn")


def test_shipped_packages_are_imported_from_the_zip_without_compiling(tmp_path: Path) -> None:
    archive = write_packages(tmp_path / "millrace.zip")
    code = "import sinks.fold.arrow as fold, sinks.registry as r; print(fold.__file__, 'redis' in r.settings_kinds())"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(archive)!r}); {code}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [f"{archive}/sinks/fold/arrow.pyc", "True"]


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def verdicts(**spark: object) -> dict[str, Verdict]:
    settings = Settings(spark=SparkSettings.model_validate(spark))
    return {finding.check: finding.verdict for finding in doctor.examine(settings)}


def test_doctor_has_nothing_to_say_about_local_threads() -> None:
    assert verdicts(master="local[2]") == {}


def test_doctor_demands_authentication_and_its_secret() -> None:
    master = f"spark://127.0.0.1:{closed_port()}"
    assert verdicts(master=master)["spark.authenticate"] is Verdict.FAIL
    assert verdicts(master=master, conf=AUTHENTICATE)["spark.authenticate"] is Verdict.FAIL
    assert verdicts(master=master, conf=AUTHENTICATE, secrets=SECRET)["spark.authenticate"] is Verdict.OK


def test_doctor_names_a_master_that_does_not_answer() -> None:
    master = f"spark://127.0.0.1:{closed_port()}"
    assert verdicts(master=master, conf=AUTHENTICATE, secrets=SECRET)["spark.master"] is Verdict.FAIL


def test_doctor_warns_of_rows_that_travel_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("YARN_CONF_DIR", raising=False)
    found = verdicts(master="yarn", conf=AUTHENTICATE)
    assert found == {
        "spark.authenticate": Verdict.OK,
        "spark.encryption": Verdict.WARN,
        "spark.master": Verdict.FAIL,
    }
    crypto = {**AUTHENTICATE, "spark.network.crypto.enabled": "true"}
    assert "spark.encryption" not in verdicts(master="yarn", conf=crypto)


def test_spark_connect_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match="Spark Connect"):
        SparkSettings(master="sc://node1:15002")
