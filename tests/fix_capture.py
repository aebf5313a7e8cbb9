"""Capture from a real database into a real segment log: in a thread for speed, as a process for crashes.

`rig` gives a Rig over the test's own database. What the log holds is folded here once more, slowly and simply, and
compared with what a plain `select` of the source says.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pytest
import yaml

import cdc.log
from cdc.capture.replication.loop import CaptureLoop, LoopStatus
from cdc.capture.replication.stream import Listener
from cdc.capture.source import publication
from cdc.capture.source.connect import connect
from cdc.capture.transactions.spill import SpillFolder
from cdc.clock import SystemClock
from cdc.config.settings import Settings
from cdc.key_range import KeyRange
from cdc.log.segments.log import SegmentSettings
from cdc.model import Lsn, TableId, parse_lsn
from cdc.ports import Clock, LogWriter
from cdc.service.capture import process
from cdc.service.capture.status import CaptureStatus
from cdc.service.state import status
from snapshots.tables.rows import masking_of
from tests.fix_processes import Program, RunProgram, wait_until
from tests.fix_servers import Database, MakePostgres, fresh_database

Image = dict[str, Any]


@dataclass(slots=True)
class Following:
    """A reader at work in a thread."""

    reader: CaptureLoop
    stop: threading.Event
    thread: threading.Thread
    raised: list[BaseException] = field(default_factory=list)

    @property
    def status(self) -> LoopStatus:
        """What the reader says."""
        return self.reader.status

    def error(self, deadline: float = 30) -> BaseException:
        """What it died of."""
        self.thread.join(deadline)
        assert self.raised, f"the reader did not fail within {deadline} s"
        return self.raised[0]

    def reaches(self, lsn: Lsn, deadline: float = 180) -> None:
        """Wait until everything up to there is durable."""

        def there() -> bool:
            if self.raised:
                raise self.raised[0]
            return self.reader.status.watermark >= lsn

        wait_until(there, deadline, f"watermark {lsn}")


class Rig:
    """One pipeline: a database, its settings, its log."""

    def __init__(self, database: Database, state: Path, run_program: RunProgram) -> None:
        self.database = database
        self.state = state
        self.run_program = run_program
        self.source: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": database.server.port,
            "database": database.name,
            "user": "postgres",
            "password": database.server.password,
            "slot": database.name,
            "heartbeat_seconds": 1.0,
            "tables": [],
        }

    # -- settings

    @property
    def settings(self) -> Settings:
        """As the pipeline file would give them."""
        return Settings.model_validate({"state": self.state, "source": self.source, "log": SegmentSettings()})

    def capture_tables(self, *statements: str, snapshot: str = "never", **source: Any) -> None:
        """Create tables and capture every table of schema public."""
        self.database.execute(*statements)
        with self.database.connect(client_encoding="UTF8") as connection:
            names = connection.execute(
                "select format('%s.%s', schemaname, tablename) from pg_tables where schemaname = 'public'"
                " and not exists (select from pg_inherits"
                " where inhrelid = format('%I.%I', schemaname, tablename)::regclass)"
                " order by 1"
            ).fetchall()
        self.source["tables"] = [{"name": name, "snapshot": snapshot} for (name,) in names]
        self.source.update(source)

    # -- in this process

    def begin(self) -> None:
        """Publication, slot and snapshot, as a first start makes them."""
        with connect(self.settings.source) as connection:
            published = publication.ensure(connection, self.settings.source)
        log = cdc.log.open_writer(self.settings)
        try:
            process.Capture(self.settings, log, CaptureStatus(self.state, ""), threading.Event()).begin(published)
        finally:
            log.close()

    @contextlib.contextmanager
    def following(
        self,
        listener: Listener | None = None,
        clock: Clock | None = None,
        wrap: Callable[[LogWriter], LogWriter] = lambda log: log,
        known: Collection[TableId] = (),
    ) -> Iterator[Following]:
        """A reader in a thread, stopped tidily at the end of the block. `wrap` may put faults before the log."""
        settings = self.settings
        log = wrap(cdc.log.open_writer(settings))
        reader = CaptureLoop(
            settings.source,
            log,
            clock or SystemClock(),
            SpillFolder(self.state / "scratch"),
            masking=masking_of(settings.source),
            listener=listener,
            known=known,
        )
        stop = threading.Event()
        raised: list[BaseException] = []

        def run() -> None:
            try:
                reader.run(stop)
            except BaseException as error:
                raised.append(error)

        following = Following(reader, stop, threading.Thread(target=run, daemon=True), raised)
        following.thread.start()
        try:
            yield following
        finally:
            stop.set()
            following.thread.join(60)
            log.close()
            assert not following.thread.is_alive()

    def follow(self, *statements: str) -> None:
        """Run them, each in its own transaction, and have a reader bring them into the log."""
        with self.following() as following:
            self.database.execute(*statements)
            following.reaches(self.now())

    # -- as a process of its own

    def start(self, fail: str = "", env: Mapping[str, str] | None = None) -> Program:
        """`python -m cdc.service.capture.process`, perhaps with a fail point."""
        config = self.state.parent / "millrace.yaml"
        config.write_text(yaml.safe_dump({"state": str(self.state), "source": self.source, "budgets": {"free_mb": 0}}))
        fails = {"MILLRACE_FAIL": fail} if fail else {}
        return self.run_program(
            "-m",
            "cdc.service.capture.process",
            "--config",
            str(config),
            env={"MILLRACE_FAIL": "", **fails, **(env or {})},
        )

    def status(self) -> dict[str, Any]:
        """What the process last said."""
        return status.read(self.state, "capture")

    def wait_caught_up(self, program: Program, deadline: float = 180) -> None:
        """Wait until the process has everything that is committed now."""
        wanted = self.now()

        def there() -> bool:
            assert program.running(), program.said()[-3000:]
            facts = self.status()
            return facts.get("pid") == program.pid and int(facts.get("watermark", 0)) >= wanted

        wait_until(there, deadline, "the process to catch up")

    # -- the source

    def now(self) -> Lsn:
        """The end of the source's WAL."""
        return parse_lsn(self.ask("select pg_current_wal_insert_lsn()::text"))

    def ask(self, query: str, *values: Any) -> Any:
        """One value."""
        with self.database.connect(client_encoding="UTF8") as connection:
            row = connection.execute(query.encode(), values).fetchone()
        return None if row is None else row[0]

    def confirmed(self) -> Lsn:
        """The slot's position."""
        return parse_lsn(
            self.ask(
                "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", self.source["slot"]
            )
        )

    # -- the log

    def rows(self, table: str = "") -> list[dict[str, Any]]:
        """Every row of the log in order, of one table or of all."""
        reader = cdc.log.open_reader(self.settings)
        found: list[dict[str, Any]] = []
        for part in reader.read(reader.start()):
            found += part.rows.to_pylist()
        return [row for row in found if not table or row["table"] == table]

    def folded(self, table: str) -> dict[str, Image]:
        """The image of each key after every change in the order of versions, which is what stores come to.

        A row read by a backfill can be in the log behind a change with a greater version, and fill its gaps. Of one
        transaction's changes with the same version their order in the log decides; what is not of a transaction (rows
        that were read, and the truncate before them) has no such order.
        """

        def order(row: dict[str, Any]) -> tuple[int, int, int, bool]:
            streamed = row["xid"] > 0
            return row["version"], row["commit_lsn"] * streamed, row["ordinal"] * streamed, row["op"] != "t"

        images: dict[str, Image] = {}
        for row in sorted(self.rows(table), key=order):
            if row["op"] == "t":
                images.clear()
            elif row["op"] == "p":
                gone = KeyRange.parse(row["key"]).contains_keys(pa.array(images, pa.string())) if images else ()
                images = {key: image for (key, image), out in zip(images.items(), gone, strict=True) if not out}
            elif row["op"] == "d":
                images.pop(row["key"], None)
            else:
                images[row["key"]] = _image(row, images.get(row["key"], {}))
        return images

    def assert_equal(self, *tables: str) -> None:
        """The log, folded, is the source."""
        for table in tables or [str(entry["name"]) for entry in self.source["tables"]]:
            with self.database.connect() as connection:
                rows = connection.execute(f"select to_jsonb(t)::text from {table} t".encode()).fetchall()
            wanted = sorted((_normal(json.loads(text, parse_float=Decimal)) for (text,) in rows), key=str)
            assert sorted(map(_normal, self.folded(table).values()), key=str) == wanted

    def transactions(self, table: str = "") -> list[tuple[int, int]]:
        """(commit LSN, ordinal) of every row, which must be unique and ascending."""
        return [(row["commit_lsn"], row["ordinal"]) for row in self.rows(table) if row["op"] != "r"]

    def assert_once_in_order(self) -> None:
        """No change twice, all in commit order."""
        seen = self.transactions()
        assert seen == sorted(set(seen))


