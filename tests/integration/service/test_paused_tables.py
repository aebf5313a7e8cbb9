"""A table that is paused, or that a store cannot take, is held back and catches up in order: against a real log."""

import json
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.errors import SinkError, StoreRefused
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Batch
from cdc.service.apply.held_back_tables import HeldBackTables, TableRequests
from cdc.service.state.sink_positions import consumer_name, position_of
from cdc.service.state.skipped_tables import SkippedTables
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from sinks.memory import MemorySink, Store
from tests.fix_log import FilledLog
from tests.scenes.histories import INTEGERS, History, Row, change, cut, images, log_table, table

ITEMS, OTHERS = table(), table("others")
NONE = TableRequests()
HELD = TableRequests(paused=frozenset({ITEMS.table}))
SKIPPED = TableRequests(skipped=frozenset({ITEMS.table}))
BOTH = frozenset({ITEMS.table, OTHERS.table})


class Refused(MemorySink):
    """A store that cannot take some tables, for as long as they are in `refused`."""

    def __init__(self, store: Store, refused: set[TableId]) -> None:
        super().__init__("store", store)
        self.refused = refused

    def prepare(self, schema: TableSchema) -> None:
        self._check(schema)
        super().prepare(schema)

    def apply(self, batch: Batch) -> None:
        self._check(batch.schema)
        super().apply(batch)

    def _check(self, schema: TableSchema) -> None:
        if schema.table in self.refused:
            raise SinkError(f"table {schema.table}: a column has another type here.", "Change it back.")


class Source:
    """Whoever is asked for a backfill."""

    def __init__(self) -> None:
        self.restart_lsn = Lsn(0)
        self.asked: list[TableId] = []

    def reads_newer_than(self, version: Lsn) -> bool:
        return self.restart_lsn > version

    def request(self, table: TableId) -> str:
        self.asked.append(table)
        return f"{self.restart_lsn:X}"

    def emit_again(self, view: TableId) -> str:
        raise AssertionError(view)


class Scene:
    """A sink with its applier and its held-back tables; batches are given by hand, as a query would."""

    def __init__(self, log: FilledLog, state: Path) -> None:
        self.log = log
        self.store: Store = {}
        self.refused: set[TableId] = set()
        self.source = Source()
        self._state = state
        self.start()

    def start(self) -> None:
        """What a new process does."""
        self.sink = Refused(self.store, self.refused)
        letters = DeadLetters(self._state / "dead-letters")
        self.applier = Applier(
            "store",
            open_sink=lambda: self.sink,
            log=self.log.reader,
            letters=letters,
            stop=threading.Event(),
        )
        skipped = SkippedTables(self._state, "store")
        self.held_back = HeldBackTables(self.log.reader, self.applier, skipped, self.source, NONE)
        self.held_back.restore()

    def live(self, rows: Sequence[Row]) -> Lsn:
        """One batch of the stream."""
        end = self.log.append(rows)
        batch = gather(ranked(log_table(rows)), self.log.reader.schemas)
        self.applier.apply(replace(batch, reached=end))
        return end

    def labels(self, schema: TableSchema = ITEMS) -> dict[int, str]:
        """Key to label, as the store has it."""
        images = [json.loads(row["after"]) for row in self.sink.stored(schema).to_pylist()]
        return {image["id"]: image["label"] for image in images}

    def reached(self) -> Lsn | None:
        """Up to where the held-back tables are complete; None: none is held back."""
        held_back = position_of("store", (ITEMS.table, OTHERS.table), self.log.reader.consumers()).held_back
        return min(held_back.values(), default=None)


@pytest.fixture
def scene(filled_log: FilledLog, state_dir: Path) -> Iterator[Scene]:
    filled_log.record(ITEMS)
    filled_log.record(OTHERS)
    yield Scene(filled_log, state_dir)


