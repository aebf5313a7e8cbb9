"""The health endpoint: truthful, bounded, and closed to strangers."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

import cdc.log
from cdc.config import Settings
from cdc.errors import ConfigError, EnvironmentFault
from cdc.model import LOG_SCHEMA, Entry, Lsn, format_lsn
from cdc.service import status
from cdc.service.http import Server, guard
from deploy.local import ports

MakeSettings = Callable[..., Settings]


@pytest.fixture
def settings(settings_of: MakeSettings, tmp_path: Path) -> Settings:
    sinks = [{"kind": "delta", "name": "lake", "path": str(tmp_path / "lake")}]
    return settings_of(sinks=sinks, http={"port": ports.pick()})


@pytest.fixture
def client(settings: Settings) -> Iterator[httpx.Client]:
    address = f"http://127.0.0.1:{settings.http.port}"
    with Server(settings), httpx.Client(base_url=address, timeout=20, trust_env=False) as client:
        yield client


def append(settings: Settings, end: int) -> None:
    writer = cdc.log.open_writer(settings)
    writer.append(Entry(LOG_SCHEMA.empty_table(), Lsn(end), {"reached": str(end)}))
    writer.close()


def well(settings: Settings, watermark: int = 0) -> None:
    status.publish(settings.state, "capture", {"state": "streaming", "watermark": watermark})
    status.publish(settings.state, "apply", {"state": "running", "sinks": {"lake": {"state": "running"}}})


def test_it_is_alive_before_anything_else_is(client: httpx.Client) -> None:
    assert client.get("/livez").status_code == 200


@pytest.mark.parametrize("path", ["/readyz", "/healthz", "/health"])
def test_it_is_not_ready_before_the_parts_are_and_says_why(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 503
    assert {reason["part"] for reason in answer.json()["reasons"]} == {"capture", "apply", "sink lake"}


def test_it_is_ready_when_every_part_works(client: httpx.Client, settings: Settings) -> None:
    well(settings)
    assert client.get("/readyz").json() == {"ready": True, "reasons": []}


def test_waiting_ends_when_the_sink_has_applied_the_entry(client: httpx.Client, settings: Settings) -> None:
    append(settings, 500)
    query = {"lsn": format_lsn(Lsn(500)), "sink": "lake", "timeout": "10"}
    thread = threading.Timer(0.3, lambda: cdc.log.open_reader(settings).commit("lake", Lsn(500)))
    thread.start()
    assert client.get("/v1/wait", params=query).json()["reached"] is True
    assert client.get("/v1/cut").json() == {"lsn": format_lsn(Lsn(500))}


def test_waiting_for_an_lsn_between_transactions_needs_the_readers_word(
    client: httpx.Client, settings: Settings
) -> None:
    append(settings, 500)
    cdc.log.open_reader(settings).commit("lake", Lsn(500))
    query = {"lsn": format_lsn(Lsn(700)), "timeout": "0.1"}
    assert client.get("/v1/wait", params=query).status_code == 504
    well(settings, watermark=700)
    assert client.get("/v1/wait", params=query).status_code == 200


@pytest.mark.parametrize("query", ["", "lsn=nonsense", "lsn=0/1&timeout=soon"])
def test_a_wrong_question_gets_an_example(client: httpx.Client, query: str) -> None:
    answer = client.get(f"/v1/wait?{query}")
    assert answer.status_code == 400
    assert "lsn=16/B374D848" in answer.json()["error"]


def test_an_unknown_sink_is_named(client: httpx.Client) -> None:
    answer = client.get("/v1/wait?lsn=0/1&sink=nobody")
    assert answer.status_code == 404
    assert "nobody" in answer.json()["error"]


def test_metrics_give_the_lag_of_each_sink(client: httpx.Client, settings: Settings) -> None:
    append(settings, 500)
    cdc.log.open_reader(settings).commit("lake", Lsn(200))
    assert 'millrace_sink_lag_bytes{sink="lake"} 300' in client.get("/metrics").text


def test_only_get_is_answered_and_no_banner_is_shown(client: httpx.Client) -> None:
    assert client.post("/v1/status").status_code == 405
    assert client.get("/../../etc/passwd").status_code == 404
    assert "server" not in client.get("/livez").headers


def test_a_huge_header_is_refused_and_the_next_request_answered(client: httpx.Client) -> None:
    assert client.get("/livez", headers={"x": "y" * 100_000}).status_code >= 400
    assert client.get("/livez").status_code == 200


def test_two_hundred_slow_clients_do_not_delay_the_next(client: httpx.Client, settings: Settings) -> None:
    slow = [socket.create_connection(("127.0.0.1", settings.http.port)) for _ in range(200)]
    for connection in slow:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-slow: ")
    before = time.monotonic()
    assert client.get("/livez").status_code == 200
    assert time.monotonic() - before < 10
    for connection in slow:
        connection.close()


def test_another_address_than_loopback_needs_a_token(settings_of: MakeSettings) -> None:
    with pytest.raises(ConfigError, match=r"http\.token"):
        guard(settings_of(http={"host": "0.0.0.0"}).http)


def test_with_a_token_only_its_holder_is_answered(settings_of: MakeSettings) -> None:
    settings = settings_of(http={"port": ports.pick(), "token": "open-sesame"})
    with Server(settings), httpx.Client(base_url=f"http://127.0.0.1:{settings.http.port}", trust_env=False) as client:
        assert client.get("/v1/status").status_code == 401
        assert client.get("/v1/status", headers={"authorization": "Bearer wrong"}).status_code == 401
        assert client.get("/v1/status", headers={"authorization": "Bearer open-sesame"}).status_code == 200
        assert client.get("/livez").status_code == 200


def test_a_taken_port_is_named(settings: Settings) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", settings.http.port))
        other.listen()
        with pytest.raises(EnvironmentFault, match=str(settings.http.port)), Server(settings):
            pass
