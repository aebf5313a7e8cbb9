"""What the endpoint changes, and for whom: never for a page of another site."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest

from cdc.config.settings import Settings
from cdc.service.http.server import Server
from cdc.service.state import pauses
from deploy.local import ports
from sinks.apply.dead_letters import DeadLetter, DeadLetters

MakeSettings = Callable[..., Settings]
_VALUE = "planted-cell-value"


@pytest.fixture
def settings(settings_of: MakeSettings, tmp_path: Path) -> Settings:
    sinks = [{"kind": "delta", "name": "lake", "path": str(tmp_path / "lake")}, {"kind": "redis"}]
    return settings_of(source={"tables": ["public.orders"]}, sinks=sinks, http={"port": ports.pick()})


@pytest.fixture
def client(settings: Settings) -> Iterator[httpx.Client]:
    address = f"http://127.0.0.1:{settings.http.port}"
    with Server(settings), httpx.Client(base_url=address, timeout=20, trust_env=False) as client:
        yield client


def park(settings: Settings, version: int) -> DeadLetters:
    box = DeadLetters(settings.state / "dead-letters" / "redis")
    now = datetime.now(UTC)
    image = f'{{"id":"{_VALUE}-{version}"}}'
    box.add([DeadLetter("public.orders", image, "u", image, (), version, version, now, 1, "too deep", now)])
    return box


@pytest.mark.parametrize("target", ["redis", "public.orders"])
def test_a_sink_or_a_table_is_paused_and_resumed(client: httpx.Client, settings: Settings, target: str) -> None:
    assert client.post("/v1/pause", json={"target": target}).status_code == 200
    paused = pauses.read(settings.state)
    assert paused.sinks | paused.tables == {target}
    assert client.post("/v1/resume", json={"target": target}).json() == {
        "paused": {"sinks": [], "tables": [], "skipped": {}}
    }


def test_a_table_is_skipped_in_one_sink_and_resumed_there(client: httpx.Client, settings: Settings) -> None:
    order = {"target": "public.orders", "sink": "lake"}
    assert client.post("/v1/skip", json=order).json()["paused"]["skipped"] == {"lake": ["public.orders"]}
    assert pauses.read(settings.state).skipped == {"lake": {"public.orders"}}
    assert client.post("/v1/resume", json=order).json()["paused"]["skipped"] == {}
    for wrong in ({"target": "public.orders"}, {"target": "public.orders", "sink": "nobody"}, {"sink": "lake"}):
        assert client.post("/v1/skip", json=wrong).status_code == 400


@pytest.mark.parametrize("body", [b"", b"[]", b"not json", b'{"target":1}', b'{"target":"nobody"}'])
def test_a_wrong_order_is_refused_and_changes_nothing(client: httpx.Client, settings: Settings, body: bytes) -> None:
    answer = client.post("/v1/pause", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]
    assert pauses.read(settings.state) == pauses.Paused()


def test_dead_letters_are_listed_without_keys_or_values_and_tried_again(
    client: httpx.Client, settings: Settings
) -> None:
    box = park(settings, 7)
    park(settings, 8)
    listed = client.get("/v1/dead-letters")
    assert listed.json()["total"] == 2
    assert {letter["lsn"] for letter in listed.json()["letters"]} == {"0/7", "0/8"}
    assert _VALUE not in listed.text
    assert client.post("/v1/dead-letters/retry", json={"sink": "redis", "lsn": "0/7"}).json() == {"asked": 1}
    assert [letter.version for letter in box.list(retry=True)] == [7]
    assert client.post("/v1/dead-letters/retry", json={}).json() == {"asked": 2}


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"host": "evil.example"},
        {"host": "127.0.0.1.evil.example"},
    ],
)
def test_another_site_cannot_change_anything(client: httpx.Client, settings: Settings, headers: dict[str, str]) -> None:
    sent = {"content-type": "application/json", **headers}
    assert client.post("/v1/pause", content=b'{"target":"redis"}', headers=sent).status_code == 403
    assert pauses.read(settings.state) == pauses.Paused()


def test_the_pages_own_origin_may(client: httpx.Client, settings: Settings) -> None:
    headers = {"origin": f"http://127.0.0.1:{settings.http.port}", "sec-fetch-site": "same-origin"}
    assert client.post("/v1/pause", json={"target": "redis"}, headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:80", "", "[::1"])
def test_a_name_that_suddenly_means_this_machine_reads_nothing(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/status", headers={"host": host}).status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost:8080", "127.0.0.1", "[::1]:9"])
def test_every_name_of_this_machine_is_answered(client: httpx.Client, host: str) -> None:
    assert client.get("/v1/status", headers={"host": host}).status_code == 200


def test_with_a_token_the_host_does_not_matter_and_the_token_does(settings_of: MakeSettings) -> None:
    settings = settings_of(sinks=[{"kind": "redis"}], http={"port": ports.pick(), "token": "open-sesame"})
    address = f"http://127.0.0.1:{settings.http.port}"
    with Server(settings), httpx.Client(base_url=address, trust_env=False) as client:
        sent = {"host": "millrace.example", "authorization": "Bearer open-sesame"}
        assert client.post("/v1/pause", json={"target": "redis"}).status_code == 401
        assert client.post("/v1/pause", json={"target": "redis"}, headers=sent).status_code == 200


def test_a_large_body_is_refused(client: httpx.Client) -> None:
    answer = client.post("/v1/pause", content=b"x" * 100_000, headers={"content-type": "application/json"})
    assert answer.status_code == 413
    assert client.get("/livez").status_code == 200