def row(key: int, version: int, label: str, name: str = "public.items", big: str | None = "b") -> Row:
    rest = "" if big is None else f',"big":"{big}"'
    after = f'{{"id":{key},"label":"{label}"{rest}}}'
    return change("u", f'{{"id":{key}}}', version, after, ["big"] if big is None else None, table=name)


def test_a_held_table_waits_while_the_others_go_on(scene: Scene) -> None:
    before = scene.live([row(1, 10, "one")])
    scene.held_back.follow(HELD)
    scene.live([row(1, 20, "two"), row(1, 21, "beside", "public.others")])
    assert scene.labels() == {1: "one"}
    assert scene.labels(OTHERS) == {1: "beside"}
    assert scene.reached() == before
    scene.held_back.follow(NONE)
    assert scene.labels() == {1: "two"}
    assert scene.reached() is None
    scene.live([row(1, 30, "three")])
    assert scene.labels() == {1: "three"}


def test_a_partial_change_after_the_pause_keeps_what_was_changed_during_it(scene: Scene) -> None:
    """Applied before the catch-up, it would keep the large column of before the pause, for ever."""
    scene.live([row(1, 10, "one", big="old")])
    scene.held_back.follow(HELD)
    scene.live([row(1, 20, "two", big="new")])
    scene.held_back.follow(NONE)
    scene.live([row(1, 30, "three", big=None)])
    stored = json.loads(scene.sink.stored(ITEMS).to_pylist()[0]["after"])
    assert (stored["label"], stored["big"]) == ("three", "new")


def test_a_hold_outlives_the_process_and_so_does_what_it_waits_for(scene: Scene) -> None:
    scene.live([row(1, 10, "one")])
    scene.held_back.follow(HELD)
    scene.live([row(1, 20, "two")])
    scene.start()
    scene.live([row(1, 30, "three"), row(2, 31, "new")])
    assert scene.labels() == {1: "one"}
    scene.start()
    scene.held_back.follow(NONE)
    assert scene.labels() == {1: "three", 2: "new"}


def test_retention_keeps_what_a_held_table_has_yet_to_get(scene: Scene) -> None:
    before = scene.live([row(1, 10, "one")])
    scene.held_back.follow(HELD)
    scene.live([row(1, 20, "two")])
    consumers = {consumer.name: consumer.reached for consumer in scene.log.reader.consumers()}
    assert consumers[consumer_name("store", ITEMS.table)] == before < consumers["store"]


def test_a_truncate_during_the_pause_is_caught_up_in_its_place(scene: Scene) -> None:
    scene.live([row(1, 10, "one"), row(2, 11, "two")])
    scene.held_back.follow(HELD)
    scene.live([change("t", None, 20)])
    scene.live([row(3, 30, "three")])
    assert set(scene.labels()) == {1, 2}
    scene.held_back.follow(NONE)
    assert scene.labels() == {3: "three"}


@pytest.mark.parametrize("seed", range(3))
def test_held_and_released_at_random_while_batches_come_it_ends_in_the_right_state(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)
    history = History(ITEMS, INTEGERS, rng).write(160)
    done = threading.Event()

    def control_message() -> None:
        chance = random.Random(seed + 100)
        while not done.is_set():
            scene.held_back.follow(chance.choice((HELD, NONE)))

    steering = threading.Thread(target=control_message)
    steering.start()
    try:
        for rows in cut(history.rows, rng, 16):
            scene.live(rows)
    finally:
        done.set()
        steering.join(60)
    scene.held_back.follow(NONE)
    stored = scene.sink.stored(ITEMS).to_pylist()
    assert stored == scene.sink.expected(ITEMS, images(history.state())).to_pylist()


