"""The page as a browser shows it, in real headless Chromium."""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

import cdc.log
from cdc.config.settings import Settings
from cdc.model import LOG_SCHEMA, ZERO_LSN, Entry, Lsn
from cdc.service.http.server import Server
from cdc.service.state import pauses, status
from cdc.service.state.batch_history import BatchHistory
from deploy.local import ports
from sinks.apply.dead_letters import DeadLetter, DeadLetters
from tests.fix_browser import Page
from tests.fix_processes import wait_until

_TABLE = "public.<b>orders</b>"
_VALUE = "planted-cell-value"
Make = Callable[..., Settings]


@pytest.fixture
def settings(settings_of: Make, tmp_path: Path) -> Iterator[Settings]:
    settings = settings_of(
        source={"tables": [_TABLE]},
        sinks=[{"kind": "delta", "path": str(tmp_path / "lake")}, {"kind": "redis"}],
        http={"port": ports.pick()},
    )
    with Server(settings):
        yield settings


def address(settings: Settings) -> str:
    return f"http://127.0.0.1:{settings.http.port}/"


def say(settings: Settings, redis: str, **capture: object) -> None:
    changes = {_TABLE: 1234}
    sinks = {"delta": {"state": "running", "changes": changes}, "redis": {"state": redis, "error": "out of memory"}}
    facts = {"state": "streaming", "changes_total": 4321, "changes": {_TABLE: {"c": 4000, "u": 321}}, **capture}
    status.publish(settings.state, "capture", facts)
    status.publish(settings.state, "apply", {"state": "running", "sinks": sinks})


def park(settings: Settings) -> DeadLetters:
    box = DeadLetters(settings.state / "dead-letters" / "redis")
    now = datetime.now(UTC)
    image = f'{{"id":"{_VALUE}"}}'
    box.add([DeadLetter(_TABLE, image, "u", image, (), 7, 7, now, 1, "nested too deeply", now)])
    return box


def shown(tab: Page, settings: Settings) -> Page:
    tab.dress()
    tab.open(address(settings))
    return tab


def test_it_shows_the_flow_and_a_working_pipeline(tab: Page, settings: Settings) -> None:
    say(settings, "running")
    shown(tab, settings).shows("Everything works")
    tab.shows("1,234")
    tab.shows("4,321")


def test_it_names_what_is_wrong(tab: Page, settings: Settings) -> None:
    say(settings, "waiting")
    shown(tab, settings).shows("out of memory")
    assert "Not ready" in tab.text()
    assert "redis waiting" in tab.text()


def test_a_tables_name_is_text_and_never_markup(tab: Page, settings: Settings) -> None:
    say(settings, "running")
    shown(tab, settings).shows(_TABLE)
    assert tab.run("document.querySelectorAll('td b, th b').length") == 0


def test_it_shows_what_the_slot_costs_and_when_it_is_full(tab: Page, settings: Settings) -> None:
    say(settings, "running", slot_retained_bytes=5_000_000_000, slot_safe_bytes=2_000_000_000)
    shown(tab, settings).shows("5.0 GB of WAL kept for the slot")
    tab.shows("2.0 GB more until the slot is lost")


def test_it_shows_how_far_the_snapshot_is(tab: Page, settings: Settings) -> None:
    progress = {"table": _TABLE, "rows": 500, "estimate": 2000, "tables_done": 1, "tables": 3}
    say(settings, "running", state="snapshot", snapshot=progress)
    shown(tab, settings).shows("500 of about 2,000 rows; 1 of 3 tables done")
    assert tab.run("document.querySelector('progress').value") == 500


def test_a_dead_letter_is_tried_again_from_the_keyboard(tab: Page, settings: Settings) -> None:
    box = park(settings)
    say(settings, "running")
    shown(tab, settings).shows("nested too deeply")
    assert _VALUE not in str(tab.run("document.documentElement.outerHTML"))
    tab.run("document.querySelector('#letters button').focus()")
    tab.press("Enter", "\r")
    tab.shows("1 dead letter(s) will be retried")
    assert [letter.version for letter in box.list(retry=True)] == [7]


def test_a_table_that_waits_is_named_with_its_reason_and_can_be_skipped_and_resumed(
    tab: Page, settings: Settings
) -> None:
    why = {
        "message": "column id has another type",
        "remedy": "Change it back.",
        "since": "2026-01-01T10:20:30+00:00",
        "tries": 3,
    }
    delta: dict[str, object] = {"state": "running", "tables_waiting": {_TABLE: why}}

    def publish() -> None:
        status.publish(settings.state, "capture", {"state": "streaming"})
        sinks = {"delta": delta, "redis": {"state": "running"}}
        status.publish(settings.state, "apply", {"state": "running", "sinks": sinks})

    publish()
    shown(tab, settings).shows("waiting since 10:20:30, tried 3 time(s)")
    for part in ("Not ready", "Change it back.", f"{_TABLE} waiting", "waiting in delta"):
        tab.shows(part)
    tab.run("document.querySelector('[data-id^=\"skip \"]').focus()")
    tab.press("Enter", "\r")
    wait_until(lambda: pauses.read(settings.state).skipped == {"delta": {_TABLE}}, 20, "skipped")
    delta |= {"tables_waiting": {}, "tables_skipped": [_TABLE]}
    publish()
    tab.shows("resuming refills it")
    tab.shows("Everything works")
    tab.run("document.querySelector('#waiting-tables button').focus()")
    tab.press("Enter", "\r")
    wait_until(lambda: pauses.read(settings.state) == pauses.Paused(), 20, "resumed")


