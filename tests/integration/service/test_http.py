"""The health endpoint: truthful, bounded, and closed to strangers."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

import cdc.log
from cdc.config.settings import Settings
from cdc.errors import ConfigError, EnvironmentFault
from cdc.model import LOG_SCHEMA, Entry, Lsn, TableId, format_lsn
from cdc.service.http.guard import guard
from cdc.service.http.server import Server
from cdc.service.observe.observer import Observation
from cdc.service.observe.positions import Positions
from cdc.service.state import status
from cdc.service.state.sink_positions import consumer_name
from deploy.local import ports
from sinks.apply.dead_letters import DeadLetter, DeadLetters
from tests.fix_processes import wait_until

MakeSettings = Callable[..., Settings]


@pytest.fixture
def settings(settings_of: MakeSettings, tmp_path: Path) -> Settings:
    sinks = [{"kind": "delta", "name": "lake", "path": str(tmp_path / "lake")}]
    return settings_of(source={"tables": ["public.orders", "public.users"]}, sinks=sinks, http={"port": ports.pick()})


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
    wait_until(lambda: client.get("/readyz").status_code == 200, 10, "ready")
    assert client.get("/readyz").json() == {"ready": True, "state": "active", "reasons": [], "except": []}


def test_waiting_ends_when_the_sink_has_applied_the_entry(client: httpx.Client, settings: Settings) -> None:
    append(settings, 500)
    query = {"lsn": format_lsn(Lsn(500)), "sink": "lake", "timeout": "10"}
    thread = threading.Timer(0.3, lambda: cdc.log.open_reader(settings).commit("lake", Lsn(500)))
    thread.start()
    assert client.get("/v1/wait", params=query).json()["reached"] is True
    assert client.get("/v1/cut").json() == {"lsn": format_lsn(Lsn(500)), "except": []}


def test_waiting_for_an_lsn_between_transactions_needs_the_readers_word(
    client: httpx.Client, settings: Settings
) -> None:
    append(settings, 500)
    cdc.log.open_reader(settings).commit("lake", Lsn(500))
    query = {"lsn": format_lsn(Lsn(700)), "timeout": "0.1"}
    assert client.get("/v1/wait", params=query).status_code == 504
    well(settings, watermark=700)
    assert client.get("/v1/wait", params={**query, "timeout": "10"}).status_code == 200


@pytest.fixture
def waiting(settings: Settings) -> str:
    """A pipeline at LSN 500, in which one table waits at 300 and another has dead letters; returns that LSN."""
    append(settings, 300)
    append(settings, 500)
    reader = cdc.log.open_reader(settings)
    reader.commit(consumer_name("lake", TableId.parse("public.orders")), Lsn(300))
    reader.commit("lake", Lsn(500))
    said = {"message": "column id has another type.", "remedy": "Change it back."}
    sink = {"state": "running", "tables_waiting": {"public.orders": said}}
    now = datetime.now(UTC)
    letters = [DeadLetter("public.users", key, "u", "{}", (), 400, 400, now, 1, "too deep", now) for key in ("a", "b")]
    DeadLetters(settings.state / "dead-letters" / "lake").add(letters)
    status.publish(settings.state, "capture", {"state": "streaming", "watermark": 0})
    status.publish(settings.state, "apply", {"state": "running", "sinks": {"lake": sink}})
    return format_lsn(Lsn(500))


def test_waiting_for_a_sink_with_a_waiting_table_says_no_and_which(client: httpx.Client, waiting: str) -> None:
    answer = client.get("/v1/wait", params={"lsn": waiting, "timeout": "0.1"})
    assert (answer.status_code, answer.json()["reached"], answer.json()["behind"]) == (504, False, ["lake"])
    assert {(item["kind"], item["sink"], item["table"]) for item in answer.json()["except"]} == {
        ("waiting", "lake", "public.orders"),
        ("dead letters", "lake", "public.users"),
    }


@pytest.mark.parametrize("query", [{"except_waiting": "true"}, {"table": "public.users"}])
def test_waiting_without_that_table_is_answered_and_dead_letters_are_said(
    client: httpx.Client, waiting: str, query: dict[str, str]
) -> None:
    answer = client.get("/v1/wait", params={"lsn": waiting, "timeout": "10", **query})
    assert (answer.status_code, answer.json()["reached"]) == (200, True)
    messages = [item["message"] for item in answer.json()["except"]]
    assert "2 dead letters of public.users" in messages


def test_the_cut_is_as_far_as_the_waiting_table_and_says_so(client: httpx.Client, waiting: str) -> None:
    def cut(query: str = "") -> dict[str, Any]:
        return dict(client.get(f"/v1/cut{query}").json())

    wait_until(lambda: cut()["lsn"] == format_lsn(Lsn(300)), 10, "the held table's place")
    assert cut("?except_waiting=true")["lsn"] == waiting
    assert cut("?table=public.users")["lsn"] == waiting
    assert {item["kind"] for item in cut("?except_waiting=true")["except"]} == {"waiting", "dead letters"}


def test_a_waiting_table_is_named_in_readiness_metrics_and_the_picture(client: httpx.Client, waiting: str) -> None:
    wait_until(lambda: "waits" in client.get("/readyz").text, 10, "a look")
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert answer.json()["reasons"] == [
        {
            "part": "sink lake",
            "message": "table public.orders waits: column id has another type.",
            "remedy": "Change it back.",
        }
    ]
    assert {item["kind"] for item in answer.json()["except"]} == {"waiting", "dead letters"}
    metrics = client.get("/metrics").text
    assert 'millrace_table_waiting{sink="lake",table="public.orders"} 1' in metrics
    flow = client.get("/v1/flow").json()
    assert flow["sinks"][0]["waiting"]["public.orders"]["remedy"] == "Change it back."


def test_a_waiting_table_does_not_make_the_others_look_late(
    client: httpx.Client, waiting: str, settings: Settings
) -> None:
    moved = {
        name: {"lsn": 450, "at": datetime(2020, 1, 1, tzinfo=UTC).isoformat()}
        for name in ("public.orders", "public.users")
    }
    status.publish(
        settings.state, "capture", {"state": "streaming", "watermark": 500, "source_lsn": 500, "tables": moved}
    )

    def lags() -> dict[str, float]:
        tables = client.get("/v1/flow").json()["tables"]
        return {name: one["lag_seconds"]["lake"] for name, one in tables.items()}

    wait_until(lambda: lags()["public.orders"] > 1000, 10, "the lag of the waiting table")
    assert lags()["public.users"] == 0


def test_an_unknown_table_is_named(client: httpx.Client) -> None:
    answer = client.get("/v1/wait?lsn=0/1&table=public.nobody")
    assert answer.status_code == 404
    assert "public.nobody" in answer.json()["error"]


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
    wait_until(lambda: 'millrace_sink_lag_bytes{sink="lake"} 300' in client.get("/metrics").text, 10, "the lag")


def test_only_get_is_answered_and_no_banner_is_shown(client: httpx.Client) -> None:
    assert client.post("/v1/status", json={}).status_code == 405
    assert client.get("/v1/pause").status_code == 405
    assert client.get("/../../etc/passwd").status_code == 404
    assert "server" not in client.get("/livez").headers


def test_a_huge_header_is_refused_and_the_next_request_answered(client: httpx.Client) -> None:
    assert client.get("/livez", headers={"x": "y" * 100_000}).status_code >= 400
    assert client.get("/livez").status_code == 200


@pytest.fixture
def slow_clients(settings: Settings, client: httpx.Client) -> Iterator[list[socket.socket]]:
    """Two hundred connections that have begun a request and do not end it."""
    slow = [socket.create_connection(("127.0.0.1", settings.http.port)) for _ in range(200)]
    for connection in slow:
        connection.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\nx-slow: ")
    yield slow
    for connection in slow:
        connection.close()


def test_two_hundred_slow_clients_do_not_delay_the_next(
    client: httpx.Client, slow_clients: list[socket.socket]
) -> None:
    before = time.monotonic()
    for _ in range(20):
        assert client.get("/livez").status_code == 200
    assert time.monotonic() - before < 10


def test_a_head_that_does_not_come_to_its_end_is_not_waited_for(slow_clients: list[socket.socket]) -> None:
    for connection in slow_clients:
        connection.settimeout(30)
        connection.sendall(b"y")  # a byte now and then does not keep it open
    assert {_closed(connection) for connection in slow_clients} == {True}


def _closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_two_hundred_waiting_clients_do_not_delay_the_next(client: httpx.Client, settings: Settings) -> None:
    append(settings, 500)
    request = b"GET /v1/wait?lsn=0/FFFF&timeout=50 HTTP/1.1\r\nhost: localhost\r\n\r\n"
    waiting = [socket.create_connection(("127.0.0.1", settings.http.port)) for _ in range(200)]
    for connection in waiting:
        connection.sendall(request)
    before = time.monotonic()
    for _ in range(20):
        assert client.get("/livez").status_code == 200
    assert time.monotonic() - before < 10
    append(settings, 0xFFFF)
    cdc.log.open_reader(settings).commit("lake", Lsn(0xFFFF))
    for connection in waiting:
        connection.settimeout(30)
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.close()


def test_a_log_that_hangs_delays_neither_life_nor_metrics(
    settings: Settings, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hung = threading.Event()
    monkeypatch.setattr(Positions, "head", lambda _: hung.wait(30) and Lsn(0))
    try:
        before = time.monotonic()
        assert client.get("/livez").status_code == 200
        assert client.get("/metrics").status_code == 200
        assert client.get("/v1/wait?lsn=0/FFFF&timeout=0.1").status_code == 504
        assert time.monotonic() - before < 10
    finally:
        hung.set()


def test_a_look_that_is_old_blames_the_log_and_not_the_parts() -> None:
    now = datetime.now(UTC)
    capture, apply = ({"state": state, "at": now.isoformat()} for state in ("streaming", "running"))
    assert Observation(now.timestamp() - 5, capture, apply).reasons(()) == []
    blamed = Observation(now.timestamp() - 60, capture, apply).reasons(())
    assert [(reason.part, "has not answered for 6" in reason.message) for reason in blamed] == [("log", True)]


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
        assert client.get("/").status_code == 200  # the page holds nothing; it asks for the token itself


def test_a_taken_port_is_named(settings: Settings) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", settings.http.port))
        other.listen()
        with pytest.raises(EnvironmentFault, match=str(settings.http.port)), Server(settings):
            pass
