"""Slow, full, large and idle: memory stays bounded, the server hears from us, and the slot holds back no WAL."""

import resource
import threading
from pathlib import Path

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import cdc.log
from cdc.errors import LogFull
from cdc.log.segments.schemas import FolderSchemas
from cdc.model import Entry, Progress, TableSchema
from cdc.ports import LogWriter, Schemas, Spool
from cdc.row_file import RowFile
from cdc.service.daemon.supervisor import CAPTURE_ENVIRONMENT
from tests.fix_capture import MakeRig, Rig
from tests.fix_processes import RunProgram, wait_until
from tests.fix_servers import Database, MakeDisk, fill

ITEMS = "create table items (id int primary key, label text)"


class Gated:
    """A real log whose appends wait at a gate, or fail as a full disk does."""

    def __init__(self, log: LogWriter) -> None:
        self._log = log
        self.open = threading.Event()
        self.full = False
        self.waiting = threading.Event()

    def progress(self) -> Progress:
        return self._log.progress()

    def append(self, entry: Entry) -> None:
        self.waiting.set()
        if self.full:
            raise LogFull("No room left.", "Free some.")
        self.open.wait(20)
        self._log.append(entry)

    def spool(self) -> Spool:
        return self._log.spool()

    @property
    def schemas(self) -> Schemas:
        return self._log.schemas

    @property
    def append_interval(self) -> float:
        return self._log.append_interval

    def maintain(self) -> None:
        self._log.maintain()

    def close(self) -> None:
        self._log.close()


