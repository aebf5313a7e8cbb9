"""A dropped view's rows leave every store, and it stays away until it is resumed."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cdc.config.settings import Settings
from cdc.service.apply.sink_worker import requests_of
from cdc.service.capture.view_output import ViewOutput
from cdc.service.state import pauses
from cdc.service.state.pauses import Paused
from cdc.service.views.view_run import OpenView
from cdc.service.views.view_workers import ViewWorkers
from sinks.fold.folded import of_slices
from tests.contract.logs import entry, read_all
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from tests.scenes.view_rows import TABLE, output
from tests.unit.service.test_views_process import ITEMS
from views.dropped import drop, is_done, is_dropped
from views.output_files import OutputFolder


def _let_settle(state: Path) -> None:
    """As if the file had been there for some seconds."""
    past = time.time() - 60
    os.utime(state / "views" / "totals" / "dropped", (past, past))


def test_a_drop_truncates_the_table_and_makes_what_is_still_handed_over_stale(
    filled_log: FilledLog, state_dir: Path
) -> None:
    filled_log.writer.append(entry(1))
    folder = OutputFolder(state_dir, "totals")
    folder.put(output("", "A", 109, 7, 8))
    ViewOutput(filled_log.writer, filled_log.writer.schemas, state_dir, threading.Event()).turn()
    drop(state_dir, "totals")
    capture = ViewOutput(filled_log.writer, filled_log.writer.schemas, state_dir, threading.Event())
    capture.turn()
    assert not is_done(state_dir, "totals"), "the sinks may not have seen it yet"
    _let_settle(state_dir)
    folder.put(output("A", "B", 109, 9))
    capture = ViewOutput(filled_log.writer, filled_log.writer.schemas, state_dir, threading.Event())
    capture.turn()
    assert is_done(state_dir, "totals")
    assert filled_log.writer.progress().marks["view.totals"] == ""
    assert not folder.pending()
    filled_log.record(ITEMS)
    slices = list(filled_log.reader.read(filled_log.reader.start()))
    (batch,) = [one for one in of_slices(slices, filled_log.reader.schemas).batches if one.schema.table == TABLE]
    assert (batch.rows.num_rows, batch.truncated) == (0, 110)
    drop(state_dir, "totals")
    _let_settle(state_dir)
    ViewOutput(filled_log.writer, filled_log.writer.schemas, state_dir, threading.Event()).turn()
    assert read_all(filled_log.reader)["op"].to_pylist().count("t") == 2, "it can be repeated"


@pytest.mark.usefixtures("copy_engine")
def test_sinks_of_every_table_take_the_truncate_also_of_a_view_that_left_the_file(
    settings_of: Callable[..., Settings], state_dir: Path
) -> None:
    sinks = [{"kind": "memory", "name": "all"}, {"kind": "memory", "name": "one", "tables": ["public.items"]}]
    settings = settings_of(source={"tables": ["public.items"]}, sinks=sinks)
    drop(state_dir, "totals")
    tables = [requests_of(settings, sink, Paused()).tables for sink in settings.sinks]
    assert tables == [{ITEMS.table, TABLE}, {ITEMS.table}]


def test_a_dropped_view_ends_with_its_state_and_begins_again_when_it_is_resumed(
    settings_of: Callable[..., Settings], filled_log: FilledLog, copy_engine: Callable[[], OpenView]
) -> None:
    view = {"kind": "copied", "name": "totals", "source": "public.items"}
    settings = settings_of(source={"tables": ["public.items"]}, views=[view])
    filled_log.record(ITEMS)
    workers = ViewWorkers(filled_log.reader, copy_engine())
    reader, state = filled_log.reader, settings.state
    reader.commit("view.totals", filled_log.writer.progress().end)
    workers.follow(settings, Paused())
    (state / "views" / "totals" / "state").mkdir(parents=True)
    drop(state, "totals")

    def forgotten() -> bool:
        workers.follow(settings, pauses.read(state))
        return not reader.consumers()

    wait_until(forgotten, 30, "the end of the view")
    assert workers.facts() == {"totals": {"state": "dropped", "kind": "copied", "error": {}}}
    assert [path.name for path in (state / "views" / "totals").iterdir()] == ["dropped"]
    (state / "views" / "totals" / "state").mkdir()
    again = ViewWorkers(filled_log.reader, copy_engine())
    again.follow(settings, Paused())  # a process that starts after the drop
    assert not (state / "views" / "totals" / "state").exists()
    pauses.resume(settings, "view.totals")
    assert not is_dropped(state, "totals")
    workers.follow(settings, pauses.read(state))
    assert workers.facts()["totals"]["state"] != "dropped"
    workers.close()
