"""Sinks that share a query: level ones together, a slow or dead one on its own until it has caught up."""

import random
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from cdc.config.settings import Settings
from cdc.log.segments.reader import SegmentReader
from cdc.model import ZERO_LSN, Entry, Lsn
from cdc.ports import Offset
from cdc.service.apply import direct_reader
from cdc.service.apply.direct_reader import DirectReader
from cdc.service.apply.sink_workers import SinkWorkers
from cdc.service.state.pauses import Paused
from cdc.service.state.sink_positions import by_name
from sinks import memory
from sinks.apply import batch_schedule
from sinks.apply.batch_buffer import BatchBuffer
from sinks.memory import Store
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from tests.fix_servers import MakeDisk
from tests.integration.service.test_query import Fickle, row
from tests.scenes.histories import INTEGERS, History, cut, images, log_table, table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark
ITEMS = table()
NAMES = ("cache", "lake", "search")


class Fleet:
    """Lanes on memory sinks that can be down or broken."""

    def __init__(self, settings: Settings, log: FilledLog, spark: "SparkSession") -> None:
        self.sinks = {sink.name: Fickle(sink.name, Store()) for sink in settings.sinks}
        self.log = log
        self._settings = settings
        self._spark = spark
        self.spark_runs = True
        self.workers = self._made()

    def _made(self) -> SinkWorkers:
        return SinkWorkers(self._settings, self.log.reader, lambda: self._spark, self._ready)

    def _ready(self) -> "SparkSession | None":
        return self._spark if self.spark_runs else None

    def start(self) -> None:
        self.workers.follow(self._settings, Paused())
        self.workers.run_queries()

    def restart(self, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.workers.close()
        meanwhile()
        self.workers = self._made()
        self.start()

    def fact(self, name: str, what: str) -> Any:
        return self.workers.facts()[name][what]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Tend as the apply process does."""

        def there() -> bool:
            self.workers.run_queries()
            return condition()

        wait_until(there, 90, what)

    def reach(self, end: int, *names: str) -> None:
        def positions() -> dict[str, int]:
            return {item.name: int(item.reached) for item in self.log.reader.consumers()}

        self.until(lambda: all(positions().get(name, 0) >= end for name in names or self.sinks), f"{names} at {end}")

    def shared(self) -> set[str]:
        return {name for name in self.sinks if self.fact(name, "shared")}

    def check(self, state: dict[str, str]) -> None:
        for sink in self.sinks.values():
            assert sink.stored(ITEMS).to_pylist() == sink.expected(ITEMS, images(state)).to_pylist()


@pytest.fixture
def make_fleet(
    settings_of: Callable[..., Settings],
    filled_log: FilledLog,
    spark: "SparkSession",
    state_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., Fleet]]:
    """Makes a fleet of memory sinks, each with settings of its own if need be."""
    made: list[Fleet] = []

    def make(
        names: Sequence[str] = NAMES,
        before: Fleet | None = None,
        state: Path = state_dir,
        **own: dict[str, object],
    ) -> Fleet:
        sections = [{"kind": "memory", "name": name, **own.get(name, {})} for name in names]
        fleet = Fleet(settings_of(sinks=sections, state=str(state)), filled_log, spark)
        fleet.sinks.update(before.sinks if before else {})
        monkeypatch.setattr(memory, "open_sink", lambda settings, _context: fleet.sinks[settings.name])
        filled_log.record(ITEMS)
        made.append(fleet)
        fleet.start()
        return fleet

    yield make
    for fleet in made:
        fleet.workers.close()


def test_level_sinks_share_a_query_end_alike_and_go_on_after_a_restart(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    rng = random.Random(3)
    history = History(ITEMS, INTEGERS, rng).write(120)
    pieces = list(cut(history.rows, rng, 30))
    for rows in pieces[:2]:
        end = fleet.log.append(rows)
    fleet.reach(end)
    assert fleet.shared() == set(NAMES)
    fleet.restart()
    for rows in pieces[2:]:
        end = fleet.log.append(rows)
    fleet.reach(end)
    assert fleet.shared() == set(NAMES)
    fleet.check(history.state())


def test_a_dead_sink_leaves_the_others_alone_catches_up_by_itself_and_comes_back(
    make_fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_schedule, "BUDGET", 100)
    monkeypatch.setattr(batch_schedule, "PATIENCE", 0.1)
    fleet = make_fleet()
    fleet.reach(fleet.log.append([row(1, 10, "one")]))
    fleet.sinks["lake"].down = True
    for version in range(20, 70, 10):
        fleet.reach(
            fleet.log.append([row(1, version, f"v{version}"), row(version, version + 1, "x")]), "cache", "search"
        )
    fleet.until(lambda: fleet.shared() == {"cache", "search"}, "the lake left")
    fleet.workers.run_queries()
    assert (fleet.fact("lake", "state"), fleet.fact("lake", "restarts")) == ("waiting", 0)
    fleet.sinks["lake"].down = False
    fleet.reach(fleet.log.append([row(1, 100, "last")]))

    def back() -> bool:
        fleet.log.append([row(1, 1000 + int(fleet.log.writer.progress().end), "more")])
        return fleet.shared() == set(NAMES)

    fleet.until(back, "the lake came back")
    fleet.reach(fleet.log.append([row(1, 10**9, "end")]))
    state = {f'{{"id":{key}}}': f'{{"id":{key},"label":"x","big":"x"}}' for key in range(20, 70, 10)}
    fleet.check(state | {'{"id":1}': '{"id":1,"label":"end","big":"end"}'})


def test_a_sink_whose_store_refuses_us_fails_alone_and_is_tried_again(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet()
    fleet.sinks["search"].broken = True
    end = fleet.log.append([row(1, 10, "one")])
    fleet.reach(end, "cache", "lake")
    fleet.until(lambda: fleet.fact("search", "state") == "failed", "search failed")
    assert fleet.fact("search", "error") == "the store refuses these credentials."
    assert fleet.shared() == {"cache", "lake"}
    fleet.sinks["search"].broken = False
    fleet.reach(end)


def test_a_sink_with_a_pace_of_its_own_shares_with_nobody(make_fleet: Callable[..., Fleet]) -> None:
    fleet = make_fleet(("cache", "lake"), lake={"trigger_seconds": 0.1})
    fleet.reach(fleet.log.append([row(1, 10, "one")]))
    assert fleet.shared() == set()


def test_queries_of_their_own_are_left_for_a_shared_one_once_they_are_level(
    make_fleet: Callable[..., Fleet],
) -> None:
    """Checkpoints of an earlier version, or of sinks that had a pace of their own."""
    pair = ("cache", "lake")
    fleet = make_fleet(pair, cache={"query": "own"}, lake={"query": "own"})
    fleet.reach(fleet.log.append([row(1, 10, "one")]))
    fleet.workers.close()
    again = make_fleet(pair, fleet)
    end = again.log.append([row(2, 20, "two")])
    again.reach(end)
    again.until(lambda: again.shared() == set(pair), "both aboard")
    again.reach(again.log.append([row(3, 30, "three")]))
    assert again.sinks["lake"].stored(ITEMS).num_rows == 3


def test_a_full_disk_under_the_checkpoints_stops_the_shared_query_and_room_lets_it_go_on(
    make_fleet: Callable[..., Fleet], small_disk: MakeDisk
) -> None:
    disk = small_disk(4)
    fleet = make_fleet(("cache", "lake"), state=disk)
    fleet.reach(fleet.log.append([row(1, 10, "one")]))
    filler = disk / "filler"
    with pytest.raises(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    end = fleet.log.append([row(1, 20, "two")])
    fleet.until(lambda: fleet.fact("cache", "state") == "failed", "the query failed")
    filler.unlink()
    fleet.reach(end)
    fleet.check({'{"id":1}': '{"id":1,"label":"two","big":"two"}'})


def test_lost_checkpoints_skip_nothing(make_fleet: Callable[..., Fleet], state_dir: Path) -> None:
    """Without its marks a sink is read the whole log again, and its store ignores what it has."""
    fleet = make_fleet(("cache", "lake"))
    history = History(ITEMS, INTEGERS, random.Random(9)).write(60)
    pieces = list(cut(history.rows, random.Random(9), 30))
    fleet.reach(fleet.log.append(pieces[0]))
    fleet.restart(lambda: shutil.rmtree(state_dir / "checkpoints"))
    for rows in pieces[1:]:
        end = fleet.log.append(rows)
    fleet.reach(end)
    fleet.check(history.state())


def test_a_restart_among_entries_that_share_an_lsn_skips_nothing_for_the_one_that_is_behind(
    make_fleet: Callable[..., Fleet],
) -> None:
    """As in a first snapshot: both have reached the same LSN, but one of them with a piece less."""
    fleet = make_fleet(("cache", "lake"))
    pieces = [[row(number, 10, f"piece {number}")] for number in range(3)]

    def append(number: int) -> None:
        fleet.log.writer.append(Entry(log_table(pieces[number]), Lsn(100), {"piece": str(number)}))

    def orders() -> dict[str, int]:
        return {item.name: item.order for item in fleet.log.reader.consumers()}

    append(0)
    fleet.until(lambda: set(orders().values()) == {1}, "both have the first piece")
    fleet.sinks["lake"].down = True
    append(1)
    append(2)
    fleet.until(lambda: orders() == {"cache": 3, "lake": 1}, "one of them has the others too")
    fleet.restart(lambda: setattr(fleet.sinks["lake"], "down", False))
    fleet.reach(fleet.log.append([row(9, 200, "after")]))
    expected = {number: f"piece {number}" for number in range(3)} | {9: "after"}
    fleet.check(
        {f'{{"id":{key}}}': f'{{"id":{key},"label":"{text}","big":"{text}"}}' for key, text in expected.items()}
    )


def directly_read() -> bool:
    return any(thread.name == "direct-reader" for thread in threading.enumerate())


def test_sinks_apply_the_log_while_spark_starts_and_spark_continues_from_there(
    make_fleet: Callable[..., Fleet],
) -> None:
    fleet = make_fleet()
    rng = random.Random(11)
    history = History(ITEMS, INTEGERS, rng).write(200)
    pieces = list(cut(history.rows, rng, 20))
    fleet.reach(fleet.log.append(pieces[0]))
    fleet.restart(lambda: setattr(fleet, "spark_runs", False))
    for rows in pieces[1:4]:
        fleet.reach(fleet.log.append(rows))
    assert fleet.shared() == set(NAMES)
    fleet.spark_runs = True
    for rows in pieces[4:]:  # some of them come from both
        end = fleet.log.append(rows)
        fleet.workers.run_queries()
    fleet.reach(end)
    fleet.reach(fleet.log.append([row(10**6, 2**61, "last")]))  # far enough for Spark alone
    fleet.until(lambda: not directly_read(), "only Spark reads")
    last = {f'{{"id":{10**6}}}': f'{{"id":{10**6},"label":"last","big":"last"}}'}
    fleet.check(history.state() | last)


def test_a_backlog_that_may_be_one_huge_transaction_is_left_to_spark(
    make_fleet: Callable[..., Fleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_reader, "NEAR", 5)
    fleet = make_fleet()
    first = fleet.log.append([row(1, 3, "one")])
    fleet.reach(first)
    log, looks = fleet.log.reader, [0]

    def head() -> tuple[Offset, Lsn]:
        looks[0] += 1
        return SegmentReader.head(log)  # type: ignore[arg-type]

    monkeypatch.setattr(log, "head", head)
    fleet.log.append([row(1, 1000, "two")])
    reader = DirectReader(log, BatchBuffer(first), by_name(log.consumers())["lake"].offset, first)
    wait_until(lambda: looks[0] > 2, 30, "it looks, and waits")
    assert (reader.end(), reader.error) == (first, None)
    fleet.reach(log.head()[1])


def test_a_direct_reader_that_cannot_read_says_why(filled_log: FilledLog) -> None:
    filled_log.append([row(1, 10, "one")])
    reader = DirectReader(filled_log.reader, BatchBuffer(Lsn(0)), Offset("99"), Lsn(0))
    assert "beyond the end of the log" in (wait_until(lambda: reader.error, 30, "the reason") or "")


def test_the_parts_of_a_large_batch_of_spark_end_the_direct_reader(filled_log: FilledLog) -> None:
    """A batch of the reader between them would hide the first parts from a sink that joins: it takes what starts at
    its position, and the position of the parts is where the batch before them ends."""
    filled_log.record(ITEMS)
    end = filled_log.append([row(1, 10, "one")])
    buffer = BatchBuffer(Lsn(0))
    buffer.add_member("cache")
    reader = DirectReader(filled_log.reader, buffer, filled_log.reader.start(), Lsn(0))
    wait_until(lambda: reader.position[1] == end, 30, "the first batch")
    assert reader.hand_over(ZERO_LSN)
    filled_log.append([row(1, 20, "two")])
    assert not directly_read()
    assert (reader.hand_over(Lsn(5)), reader.hand_over(Lsn(30))) == (False, True)


def test_a_query_that_starts_at_the_end_of_the_log_waits_there(
    make_fleet: Callable[..., Fleet], state_dir: Path
) -> None:
    fleet = make_fleet(("cache", "lake"))
    fleet.reach(fleet.log.append([row(1, 10, "one")]))
    fleet.restart()
    commits = state_dir / "checkpoints" / "convoy" / "commits"
    fleet.until((commits / "0").exists, "an empty first batch")
    assert (fleet.fact("cache", "restarts"), fleet.shared()) == (0, {"cache", "lake"})
    fleet.reach(fleet.log.append([row(1, 20, "two")]))
    fleet.check({'{"id":1}': '{"id":1,"label":"two","big":"two"}'})
