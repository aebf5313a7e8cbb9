"""What listens while a pipeline runs: on this machine only, the page, and nothing that obeys strangers."""

import ipaddress
import socket

import psutil
import pytest

from tests.fix_pipeline import Pipeline

pytestmark = pytest.mark.spark


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


def test_spark_listens_on_this_machine_only_and_obeys_no_stranger(pipeline: Pipeline) -> None:
    daemon = pipeline.start()
    pipeline.settle()
    found = listening(daemon.pid)
    assert [entry for entry in found if not is_local(entry[0])] == []
    others = {port for _, port, _ in found} - {pipeline.settings.http.port}
    assert others, "Spark's own ports"
    for port in others:
        assert not answered(port, b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n").startswith(b"HTTP/1.1 200")
        # py4j: ask the gateway for java.lang.System without its secret
        assert b"java.lang" not in answered(port, b"r\nu\nSystem\nrj\ne\n")
    assert daemon.terminate(60) == 0
