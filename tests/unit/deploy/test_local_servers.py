"""The parts of `deploy.local` that need no server."""

import hashlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.artifacts import downloads, folders, java, maven, packages, wheels
from cdc.artifacts.account import Account, account, reachable, write_private_file
from cdc.artifacts.progress import silent
from cdc.errors import EnvironmentFault
from deploy.local import ports, postgres
from deploy.local import redis as local_redis
from deploy.local.process import Identity, alive, end, identify, inside
from deploy.local.records import Records
from deploy.local.server import Running

_NOBODY = Account("nobody", 65534, 65534)


@pytest.fixture
def bare_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without Java, Maven, Postgres, Redis and apt: nothing on the PATH, nothing in the usual folders."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("MILLRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(java, "_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(folders, "reachable", lambda _folder, _who: True)


@pytest.mark.usefixtures("bare_machine")
def test_missing_java_says_which_package_to_install() -> None:
    with pytest.raises(EnvironmentFault, match=r"Java 17 or newer is missing.*openjdk-17-jre-headless"):
        java.java17(silent)


@pytest.mark.usefixtures("bare_machine")
def test_missing_maven_says_which_package_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "java17", lambda _report: tmp_path)
    with pytest.raises(EnvironmentFault, match=r"Maven \(mvn\) is missing.*apt-get install maven"):
        maven.copy("a:b:1:jar", tmp_path, silent)


@pytest.mark.usefixtures("bare_machine")
def test_without_apt_nothing_is_attempted() -> None:
    with pytest.raises(EnvironmentFault) as caught:
        packages.install(("redis-server",), "redis-server", silent)
    assert caught.value.remedy == "Install it: apt-get install redis-server"
    assert caught.value.exit_code == 3


def test_services_are_forbidden_while_packages_are_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    monkeypatch.setattr(packages, "_POLICY", policy)
    with packages.services_forbidden([]):
        assert subprocess.run([policy, "redis-server", "start"], check=False).returncode == 101
    assert not policy.exists()


def test_policy_of_the_machines_owner_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = tmp_path / "policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 0\n")
    monkeypatch.setattr(packages, "_POLICY", policy)
    with packages.services_forbidden([]):
        pass
    assert policy.read_text() == "#!/bin/sh\nexit 0\n"


def test_java_home_that_is_too_old_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("11", "17", "21"):
        runtime = tmp_path / version
        (runtime / "bin").mkdir(parents=True)
        (runtime / "bin" / "java").touch()
        (runtime / "release").write_text(f'JAVA_VERSION="{version}.0.2"\n')
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "11"))
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(java, "_FOLDERS", (str(tmp_path),))
    monkeypatch.setattr(java, "reachable", lambda _folder, _who: True)
    assert java.find(17) == tmp_path / "17" / "bin" / "java"
    assert java.find(21) == tmp_path / "21" / "bin" / "java"
    assert java.find(22) is None


# -- folders


@pytest.mark.parametrize("path", ["file/home", "/proc/millrace-home"])
def test_folder_that_cannot_be_made_is_named(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentFault, match=r"cannot be written.*MILLRACE_HOME"):
        folders.make(tmp_path / path, 0o711)