def test_a_table_that_the_store_cannot_take_waits_alone_and_loses_nothing(scene: Scene) -> None:
    before = scene.live([row(1, 10, "one"), row(1, 11, "beside", "public.others")])
    scene.refused.add(ITEMS.table)
    scene.live([row(1, 20, "two"), row(1, 21, "goes on", "public.others")])
    scene.live([row(2, 30, "new"), row(1, 31, "further", "public.others")])
    assert scene.labels(OTHERS) == {1: "further"}
    assert scene.labels() == {1: "one"}
    assert scene.reached() == before
    assert scene.applier.status.state == "running"
    said = scene.held_back.waiting[ITEMS.table].facts("store", ITEMS.table)
    assert "another type" in str(said["message"])
    for part in ("Change it back.", "millrace resume public.items --sink store", "millrace skip public.items"):
        assert part in str(said["remedy"])
    scene.refused.clear()
    scene.held_back.follow(TableRequests(resumed=1))
    assert scene.labels() == {1: "two", 2: "new"}
    assert scene.held_back.waiting == {}
    assert scene.reached() is None
    scene.live([row(1, 40, "live again")])
    assert scene.labels() == {1: "live again", 2: "new"}


def test_it_is_tried_again_by_itself_but_not_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    scene.refused.add(ITEMS.table)
    scene.live([row(1, 10, "one")])
    scene.refused.clear()
    scene.held_back.follow(NONE)
    assert scene.labels() == {}, "it was refused a moment ago"
    later = time.monotonic() + 6
    monkeypatch.setattr(time, "monotonic", lambda: later)
    scene.held_back.follow(NONE)
    assert scene.labels() == {1: "one"}


def test_the_time_between_two_tries_grows(scene: Scene) -> None:
    scene.refused.add(ITEMS.table)
    scene.live([row(1, 10, "one")])
    pauses = []
    for resumed in range(1, 12):
        scene.held_back.follow(TableRequests(resumed=resumed))
        pauses.append(round(scene.held_back.waiting[ITEMS.table].due - time.monotonic()))
    assert pauses == sorted(pauses)
    assert 290 < pauses[-1] <= 300
    assert scene.held_back.waiting[ITEMS.table].tries == 12


def test_a_waiting_table_waits_on_after_a_restart_and_the_others_still_flow(scene: Scene) -> None:
    scene.refused.add(ITEMS.table)
    scene.live([row(1, 10, "one")])
    scene.start()
    scene.live([row(1, 20, "two"), row(1, 21, "beside", "public.others")])
    assert scene.labels(OTHERS) == {1: "beside"}
    scene.held_back.follow(NONE)
    assert ITEMS.table in scene.held_back.waiting
    scene.refused.clear()
    scene.start()
    scene.held_back.follow(NONE)
    assert scene.labels() == {1: "two"}


def test_a_table_without_rows_that_cannot_be_prepared_is_named_too(scene: Scene) -> None:
    scene.refused.add(ITEMS.table)
    scene.applier.open_store()
    assert list(scene.held_back.waiting) == [ITEMS.table]
    scene.held_back.follow(TableRequests(resumed=1))
    assert scene.held_back.waiting[ITEMS.table].tries == 2, "nothing to catch up with is no reason to go on"
    scene.refused.clear()
    scene.held_back.follow(TableRequests(resumed=2))
    assert scene.held_back.waiting == {}


def test_a_table_that_lost_its_key_waits_alone(scene: Scene) -> None:
    columns = tuple(replace(column, key=False) for column in ITEMS.columns)
    keyless = scene.log.record(replace(ITEMS, columns=columns, identity="n"))
    scene.live([{**row(1, 10, "one"), "schema_id": keyless.id}, row(1, 11, "beside", "public.others")])
    assert scene.labels(OTHERS) == {1: "beside"}
    assert "REPLICA IDENTITY FULL" in scene.held_back.waiting[ITEMS.table].remedy


def test_a_store_that_refuses_us_altogether_stops_the_sink_and_holds_no_table(scene: Scene) -> None:
    def refuse(_: Batch) -> None:
        raise StoreRefused("the store refuses these credentials")

    scene.sink.apply = refuse  # type: ignore[method-assign,assignment]
    with pytest.raises(StoreRefused):
        scene.live([row(1, 10, "one")])
    assert (scene.applier.status.state, scene.held_back.waiting) == ("refused", {})