def _image(row: dict[str, Any], before: Image) -> Image:
    image: Image = json.loads(row["after"], parse_float=Decimal)
    return {**image, **{name: before[name] for name in row["unchanged"] or () if name in before}}


def _normal(image: Image) -> list[tuple[str, str]]:
    return sorted((name, json.dumps(value, default=str, sort_keys=True)) for name, value in image.items())


@pytest.fixture
def rig(database: Database, state_dir: Path, run_program: RunProgram) -> Rig:
    """A pipeline over this test's database."""
    return Rig(database, state_dir, run_program)


@pytest.fixture
def make_rig(state_dir: Path, run_program: RunProgram) -> Callable[[Database], Rig]:
    """The same over any database."""
    return lambda database: Rig(database, state_dir, run_program)


class MakeRig(Protocol):
    """Starts a server with these settings and gives a pipeline over a database on it."""

    def __call__(self, settings: Mapping[str, str] | None = None, folder: Path | None = None) -> Rig: ...


@pytest.fixture
def private_rig(private_postgres: MakePostgres, make_rig: Callable[[Database], Rig]) -> Iterator[MakeRig]:
    """For a test that stops its server, or needs settings of its own; `rig.database.server` is the server."""
    with contextlib.ExitStack() as databases:
        yield lambda settings=None, folder=None: make_rig(
            databases.enter_context(fresh_database(private_postgres(settings, folder)))
        )
