"""What is open to others while a pipeline runs: ports on this machine only, which obey no stranger, and no file."""

import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.fix_pipeline import Pipeline

pytestmark = pytest.mark.spark


@pytest.fixture(scope="module")
def running(shared_pipeline: Pipeline) -> Iterator[Pipeline]:
    """A pipeline that was started by somebody whose files are open to everybody."""
    before = os.umask(0)
    try:
        daemon = shared_pipeline.start()
    finally:
        os.umask(before)
    shared_pipeline.settle()
    yield shared_pipeline
    assert daemon.terminate(60) == 0


def listening(pid: int) -> list[tuple[str, int, str]]:
    """Address, port and process of everything that a process and its children listen on."""
    here = psutil.Process(pid)
    return [
        (entry.laddr.ip, entry.laddr.port, process.name())
        for process in (here, *here.children(recursive=True))
        for entry in process.net_connections("inet")
        if entry.status == psutil.CONN_LISTEN
    ]


def is_local(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


def answered(port: int, said: bytes) -> bytes:
    """What a port gives to somebody who does not know the secret."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
        stranger.sendall(said)
        stranger.settimeout(3)
        try:
            return stranger.recv(4096)
        except (TimeoutError, ConnectionError):
            return b""


def test_spark_listens_on_this_machine_only_and_obeys_no_stranger(running: Pipeline) -> None:
    assert running.daemon is not None
    found = listening(running.daemon.pid)
    assert [entry for entry in found if not is_local(entry[0])] == []
    others = {port for _, port, _ in found} - {running.settings.http.port}
    assert others, "Spark's own ports"
    for port in others:
        assert not answered(port, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")
        # py4j: ask the gateway for java.lang.System without its secret
        assert b"java.lang" not in answered(port, b"r\nu\nSystem\nrj\ne\n")


def test_what_lies_on_disk_is_for_us_alone(running: Pipeline) -> None:
    """Log, dead letters and scratch hold values; so nobody else may read them, whatever the umask was."""
    state = running.settings.state
    files = [path for path in state.rglob("*") if not path.is_symlink() and path.is_file()]
    assert len(files) > 10
    open_to_others = [path for path in files if path.stat().st_mode & 0o077 and not _sheltered(path, state)]
    assert [str(path.relative_to(state)) for path in open_to_others] == []


def _sheltered(path: Path, state: Path) -> bool:
    """Whether a folder on the way to it is closed to others."""
    return any(parent.stat().st_mode & 0o077 == 0 for parent in path.parents if parent.is_relative_to(state))