def test_a_skipped_table_keeps_nothing_back_and_comes_back_by_a_backfill_without_ghosts(scene: Scene) -> None:
    first = scene.live([row(1, 10, "one"), row(2, 11, "deleted while nobody looked")])
    scene.refused.add(ITEMS.table)
    second = scene.live([row(1, 20, "two")])
    scene.held_back.follow(SKIPPED)
    assert scene.reached() is None, "retention keeps nothing for it"
    assert scene.held_back.skipped_now() == {ITEMS.table}
    dropped = scene.held_back.skipped.all()[ITEMS.table].dropped
    assert [dropped(end) for end in (first, second)] == [False, True]
    end = scene.live([change("d", '{"id":2}', 30), row(1, 31, "three"), row(1, 32, "beside", "public.others")])
    scene.start()
    scene.held_back.follow(SKIPPED)
    scene.live([row(1, 40, "four")])
    assert scene.labels() == {1: "one", 2: "deleted while nobody looked"}
    scene.refused.clear()
    scene.held_back.follow(TableRequests(resumed=1))
    assert "still open in the source" in scene.held_back.waiting[ITEMS.table].message
    assert scene.source.asked == []
    scene.source.restart_lsn = Lsn(end + 100)
    scene.held_back.follow(TableRequests(resumed=2))
    assert scene.labels() == {}
    assert scene.source.asked == [ITEMS.table]
    assert list(scene.held_back.skipped.all()) == [ITEMS.table], "until the backfill has ended"
    scene.live([row(1, end + 100, "as the source has it")])
    scene.live([row(3, end + 200, "live")])
    assert scene.labels() == {1: "as the source has it", 3: "live"}
    assert scene.labels(OTHERS) == {1: "beside"}


def test_a_skipped_table_that_the_store_still_cannot_take_waits_again_and_loses_nothing_more(scene: Scene) -> None:
    scene.live([row(1, 10, "one")])
    scene.refused.add(ITEMS.table)
    scene.held_back.follow(SKIPPED)
    scene.source.restart_lsn = Lsn(1000)
    scene.held_back.follow(TableRequests(resumed=1))
    assert "another type" in scene.held_back.waiting[ITEMS.table].message
    assert scene.source.asked == [ITEMS.table], "the backfill tells the log what the table is now"
    scene.live([row(2, 2000, "kept")])
    scene.refused.clear()
    scene.start()
    scene.held_back.follow(NONE)
    assert (scene.labels(), scene.source.asked) == ({2: "kept"}, [ITEMS.table])


@pytest.mark.parametrize("paused", [False, True])
def test_a_held_table_that_left_the_pipeline_holds_nothing_and_stops_nothing(scene: Scene, paused: bool) -> None:
    scene.live([row(1, 10, "one")])
    scene.refused |= set() if paused else {ITEMS.table}
    scene.held_back.follow(HELD if paused else NONE)
    scene.live([row(1, 20, "two")])
    assert scene.reached() is not None
    left = TableRequests(tables=frozenset({OTHERS.table}))
    scene.held_back.follow(left)
    assert (scene.reached(), scene.held_back.waiting) == (None, {})
    scene.start()
    scene.held_back.follow(left)
    scene.live([row(1, 30, "three"), row(1, 31, "beside", "public.others")])
    assert (scene.labels(), scene.labels(OTHERS)) == ({1: "one"}, {1: "beside"})
    scene.source.restart_lsn = Lsn(1000)
    scene.refused.clear()
    scene.held_back.follow(TableRequests(tables=BOTH))
    assert scene.source.asked == [ITEMS.table], "back in the pipeline, it is read again"


def test_a_table_that_left_and_is_refused_only_then_is_passed_over(scene: Scene) -> None:
    scene.held_back.follow(TableRequests(tables=frozenset({OTHERS.table})))
    scene.refused.add(ITEMS.table)
    scene.live([row(1, 10, "one"), row(1, 11, "beside", "public.others")])
    assert (scene.reached(), scene.labels(OTHERS)) == (None, {1: "beside"})
