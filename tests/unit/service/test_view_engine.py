"""What a view says of itself in the log: others rely on it before they read the view's rows in a store."""

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from cdc.model import Lsn
from cdc.service.capture.view_output import ViewOutput
from cdc.service.views import engine
from cdc.service.views.view_run import ViewRun
from snapshots.initial.snapshot import EXACT_MARK
from tests.contract.logs import entry
from tests.fix_log import FilledLog
from tests.unit.service.test_views_process import ITEMS
from views.catalog import Catalog
from views.kinds.documents import SETTINGS

DOCUMENTS = SETTINGS(name="copies", root=ITEMS.table)


@pytest.fixture
def run(filled_log: FilledLog, monkeypatch: pytest.MonkeyPatch) -> Iterator[ViewRun]:
    """A view whose turns are the test's, and which reports its position at once."""
    filled_log.record(ITEMS)
    monkeypatch.setattr(engine, "catalog_of", lambda *_: Catalog({ITEMS.table: ITEMS}))
    monkeypatch.setattr(engine, "_COMMIT_SECONDS", -1.0)
    monkeypatch.setattr(engine, "_LOADED_SECONDS", 0.0)
    filled_log.writer.append(entry(1, marks={EXACT_MARK: "0/1"}))
    with closing(engine.open_view(filled_log.settings, DOCUMENTS, filled_log.reader, threading.Event())) as found:
        yield found


@pytest.fixture
def appender(filled_log: FilledLog) -> ViewOutput:
    return ViewOutput(filled_log.writer, filled_log.writer.schemas, filled_log.settings.state, threading.Event())


def _reached(log: FilledLog) -> Lsn:
    return next(one.reached for one in log.reader.consumers() if one.name == "view.copies")


def _until_idle(run: ViewRun) -> None:
    while run.step():
        pass


def test_a_view_has_reached_an_lsn_only_once_capture_has_appended_its_rows(
    run: ViewRun, appender: ViewOutput, filled_log: FilledLog
) -> None:
    _until_idle(run)
    assert _reached(filled_log) == 0, "its first content is handed over, and not yet in the log"
    appender.turn()
    _until_idle(run)
    assert _reached(filled_log) == 110
    filled_log.writer.append(entry(2))
    _until_idle(run)
    assert _reached(filled_log) == 110, "the rows of the next entry are still on their way"
    appender.turn()
    _until_idle(run)
    assert _reached(filled_log) == 210


def test_a_view_that_loads_has_reached_nothing(run: ViewRun, filled_log: FilledLog) -> None:
    run.step()
    assert _reached(filled_log) == 0
