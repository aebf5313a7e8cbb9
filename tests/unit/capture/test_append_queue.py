"""Between the reading thread and the log: order, merging, bounds, and errors that come back to the reader."""

import threading
from collections.abc import Iterator

import pyarrow as pa
import pytest

from cdc.capture.replication.append_counts import AppendCounts
from cdc.capture.replication.append_queue import AppendQueue
from cdc.capture.transactions.assembly import SpilledTransaction
from cdc.clock import SystemClock
from cdc.errors import LogFenced, LogFull
from cdc.model import LOG_SCHEMA, Entry, Lsn, Progress
from cdc.ports import Schemas
from tests.corpus.registry import Registry
from tests.fix_processes import wait_until
from tests.properties.test_assembly import Disk
from tests.properties.test_assembly import _table as rows_of


class Memory:
    """A log in a list, with a gate, and errors to raise first."""

    def __init__(self, *errors: Exception) -> None:
        self.entries: list[Entry] = []
        self.gate = threading.Event()
        self.gate.set()
        self._errors = list(errors)
        self.crowded = False
        self.spools = 0

    def progress(self) -> Progress:
        return Progress(self.entries[-1].end if self.entries else Lsn(0))

    def append(self, entry: Entry) -> None:
        self.gate.wait(10)
        if self._errors:
            raise self._errors.pop(0)
        self.entries.append(entry)

    def spool(self) -> "_Spool":
        self.spools += 1
        return _Spool(self)

    @property
    def schemas(self) -> Schemas:
        return Registry()

    @property
    def append_interval(self) -> float:
        return 0.03

    def maintain(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing is held."""


class _Spool:
    """Every other call finds no room."""

    def __init__(self, log: Memory) -> None:
        self._log = log
        self._parts: list[pa.Table] = []
        self._calls = 0

    def write(self, rows: pa.Table) -> None:
        self._room()
        self._parts.append(rows)

    def _room(self) -> None:
        self._calls += 1
        if self._log.crowded and self._calls % 2:
            raise LogFull("no room")

    def publish(self, end: Lsn) -> None:
        self._room()
        self._log.append(Entry(pa.concat_tables(self._parts), end))

    def discard(self) -> None:
        self._parts = []


def _entry(number: int, **marks: str) -> Entry:
    return Entry(rows_of([(1, number)]), Lsn(number), marks)


@pytest.fixture
def log() -> Memory:
    return Memory()


@pytest.fixture
def append_queue(log: Memory) -> Iterator[AppendQueue]:
    made = AppendQueue(log, 1000, AppendCounts(), SystemClock())
    yield made
    log.gate.set()
    made.close()


def _versions(log: Memory) -> list[int]:
    return [int(row) for entry in log.entries for row in entry.rows["version"].to_numpy()]


def test_what_waits_is_merged_and_stays_in_order(log: Memory, append_queue: AppendQueue) -> None:
    log.gate.clear()
    for number in range(1, 101):
        append_queue.put([_entry(number)])
    log.gate.set()
    assert append_queue.wait_until_durable(10)
    assert _versions(log) == list(range(1, 101))
    assert len(log.entries) < 10
    assert append_queue.confirmed == 100 and append_queue.queued_bytes == 0


def test_marks_of_merged_entries_all_arrive_and_the_newest_counts(log: Memory, append_queue: AppendQueue) -> None:
    log.gate.clear()
    append_queue.put([_entry(1), _entry(2, a="old", b="kept"), _entry(3, a="new")])
    log.gate.set()
    assert append_queue.wait_until_durable(10)
    found = {key: value for entry in log.entries for key, value in entry.marks.items()}
    assert found == {"a": "new", "b": "kept"}


def test_a_large_transaction_keeps_its_place(log: Memory, append_queue: AppendQueue) -> None:
    spilled = Disk([rows_of([(1, 2)]), rows_of([(1, 3)])])
    log.gate.clear()
    append_queue.put([_entry(1), SpilledTransaction(Lsn(3), spilled), _entry(4)])
    log.gate.set()
    assert append_queue.wait_until_durable(10)
    assert _versions(log) == [1, 2, 3, 4]
    assert [entry.end for entry in log.entries][-1] == 4
    assert spilled.rows == []


def test_nothing_is_confirmed_that_is_not_durable(log: Memory, append_queue: AppendQueue) -> None:
    log.gate.clear()
    append_queue.put([_entry(1)])
    assert not append_queue.wait_until_durable(0.1)
    assert append_queue.confirmed == 0 and not append_queue.all_durable
    append_queue.put([Entry(rows_of([(1, number) for number in range(50)]), Lsn(60))])
    assert append_queue.full
    log.gate.set()
    assert append_queue.wait_until_durable(10)
    assert append_queue.confirmed == 60 and not append_queue.full


def test_a_full_log_is_waited_for() -> None:
    log = Memory(LogFull("no room"))
    append_queue = AppendQueue(log, 1000, AppendCounts(), SystemClock())
    append_queue.put([_entry(1)])
    wait_until(lambda: append_queue.trouble, 5, "the trouble to be told")
    assert append_queue.wait_until_durable(10)
    assert _versions(log) == [1] and not append_queue.trouble
    append_queue.close()


def test_a_large_transaction_that_finds_no_room_goes_on_where_it_stopped(
    log: Memory, append_queue: AppendQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.capture.replication.append_queue._RETRY_SECONDS", 0.01)
    log.crowded = True
    spilled = Disk([rows_of([(1, 1)]), rows_of([(1, 2)]), rows_of([(1, 3)])])
    append_queue.put([SpilledTransaction(Lsn(3), spilled)])
    assert append_queue.wait_until_durable(10)
    assert _versions(log) == [1, 2, 3] and not append_queue.trouble
    assert log.spools == 1, "what was written before the disk was full is not written again"


def test_what_the_appending_thread_dies_of_is_raised_in_the_reading_one() -> None:
    log = Memory(LogFenced("another writer"))
    woken = threading.Event()
    append_queue = AppendQueue(log, 1000, AppendCounts(), SystemClock())
    append_queue.call_when_durable(woken.set)
    append_queue.put([_entry(1)])
    assert woken.wait(5)
    with pytest.raises(LogFenced):
        append_queue.check()
    with pytest.raises(LogFenced):
        append_queue.wait_until_durable(1)
    assert append_queue.confirmed == 0
    append_queue.close()


def test_an_entry_without_rows_moves_the_position_alone(log: Memory, append_queue: AppendQueue) -> None:
    append_queue.put([Entry(LOG_SCHEMA.empty_table(), Lsn(77))])
    assert append_queue.wait_until_durable(10)
    assert append_queue.confirmed == 77 and _versions(log) == []