def test_a_log_that_stands_still_does_not_cost_the_connection_nor_memory(
    private_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.capture.replication.loop._QUEUE_BYTES", 200_000)
    rig = private_rig({"wal_sender_timeout": "1s"})
    rig.capture_tables(ITEMS)
    rig.begin()
    gates: list[Gated] = []

    def wrap(log: LogWriter) -> LogWriter:
        gates.append(Gated(log))
        return gates[0]

    with rig.following(wrap=wrap) as following:
        for turn in range(40):
            keys = f"generate_series({turn * 500}, {turn * 500 + 499}) g"
            rig.database.execute(f"insert into items select g, repeat('x', 500) from {keys}")
        assert gates[0].waiting.wait(30)
        wait_until(lambda: following.status.queued_bytes >= 200_000, 30, "the queue to fill")
        confirmed = rig.confirmed()
        sender = (
            "select backend_start from pg_stat_replication r join pg_replication_slots s on r.pid = s.active_pid"
            " where s.slot_name = %s"
        )
        begun = rig.ask(sender, rig.source["slot"])
        # Three times the server's patience: what it hears from us meanwhile is all that keeps us connected.
        assert not threading.Event().wait(3.5)
        assert rig.ask(sender, rig.source["slot"]) == begun
        assert rig.confirmed() == confirmed
        assert following.status.queued_bytes < 10_000_000
        assert following.status.reconnects == 0
        gates[0].open.set()
        following.reaches(rig.now())
    rig.assert_equal()
    rig.assert_once_in_order()


def test_a_full_log_stops_reading_confirms_nothing_and_goes_on_when_there_is_room(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    rig.begin()
    gates: list[Gated] = []

    def wrap(log: LogWriter) -> LogWriter:
        gates.append(Gated(log))
        gates[0].open.set()
        gates[0].full = True
        return gates[0]

    with rig.following(wrap=wrap) as following:
        before = rig.confirmed()
        rig.database.execute("insert into items values (1, 'a')")
        wait_until(lambda: following.status.state == "blocked", 30, "the full log to be noticed")
        assert "No room left" in following.status.trouble
        assert rig.confirmed() == before
        gates[0].full = False
        following.reaches(rig.now())
        assert following.status.state == "streaming"
    rig.assert_equal()


def test_a_full_disk_under_a_running_capture_loses_nothing_and_room_lets_it_go_on(
    database: Database, small_disk: MakeDisk, run_program: RunProgram
) -> None:
    """A real file system without a free byte: no status can be written either, so the reason stands in what it says."""
    disk = small_disk(16)
    rig = Rig(database, disk / "pipeline" / "state", run_program)
    rig.capture_tables(ITEMS)
    rig.begin()
    program = rig.start()
    database.execute("insert into items select g, 'before' from generate_series(1, 100) g")
    rig.wait_caught_up(program)
    before = rig.confirmed()
    ballast = fill(disk)
    database.execute("insert into items select g, repeat(md5(g::text), 8) from generate_series(101, 3000) g")
    wait_until(lambda: "No room left" in program.said(), 30, "the full disk to be said")
    database.execute("update items set label = 'full' where id <= 50")
    assert not threading.Event().wait(2.5)  # two heartbeats, in which nothing may be confirmed
    assert program.running()
    assert rig.confirmed() == before
    ballast.unlink()
    rig.wait_caught_up(program)
    wait_until(lambda: rig.confirmed() > before, 30, "the slot to move on")
    assert "There is room again" in program.said()
    assert program.terminate() == 0
    rig.assert_equal()
    rig.assert_once_in_order()


def test_a_large_transaction_without_room_on_disk_keeps_its_connection_and_goes_on(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.capture.replication.loop._OPEN_BYTES", 100_000)
    full, write = threading.Event(), RowFile.write

    def limited(file: RowFile, rows: pa.Table) -> None:
        if full.is_set():
            raise LogFull("No room left.", "Free some.")
        write(file, rows)

    monkeypatch.setattr(RowFile, "write", limited)
    rig.capture_tables(ITEMS)
    rig.begin()
    full.set()
    with rig.following() as following:
        rig.database.execute("insert into items select g, repeat('x', 100) from generate_series(1, 30000) g")
        wait_until(lambda: following.status.state == "blocked", 30, "the full disk to be noticed")
        assert "No room left" in following.status.trouble
        assert not threading.Event().wait(1.0)  # many turns, in which nothing may be read nor begun again
        full.clear()
        following.reaches(rig.now())
        assert following.status.state == "streaming" and following.status.reconnects == 0
    rig.assert_equal()
    rig.assert_once_in_order()


def test_a_new_schema_without_room_is_waited_for_with_the_reason(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    full, record = threading.Event(), FolderSchemas.record

    def limited(schemas: FolderSchemas, schema: TableSchema) -> TableSchema:
        if full.is_set():
            raise LogFull("No room left.", "Free some.")
        return record(schemas, schema)

    monkeypatch.setattr(FolderSchemas, "record", limited)
    rig.capture_tables(ITEMS)
    rig.begin()
    full.set()
    with rig.following() as following:
        rig.database.execute("alter table items add column more int; insert into items values (1, 'a', 2)")
        wait_until(lambda: following.status.state == "blocked", 30, "the full disk to be noticed")
        assert "No room left" in following.status.trouble
        full.clear()
        following.reaches(rig.now())
    rig.assert_equal()


def test_an_idle_slot_follows_a_busy_server(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    rig.begin()
    rig.database.execute("create table beside (t text)")
    with rig.following() as following:
        for _ in range(3):
            rig.database.execute("insert into beside select repeat(md5(g::text), 10) from generate_series(1, 20000) g")
            wanted = rig.now()
            wait_until(lambda: rig.confirmed() >= wanted, 20, "the slot to follow")  # noqa: B023
        assert following.status.rows == 0
    assert len(list((rig.state / "log" / "hot").iterdir())) < 40


def test_an_idle_stretch_is_not_confirmed_while_a_change_is_on_its_way(rig: Rig) -> None:
    rig.capture_tables(ITEMS)
    rig.begin()
    rig.database.execute("create table beside (t text)")
    gates: list[Gated] = []

    def wrap(log: LogWriter) -> LogWriter:
        gates.append(Gated(log))
        return gates[0]

    with rig.following(wrap=wrap) as following:
        start, before = rig.confirmed(), rig.now()
        rig.database.execute("insert into items values (1, 'a')")
        assert gates[0].waiting.wait(30)
        rig.database.execute("insert into beside select md5(g::text) from generate_series(1, 1000) g")
        assert not threading.Event().wait(2.5)
        assert rig.confirmed() == start
        assert following.status.watermark <= before
        gates[0].open.set()
        following.reaches(rig.now())
    rig.assert_equal()


@pytest.mark.parametrize("streamed", [True, False])
def test_a_huge_transaction_stays_within_bounded_memory(rig: Rig, streamed: bool) -> None:
    """In a process of its own, whose peak memory the kernel knows."""
    rig.capture_tables("create table items (id int primary key, label text, filler text)")
    rig.begin()
    if not streamed:
        rig.database.execute(
            f"alter role postgres in database {rig.database.name} set logical_decoding_work_mem = '2GB'"
        )
    program = rig.start()
    rig.wait_caught_up(program)
    idle = _peak(program.pid)
    rig.database.execute(
        "insert into items select g, 'label ' || g, repeat(md5(g::text), 8) from generate_series(1, 600000) g"
    )
    rig.wait_caught_up(program, 120)
    grown = _peak(program.pid) - idle
    assert program.terminate() == 0
    log = cdc.log.open_reader(rig.settings)
    rows = 0
    versions = set()
    for piece in log.read(log.start()):
        found = piece.rows.filter(pc.equal(piece.rows["table"], pa.scalar("public.items")))
        rows += found.num_rows
        versions.update(found["commit_lsn"].unique().to_pylist())
    assert rows == 600_000 and len(versions) == 1
    assert grown < 500_000, f"{grown} kB more than idle for a transaction of 200 MB of rows"


@pytest.mark.soak
def test_two_million_rows_in_one_transaction_pass_under_a_hard_memory_limit(rig: Rig) -> None:
    """The limit is the kernel's: beyond it the process would get no memory and end."""
    rig.capture_tables("create table items (id int primary key, label text, filler text)")
    rig.begin()
    program = rig.start(env=CAPTURE_ENVIRONMENT)
    rig.wait_caught_up(program)
    resource.prlimit(program.pid, resource.RLIMIT_DATA, (1 << 30, 1 << 30))
    rig.database.execute(
        "insert into items select g, 'label ' || g, repeat(md5(g::text), 8) from generate_series(1, 2000000) g"
    )
    rig.wait_caught_up(program, 600)
    assert program.running()
    assert program.terminate() == 0
    assert sum(1 for _ in rig.rows("public.items")) == 2_000_000


def _peak(pid: int) -> int:
    """The most memory that a process has ever had resident, in kB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])


def test_a_source_whose_disk_was_full_goes_on_when_there_is_room(small_disk: MakeDisk, private_rig: MakeRig) -> None:
    disk = small_disk(150)
    rig = private_rig({"max_wal_size": "64MB", "min_wal_size": "32MB"}, folder=disk)
    server = rig.database.server
    rig.capture_tables(ITEMS)
    rig.begin()
    with rig.following() as following:
        rig.database.execute("insert into items select g, 'x' from generate_series(1, 1000) g")
        following.reaches(rig.now())
        ballast = fill(disk)
        failed = False
        for turn in range(1, 50):
            keys = f"generate_series({turn * 2000}, {turn * 2000 + 1999}) g"
            try:
                rig.database.execute(f"insert into items select g, repeat('x', 1000) from {keys}")
            except psycopg.Error:
                failed = True
                break
        assert failed, "the disk must have been full for this test to say anything"
        ballast.unlink()
        server.start()
        rig.database.execute("insert into items values (-1, 'after')")
        following.reaches(rig.now())
    rig.assert_equal()
    rig.assert_once_in_order()