def test_a_sink_is_paused_and_the_keyboard_stays_where_it_was(tab: Page, settings: Settings) -> None:
    say(settings, "running")
    shown(tab, settings).shows("Everything works")
    tab.run("document.querySelector('[data-id=\"pause redis\"]').focus()")
    tab.press("Enter", "\r")
    wait_until(lambda: pauses.read(settings.state).sinks == {"redis"}, 20, "redis paused")
    say(settings, "paused")
    tab.shows("resume")
    assert tab.run("document.activeElement.dataset.id") == "pause redis"


def test_a_rows_way_through_the_system_is_told(tab: Page, settings: Settings) -> None:
    row = {"table": "public.t", "op": "c", "key": '{"id":1}', "after": f'{{"id":1,"x":"{_VALUE}"}}', "version": 7}
    rest = {"commit_lsn": 8, "ordinal": 0, "xid": 5, "commit_ts": 0, "schema_id": 1}
    writer = cdc.log.open_writer(settings)
    writer.append(Entry(pa.Table.from_pylist([{**row, **rest}], schema=LOG_SCHEMA), Lsn(9)))
    writer.close()
    BatchHistory(settings.state, "redis", lambda: ZERO_LSN).record(Lsn(9), ())
    cdc.log.open_reader(settings).commit("redis", Lsn(9))
    httpx.get(f"{address(settings)}v1/wait?lsn=0/9&sink=redis", trust_env=False).raise_for_status()
    shown(tab, settings)
    tab.run("document.querySelector('#why [name=table]').value = 'public.t'")
    tab.run("document.querySelector('#why [name=key]').value = '{ \"id\": 1 }'")
    tab.run("document.querySelector('#why').requestSubmit()")
    tab.shows("1 event(s) in the log")
    told = str(tab.run("document.querySelector('#why-events').innerText"))
    for part in ("inserted", "5 · 0", "0/7", "0/8", "0/9", "waiting", "applied, batch 1\n"):
        assert part in f"{told}\n"
    assert "The log has no schema" in str(tab.run("document.querySelector('#why-stores').innerText"))
    assert _VALUE not in tab.text()


def test_why_refuses_a_question_that_it_cannot_answer(settings: Settings) -> None:
    wrong = httpx.get(f"{address(settings)}v1/why", params={"table": "x"}, trust_env=False)
    assert wrong.status_code == 400


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_phone_and_can_be_read_in_the_light_and_in_the_dark(
    tab: Page, settings: Settings, dark: bool
) -> None:
    say(settings, "waiting")
    park(settings)
    tab.dress(width=360, phone=True, dark=dark)
    tab.open(address(settings))
    tab.shows("nested too deeply")
    assert tab.run("document.documentElement.scrollWidth") <= 360
    assert tab.run(_CONTRAST) == []


_CONTRAST = """
(() => {
  const light = (colour) => {
    const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((v) => v / 255)
      .map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (!/, 0\\)$|transparent/.test(colour)) return colour;
    }
    return 'rgb(255, 255, 255)';
  };
  const faint = [];
  for (const node of document.querySelectorAll('h1, h2, h3, p, span, li, th, td, button, a, label, figcaption')) {
    if (!node.innerText || !node.offsetParent) continue;
    const pair = [light(getComputedStyle(node).color), light(ground(node))].sort((a, b) => b - a);
    if ((pair[0] + 0.05) / (pair[1] + 0.05) < 4.5) faint.push(node.tagName + ' ' + node.innerText.slice(0, 30));
  }
  return faint;
})()
"""


def test_a_screen_reader_finds_names_for_everything_that_can_be_used(tab: Page, settings: Settings) -> None:
    say(settings, "running")
    park(settings)
    shown(tab, settings).shows("nested too deeply")
    nodes = tab.call("Accessibility.getFullAXTree")["nodes"]
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes if not node["ignored"]]
    assert [role for role, name in named if role in ("button", "textbox", "link", "img", "region") and not name] == []
    assert {name for role, name in named if role == "heading"} >= {"Millrace", "Flow", "Tables", "Dead letters"}
    assert ("status", "") in [(role, "") for role, _ in named]


def test_everything_that_can_be_used_is_reached_by_the_tab_key(tab: Page, settings: Settings) -> None:
    say(settings, "running")
    shown(tab, settings).shows("Everything works")
    tab.run("document.body.focus()")
    wanted = tab.run("[...document.querySelectorAll('button, input')].filter((n) => n.offsetParent).length")
    met = set()
    for _ in range(40):
        tab.press("Tab")
        met.add(
            tab.run("document.activeElement.dataset.id || document.activeElement.name || document.activeElement.id")
        )
    assert {"pause delta", "pause redis", "table", "key"} <= met
    assert wanted >= 5


def test_it_asks_nobody_but_its_daemon(tab: Page, settings: Settings) -> None:
    say(settings, "running")
    tab.asked.clear()
    shown(tab, settings).shows("Everything works")
    assert {url for url in tab.asked if not url.startswith((address(settings), "data:", "about:"))} == set()
    policy = httpx.get(address(settings), trust_env=False).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_with_a_token_the_page_asks_for_it_and_then_shows_the_pipeline(
    tab: Page, settings_of: Make, tmp_path: Path
) -> None:
    settings = settings_of(sinks=[{"kind": "redis"}], http={"port": ports.pick(), "token": "open-sesame"})
    with Server(settings):
        shown(tab, settings).shows("A token is needed")
        tab.run("document.querySelector('#token input').value = 'open-sesame'")
        tab.run("document.querySelector('#token').requestSubmit()")
        tab.shows("Not ready")
        assert tab.run("document.querySelector('#token').hidden") is True
