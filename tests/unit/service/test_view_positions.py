"""How far views are, and sinks with them: what is said before somebody reads a view's rows in a store."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

import cdc.log
from cdc.config.settings import Settings
from cdc.model import ZERO_LSN, Entry, Lsn
from cdc.ports import LogReader, LogWriter
from cdc.service.observe.health import reasons
from cdc.service.observe.lag import LagInputs, Lags
from cdc.service.observe.positions import Positions
from cdc.service.observe.uncovered import Scope
from cdc.service.state import status
from cdc.service.views.view_run import OpenView
from tests.contract.logs import entry
from tests.scenes.view_rows import rows
from tests.unit.service.test_supervision import NOW

FAILED = {"state": "failed", "error": {"message": "a column is gone", "remedy": "Change it.", "transient": False}}


@pytest.fixture
def settings(settings_of: Callable[..., Settings], copy_engine: Callable[[], OpenView]) -> Settings:
    return settings_of(
        source={"tables": ["public.items"]},
        views=[{"kind": "copied", "name": "totals", "source": "public.items"}],
        sinks=[{"kind": "redis", "name": "cache"}],
    )


@pytest.fixture
def writer(settings: Settings) -> Iterator[LogWriter]:
    with closing(cdc.log.open_writer(settings)) as log:
        yield log


def _apply_all(reader: LogReader) -> None:
    offset, end = reader.head()
    reader.commit("cache", end, offset)


def _view_reached(reader: LogReader, lsn: int) -> None:
    reader.commit("view.totals", Lsn(lsn), reader.start())


def test_a_sink_has_a_view_only_once_it_has_applied_the_entry_with_the_views_rows(
    settings: Settings, writer: LogWriter
) -> None:
    status.publish(settings.state, "capture", {"watermark": 110})
    reader, positions = cdc.log.open_reader(settings), Positions(settings)
    writer.append(entry(1))
    _apply_all(reader)
    wanted, items, totals = Lsn(105), Scope(("cache",), frozenset({"public.items"})), Scope(("cache",))
    assert positions.progress().behind(wanted, items) == []
    assert positions.progress().behind(wanted, totals) == ["cache"], "the view has not reached it"
    writer.append(Entry(rows(100, 1), ZERO_LSN, {"view.totals": "A"}))
    _view_reached(reader, 110)
    assert positions.progress().behind(wanted, totals) == ["cache"], "its rows are in the log, and not yet in the store"
    _apply_all(reader)
    assert positions.progress().behind(wanted, totals) == []


def test_a_sink_that_is_never_at_the_very_head_has_what_was_there_before(settings: Settings, writer: LogWriter) -> None:
    status.publish(settings.state, "capture", {"watermark": 110})
    reader, positions = cdc.log.open_reader(settings), Positions(settings)
    writer.append(entry(1))
    writer.append(Entry(rows(100, 1), ZERO_LSN, {"view.totals": "A"}))
    _view_reached(reader, 110)
    assert positions.progress().behind(Lsn(105), Scope(("cache",))) == ["cache"]
    writer.append(entry(2))
    _apply_all(reader)
    writer.append(entry(3))
    assert positions.progress().behind(Lsn(105), Scope(("cache",))) == []
    assert positions.progress().behind(Lsn(205), Scope(("cache",))) == ["cache"]


def test_a_failed_view_is_named_and_can_be_left_out(settings: Settings, writer: LogWriter) -> None:
    status.publish(settings.state, "capture", {"watermark": 110})
    status.publish(settings.state, "views", {"state": "running", "views": {"totals": FAILED}})
    reader, positions = cdc.log.open_reader(settings), Positions(settings)
    writer.append(entry(1))
    _apply_all(reader)
    found = positions.progress()
    assert found.behind(Lsn(105), Scope(("cache",))) == ["cache"]
    assert found.behind(Lsn(105), Scope(("cache",), except_waiting=True)) == []
    (item,) = [one for one in found.excepted(Scope(("cache",))) if one.kind == "view"]
    assert (item.table, item.message, item.remedy) == (
        "view.totals",
        "view totals has failed: a column is gone",
        "Change it.",
    )


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ({"state": "live", "error": {}}, []),
        ({"state": "loading", "error": {}}, [("view totals", "is loading.")]),
        (FAILED, [("view totals", "failed: a column is gone.")]),
        ({}, [("view totals", "is starting.")]),
    ],
)
def test_a_view_that_is_not_live_keeps_the_pipeline_from_being_ready(said: Any, wanted: Any) -> None:
    at = {"at": NOW.isoformat()}
    parts = {**at, "state": "streaming"}, {**at, "state": "running"}
    views = {**at, "state": "running", "views": {"totals": said}}
    found = reasons(*parts, (), NOW, views=views, view_names=["totals"])
    assert [(reason.part, reason.message) for reason in found] == wanted
    assert reasons(*parts, (), NOW, views=views) == [], "no view of that name is in the file any more"


def test_a_views_process_that_does_not_run_is_named() -> None:
    at = {"at": NOW.isoformat()}
    found = reasons({**at, "state": "streaming"}, {**at, "state": "running"}, (), NOW, view_names=["totals"])
    assert [reason.part for reason in found] == ["views", "view totals"]


def test_a_sinks_table_of_a_view_lags_at_least_as_much_as_the_view() -> None:
    said = {"at": NOW.isoformat(), "state": "streaming", "source_lsn": 500, "watermark": 500}
    lags, now = Lags(), NOW.timestamp()
    for head, at in ((100, 0), (500, 10)):
        commit = {"last_commit_at": f"2026-01-01T00:00:{at:02}+00:00"}
        reached = {"cache": Lsn(head)}
        tables = {"cache": ["public.items", "view.totals"]}
        lags.update(LagInputs(now + at, {**said, **commit}, Lsn(head), reached, tables, {}, {"totals": Lsn(100)}))
    lags.update(
        LagInputs(
            now + 14,
            said,
            Lsn(500),
            {"cache": Lsn(500)},
            {"cache": ["public.items", "view.totals"]},
            {},
            {"totals": Lsn(100)},
        )
    )
    assert lags.views["totals"].bytes == 400
    assert lags.tables["cache", "view.totals"] == lags.views["totals"]
    assert lags.tables["cache", "public.items"].bytes == 0
