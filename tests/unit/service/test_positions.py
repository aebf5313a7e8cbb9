"""How far a sink is: what is asked before somebody reads a store, and must never be more than the store holds."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

import cdc.log
from cdc.config.settings import Settings
from cdc.model import LOG_SCHEMA, Entry, Lsn, TableId
from cdc.ports import LogWriter
from cdc.service.capture.status import CaptureStatus
from cdc.service.observe.positions import Positions
from cdc.service.observe.uncovered import Scope
from cdc.service.state import status
from cdc.service.state.sink_positions import consumer_name
from tests.contract.logs import rows

POINT = Lsn(1000)
EARLIER = Lsn(500)
"""A commit from before the snapshot, whose row may be in any of its pieces."""


@pytest.fixture
def settings(settings_of: Callable[..., Settings]) -> Settings:
    source = {"host": "127.0.0.1", "database": "shop", "user": "me", "tables": ["public.users"]}
    return settings_of(source=source, sinks=[{"kind": "redis", "name": "cache", "url": "redis://127.0.0.1:1"}])


@pytest.fixture
def writer(settings: Settings) -> Iterator[LogWriter]:
    with closing(cdc.log.open_writer(settings)) as log:
        yield log


def pieces(writer: LogWriter) -> None:
    """A snapshot in three pieces, without its last entry."""
    for number in range(3):
        writer.append(Entry(rows(999, number, op="r"), Lsn(POINT - 1), {"piece": str(number)}))


def said(settings: Settings, exact: str) -> None:
    status.publish(settings.state, "capture", {"history_exact_from": exact, "watermark": 2000})


def test_a_sink_with_a_part_of_the_snapshot_has_reached_nothing(settings: Settings, writer: LogWriter) -> None:
    pieces(writer)
    said(settings, "")
    reader = cdc.log.open_reader(settings)
    first = next(iter(reader.read(reader.start())))
    reader.commit("cache", first.end, first.offset)
    assert Positions(settings).reached() == {"cache": 0}
    assert Positions(settings).behind(EARLIER) == ["cache"]
    writer.append(Entry(LOG_SCHEMA.empty_table(), POINT, {"snapshot": "done"}))
    said(settings, "0/3E8")
    assert Positions(settings).behind(EARLIER) == ["cache"]


def test_with_the_last_entry_it_has_everything_that_was_committed_before(settings: Settings, writer: LogWriter) -> None:
    pieces(writer)
    writer.append(Entry(LOG_SCHEMA.empty_table(), POINT, {"snapshot": "done"}))
    said(settings, "0/3E8")
    reader = cdc.log.open_reader(settings)
    last = list(reader.read(reader.start()))[-1]
    reader.commit("cache", last.end, last.offset)
    assert Positions(settings).reached() == {"cache": POINT}
    assert Positions(settings).behind(EARLIER) == Positions(settings).behind(Lsn(2000)) == []


def test_where_nobody_takes_a_snapshot_the_position_alone_counts(settings: Settings, writer: LogWriter) -> None:
    writer.append(Entry(rows(400, 1), EARLIER))
    cdc.log.open_reader(settings).commit("cache", EARLIER)
    assert Positions(settings).reached() == {"cache": EARLIER}


def test_the_first_word_of_a_capture_that_has_its_snapshot_to_read_lets_no_position_count(
    settings: Settings, writer: LogWriter
) -> None:
    pieces(writer)
    reader = cdc.log.open_reader(settings)
    last = list(reader.read(reader.start()))[-1]
    reader.commit("cache", last.end, last.offset)
    with CaptureStatus(settings.state, ""):
        assert Positions(settings).reached() == {"cache": 0}
        assert Positions(settings).behind(EARLIER) == ["cache"]


def test_the_word_of_a_reader_that_is_gone_does_not_count(settings: Settings, writer: LogWriter) -> None:
    writer.append(Entry(rows(400, 1), EARLIER))
    cdc.log.open_reader(settings).commit("cache", EARLIER)
    child = os.fork()
    if not child:
        status.publish(settings.state, "capture", {"watermark": 2000})
        os._exit(0)
    os.waitpid(child, 0)
    assert Positions(settings).behind(EARLIER) == []
    assert Positions(settings).behind(Lsn(2000)) == ["cache"]
    status.publish(settings.state, "capture", {"watermark": 2000})
    assert Positions(settings).behind(Lsn(2000)) == []


def test_a_table_that_is_held_back_counts_unless_it_has_left_the_pipeline(
    settings: Settings, writer: LogWriter
) -> None:
    writer.append(Entry(rows(400, 1), EARLIER))
    reader = cdc.log.open_reader(settings)
    for name, place in (("public.users", Lsn(100)), ("public.left", Lsn(50))):
        reader.commit(consumer_name("cache", TableId.parse(name)), place)
    reader.commit("cache", EARLIER)
    assert Positions(settings).reached() == {"cache": 100}
    progress = Positions(settings).progress()
    assert progress.behind(EARLIER, Scope(("cache",))) == ["cache"]
    assert progress.behind(EARLIER, Scope(("cache",), except_waiting=True)) == []
    assert [item.table for item in progress.excepted(Scope(("cache",)))] == ["public.users"]
