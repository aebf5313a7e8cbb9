"""The views process: each view runs and fails on its own."""

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cdc.config.settings import Settings
from cdc.model import Column, PgType, TableId, TableSchema
from cdc.service.capture.view_output import ViewOutput
from cdc.service.state.pauses import Paused
from cdc.service.views.view_run import OpenView
from cdc.service.views.view_workers import ViewWorkers
from tests.contract.logs import entry, read_all
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from views.output_files import OutputFolder

ITEMS = TableSchema(
    TableId("public", "items"), (Column("id", PgType(23, "int4"), key=True), Column("name", PgType(25, "text")))
)
Make = Callable[..., Settings]


@pytest.fixture
def engine(copy_engine: Callable[[], OpenView]) -> OpenView:
    return copy_engine()


@pytest.fixture
def workers(filled_log: FilledLog, engine: OpenView) -> Iterator[ViewWorkers]:
    """Beside a capture that appends what the views hand over."""
    filled_log.record(ITEMS)
    writer, state = filled_log.writer, filled_log.settings.state
    found = ViewWorkers(filled_log.reader, engine)
    with ViewOutput(writer, writer.schemas, state, threading.Event()):
        yield found
        found.close()


def _copy(name: str, **more: object) -> dict[str, object]:
    return {"kind": "copied", "name": name, "source": "public.items", **more}


def _copied(log: FilledLog, view: str) -> list[str]:
    """The keys of the view's rows in the log."""
    found = read_all(log.reader).to_pylist()
    return [f"{json.loads(row['key'])['id']}@{row['commit_lsn']}" for row in found if row["table"] == f"view.{view}"]


def _consumer(log: FilledLog, view: str) -> int:
    return next((one.reached for one in log.reader.consumers() if one.name == f"view.{view}"), 0)


def _follow_until(workers: ViewWorkers, settings: Settings, condition: Callable[[], object]) -> None:
    """A view that is ending starts again only once it has ended."""

    def met() -> object:
        workers.follow(settings, Paused())
        return condition()

    wait_until(met, 30, "the views of these settings")


def _error(workers: ViewWorkers, view: str) -> Any:
    return workers.facts().get(view, {}).get("error")


def test_a_view_follows_the_log_and_goes_on_after_it_was_ended(
    workers: ViewWorkers, filled_log: FilledLog, settings_of: Make
) -> None:
    settings = settings_of(views=[_copy("one")])
    filled_log.writer.append(entry(1))
    workers.follow(settings, Paused())
    wait_until(lambda: _copied(filled_log, "one") == ["1@100", "2@100", "3@100"], 30, "the first rows")
    filled_log.writer.append(entry(2, size=1))
    wait_until(lambda: len(_copied(filled_log, "one")) == 4, 30, "the next row")
    wait_until(lambda: _consumer(filled_log, "one") == 210, 30, "its position")
    assert workers.facts()["one"]["state"] == "live"
    workers.follow(settings_of(), Paused())
    filled_log.writer.append(entry(3, size=1))
    _follow_until(workers, settings, lambda: "one" in workers.facts())
    wait_until(lambda: len(_copied(filled_log, "one")) == 5, 30, "what came meanwhile")
    assert _copied(filled_log, "one") == ["1@100", "2@100", "3@100", "2@200", "3@300"]


def test_a_view_that_fails_for_good_waits_for_a_user_and_no_other_waits_for_it(
    workers: ViewWorkers, filled_log: FilledLog, settings_of: Make
) -> None:
    settings = settings_of(views=[_copy("good"), _copy("bad", fail="final")])
    workers.follow(settings, Paused())
    filled_log.writer.append(entry(1))
    wait_until(lambda: len(_copied(filled_log, "good")) == 3, 30, "the good view's rows")
    wait_until(lambda: _error(workers, "bad"), 30, "the bad view's error")
    facts = workers.facts()["bad"]
    assert (facts["state"], facts["restarts"], facts["kind"]) == ("failed", 1, "copied")
    assert _error(workers, "bad")["message"] == "The copy fails on purpose."
    assert "millrace resume view.bad" in _error(workers, "bad")["remedy"]
    workers.follow(settings, Paused(resumed=1))
    wait_until(lambda: workers.facts()["bad"]["restarts"] == 2, 30, "another try")
    repaired = settings_of(views=[_copy("good"), _copy("bad")])
    _follow_until(workers, repaired, lambda: workers.facts().get("bad", {}).get("restarts") == 0)
    wait_until(lambda: len(_copied(filled_log, "bad")) == 3, 30, "the rows under the new definition")
    assert _error(workers, "bad") == {}


def test_a_view_that_fails_for_now_is_tried_again(
    workers: ViewWorkers, filled_log: FilledLog, settings_of: Make
) -> None:
    workers.follow(settings_of(views=[_copy("one", fail="transient")]), Paused())
    wait_until(lambda: workers.facts()["one"]["restarts"] == 2, 30, "two failures")
    assert _error(workers, "one")["transient"]


def test_a_view_emits_its_whole_content_again_on_request(
    workers: ViewWorkers, filled_log: FilledLog, settings_of: Make
) -> None:
    workers.follow(settings_of(views=[_copy("one")]), Paused())
    filled_log.writer.append(entry(1))
    wait_until(lambda: len(_copied(filled_log, "one")) == 3, 30, "the rows")
    folder = OutputFolder(filled_log.settings.state, "one")
    folder.ask_to_emit_again()
    wait_until(lambda: not folder.asked_to_emit_again(), 30, "the answer")
    assert len(_copied(filled_log, "one")) == 6


def test_a_view_that_asks_for_ticks_gets_them_until_it_is_removed(
    workers: ViewWorkers, filled_log: FilledLog, settings_of: Make
) -> None:
    def ticks() -> int:
        return read_all(filled_log.reader)["table"].to_pylist().count("millrace.ticks")

    workers.follow(settings_of(views=[_copy("one", tick_seconds=0.05)]), Paused())
    wait_until(lambda: ticks() >= 3, 30, "ticks")
    workers.follow(settings_of(), Paused())
    assert OutputFolder(filled_log.settings.state, "one").tick_seconds() == 0