def test_reachable_sees_a_closed_folder_on_the_way(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    assert not reachable(closed / "inner", _NOBODY)
    assert reachable(Path("/usr/lib"), _NOBODY)
    assert reachable(closed / "inner", None)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
def test_data_goes_around_a_home_that_the_servers_cannot_enter(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    data = folders.data_folder(tmp_path, "redis", account())
    try:
        assert data.parent.parent == Path("/var/tmp")
        assert (tmp_path / "redis").resolve() == data
        assert data.stat().st_uid == _NOBODY.uid
        assert folders.data_folder(tmp_path, "redis", account()) == data
    finally:
        data.rmdir()
        data.parent.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
def test_data_does_not_go_into_a_folder_that_a_stranger_made_first(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    theirs = folders.data_folder(tmp_path, "redis", account()).parent
    try:
        os.chown(theirs, _NOBODY.uid, _NOBODY.gid)
        with pytest.raises(EnvironmentFault, match="belongs to another user"):
            folders.data_folder(tmp_path, "redis", account())
    finally:
        shutil.rmtree(theirs)


def test_a_private_file_is_never_written_through_a_link(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "link").symlink_to(target)
    write_private_file(tmp_path / "link", "settings", None)
    assert target.read_text() == "precious"
    assert (tmp_path / "link").read_text() == "settings"


# -- ports


def test_a_port_somebody_listens_on_is_not_free() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert not ports.free(listener.getsockname()[1])


def test_picked_port_is_free_and_not_among_the_taken() -> None:
    first = ports.pick()
    assert ports.free(first)
    assert ports.pick({first}) != first


# -- downloads


def test_read_only_cache_that_has_everything_is_enough(one_pin: bytes, tmp_path: Path) -> None:
    def fetch(aside: Path) -> None:
        (aside / "thing.jar").write_bytes(one_pin)

    first = downloads.provide("thing", fetch, None, silent)
    tmp_path.chmod(0o555)
    try:
        assert downloads.provide("thing", _never, None, silent) == first
    finally:
        tmp_path.chmod(0o755)


def _never(_aside: Path) -> None:
    raise AssertionError("fetched again")


@pytest.fixture
def one_pin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    content = b"the real thing"
    pinned = {"thing": {"thing.jar": hashlib.sha256(content).hexdigest()}}
    monkeypatch.setattr(downloads, "pins", lambda: pinned)
    monkeypatch.setattr(downloads, "cache_folder", lambda: tmp_path)
    return content


def test_download_is_fetched_once(one_pin: bytes) -> None:
    calls: list[Path] = []

    def fetch(aside: Path) -> None:
        calls.append(aside)
        (aside / "thing.jar").write_bytes(one_pin)

    first = downloads.provide("thing", fetch, None, silent)
    assert downloads.provide("thing", fetch, None, silent) == first
    assert (first / "thing.jar").read_bytes() == one_pin
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("thing.jar", b"something else", "does not have the SHA-256 pinned"),
        ("other.jar", b"the real thing", "not pinned"),
        (None, b"", "lacks thing.jar"),
    ],
)
def test_wrong_download_leaves_nothing_behind(
    one_pin: bytes, tmp_path: Path, name: str | None, content: bytes, complaint: str
) -> None:
    def fetch(aside: Path) -> None:
        if name:
            (aside / name).write_bytes(content)

    with pytest.raises(EnvironmentFault, match=complaint):
        downloads.provide("thing", fetch, None, silent)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []


def test_what_a_killed_download_left_is_removed(one_pin: bytes, tmp_path: Path) -> None:
    (tmp_path / ".thing-abc").mkdir()
    downloads.provide("thing", lambda aside: _write(aside / "thing.jar", one_pin), None, silent)
    assert not (tmp_path / ".thing-abc").exists()


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def test_artifact_that_is_not_to_be_had_is_named_without_a_host(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"Maven could not fetch org\.nowhere:nothing:1:jar") as caught:
        maven.copy("org.nowhere:nothing:1:jar", tmp_path, silent)
    assert "://" not in caught.value.message


def test_every_wheel_has_a_pin_of_its_version() -> None:
    for wheel, version in wheels.VERSIONS.items():
        assert all(f"-{version}-" in file for file in downloads.pins()[wheel])


def test_every_pin_is_a_sha256() -> None:
    assert all(len(digest) == 64 for files in downloads.pins().values() for digest in files.values())


# -- processes and records


def test_identity_is_lost_with_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        identity = identify(child.pid)
        assert identity is not None
        assert alive(identity)
        end(identity, signal.SIGTERM, 10)
    assert not alive(identity)


def test_a_reused_pid_is_somebody_else_and_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stranger = Identity(child.pid, 1)
        assert not alive(stranger)
        end(stranger, signal.SIGKILL, 1)
        assert child.poll() is None
        child.communicate(b"\n", timeout=10)


def test_processes_are_found_by_the_folder_they_work_in(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=tmp_path) as child:
        assert [found.pid for found in inside(tmp_path)] == [child.pid]
        child.communicate(b"\n", timeout=10)
    assert list(inside(tmp_path)) == []


def test_record_of_a_dead_process_remembers_only_its_ports(tmp_path: Path) -> None:
    records = Records(tmp_path)
    running = Running("redis", 7000, 2**22 - 1, 1, tmp_path / "log", tmp_path / "data", "redis://…", (7000, 7001))
    records.write(running, signal.SIGINT)
    assert records.last("redis") == running
    assert records.stop_signal("redis") == signal.SIGINT
    assert records.running() == {}


# -- programs out of wheels, for machines that lack the packages


def test_postgres_comes_out_of_a_wheel_where_the_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_system_folders", list)
    told = subprocess.run([postgres.binaries() / "postgres", "--version"], capture_output=True, text=True, check=True)
    assert told.stdout.startswith("postgres (PostgreSQL) 16.")


def test_redis_comes_out_of_a_wheel_where_apt_cannot_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    told = subprocess.run([local_redis.program(silent), "--version"], capture_output=True, text=True, check=True)
    assert "v=6.2" in told.stdout


def test_java_comes_out_of_a_wheel_where_none_is_new_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(java, "find", lambda _oldest: None)
    runtime, full = java.java21(silent)
    assert java.version_of(runtime) >= 21
    assert not full
