"""The page as a browser shows it, in real headless Chromium."""

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import cdc.log
from cdc.config import Settings
from cdc.errors import EnvironmentFault
from cdc.model import LOG_SCHEMA, Entry, Lsn
from cdc.service import status
from cdc.service.http import Server
from deploy.local import packages, ports

_QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=5000",
]


@pytest.fixture(scope="session")
def chromium() -> str:
    """Its path; installed where that is allowed."""
    if shutil.which("chromium") is None:
        try:
            packages.install(["chromium"], "Chromium", lambda line: None)
        except EnvironmentFault as fault:
            pytest.skip(str(fault))
    return shutil.which("chromium") or ""


@pytest.fixture
def settings(settings_of: Callable[..., Settings], tmp_path: Path) -> Iterator[Settings]:
    settings = settings_of(
        sinks=[{"kind": "delta", "path": str(tmp_path / "lake")}, {"kind": "redis"}], http={"port": ports.pick()}
    )
    with Server(settings):
        yield settings


def say(settings: Settings, redis: str) -> None:
    changes = {"public.<b>orders</b>": 1234}
    sinks = {"delta": {"state": "running", "changes": changes}, "redis": {"state": redis, "error": "out of memory"}}
    status.publish(settings.state, "capture", {"state": "streaming", "changes_total": 4321})
    status.publish(settings.state, "apply", {"state": "running", "sinks": sinks})


def seen(chromium: str, settings: Settings, profile: Path, *options: str) -> str:
    """The page's document after its scripts have run."""
    address = f"http://127.0.0.1:{settings.http.port}/"
    command = [chromium, *_QUIET, f"--user-data-dir={profile}", *options, "--dump-dom", address]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_it_shows_the_flow_and_a_working_pipeline(chromium: str, settings: Settings, tmp_path: Path) -> None:
    say(settings, "running")
    page = seen(chromium, settings, tmp_path / "profile")
    assert "Everything works" in page
    assert "1,234" in page
    assert "4,321" in page


def test_it_names_what_is_wrong(chromium: str, settings: Settings, tmp_path: Path) -> None:
    say(settings, "waiting")
    page = seen(chromium, settings, tmp_path / "profile")
    assert "Not ready" in page
    assert "out of memory" in page


def test_a_tables_name_is_text_and_never_markup(chromium: str, settings: Settings, tmp_path: Path) -> None:
    say(settings, "running")
    page = seen(chromium, settings, tmp_path / "profile")
    assert "public.&lt;b&gt;orders&lt;/b&gt;" in page
    assert "<b>orders" not in page


def test_a_rows_way_through_the_log_can_be_looked_up(settings: Settings) -> None:
    import httpx

    row = {"table": "public.t", "op": "c", "key": '{"id":1}', "after": '{"id":1,"secret":"value"}', "version": 7}
    rest = {"commit_lsn": 8, "ordinal": 0, "xid": 5, "commit_ts": 0, "schema_id": 1}
    writer = cdc.log.open_writer(settings)
    writer.append(Entry(pa.Table.from_pylist([{**row, **rest}], schema=LOG_SCHEMA), Lsn(9)))
    writer.close()
    cdc.log.open_reader(settings).commit("redis", Lsn(9))
    query = {"table": "public.t", "key": '{ "id": 1 }'}
    httpx.get(f"http://127.0.0.1:{settings.http.port}/v1/wait?lsn=0/9&sink=redis", trust_env=False).raise_for_status()
    answer = httpx.get(f"http://127.0.0.1:{settings.http.port}/v1/why", params=query, trust_env=False)
    (told,) = answer.json()["events"]
    assert (told["event"]["version"], told["event"]["xid"], told["entry"]) == ("0/7", 5, "0/9")
    assert told["sinks"] == {"delta": "waiting", "redis": "applied"}
    assert "value" not in answer.text
    wrong = httpx.get(f"http://127.0.0.1:{settings.http.port}/v1/why", params={"table": "x"}, trust_env=False)
    assert wrong.status_code == 400
