"""A paused table is held back from a sink and catches up in order: against a real log."""

import json
import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.model import Lsn, TableId, TableSchema
from cdc.service.holds import Holds
from cdc.service.places import consumer_name, held_from
from sinks.applier import Applier
from sinks.dead_letters import DeadLetters
from sinks.fold_arrow import ranked
from sinks.folded import gather
from sinks.memory import MemorySink, Store
from tests.fix_log import FilledLog
from tests.histories import INTEGERS, History, Row, change, cut, images, log_table, table

ITEMS, OTHERS = table(), table("others")
NONE: frozenset[TableId] = frozenset()
HELD = frozenset({ITEMS.table})


class Scene:
    """A sink with its applier and its holds; batches are given by hand, as a query would."""

    def __init__(self, log: FilledLog, state: Path) -> None:
        self.log = log
        self.store: Store = {}
        self._state = state
        self.start()

    def start(self) -> None:
        """What a new process does."""
        self.sink = MemorySink("store", self.store)
        letters = DeadLetters(self._state / "dead-letters")
        self.applier = Applier(
            "store",
            open_sink=lambda: self.sink,
            log=self.log.reader,
            letters=letters,
            stop=threading.Event(),
        )
        self.holds = Holds("store", self.log.reader, self.applier)
        self.holds.restore()

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
        """Up to where the held tables are complete; None: none is held."""
        return held_from("store", self.log.reader.consumers())


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
    scene.holds.follow(HELD)
    scene.live([row(1, 20, "two"), row(1, 21, "beside", "public.others")])
    assert scene.labels() == {1: "one"}
    assert scene.labels(OTHERS) == {1: "beside"}
    assert scene.reached() == before
    scene.holds.follow(NONE)
    assert scene.labels() == {1: "two"}
    assert scene.reached() is None
    scene.live([row(1, 30, "three")])
    assert scene.labels() == {1: "three"}


def test_a_partial_change_after_the_pause_keeps_what_was_changed_during_it(scene: Scene) -> None:
    """Applied before the catch-up, it would keep the large column of before the pause, for ever."""
    scene.live([row(1, 10, "one", big="old")])
    scene.holds.follow(HELD)
    scene.live([row(1, 20, "two", big="new")])
    scene.holds.follow(NONE)
    scene.live([row(1, 30, "three", big=None)])
    stored = json.loads(scene.sink.stored(ITEMS).to_pylist()[0]["after"])
    assert (stored["label"], stored["big"]) == ("three", "new")


def test_a_hold_outlives_the_process_and_so_does_what_it_waits_for(scene: Scene) -> None:
    scene.live([row(1, 10, "one")])
    scene.holds.follow(HELD)
    scene.live([row(1, 20, "two")])
    scene.start()
    scene.live([row(1, 30, "three"), row(2, 31, "new")])
    assert scene.labels() == {1: "one"}
    scene.start()
    scene.holds.follow(NONE)
    assert scene.labels() == {1: "three", 2: "new"}


def test_retention_keeps_what_a_held_table_has_yet_to_get(scene: Scene) -> None:
    before = scene.live([row(1, 10, "one")])
    scene.holds.follow(HELD)
    scene.live([row(1, 20, "two")])
    consumers = {consumer.name: consumer.reached for consumer in scene.log.reader.consumers()}
    assert consumers[consumer_name("store", ITEMS.table)] == before < consumers["store"]


def test_a_truncate_during_the_pause_is_caught_up_in_its_place(scene: Scene) -> None:
    scene.live([row(1, 10, "one"), row(2, 11, "two")])
    scene.holds.follow(HELD)
    scene.live([change("t", None, 20)])
    scene.live([row(3, 30, "three")])
    assert set(scene.labels()) == {1, 2}
    scene.holds.follow(NONE)
    assert scene.labels() == {3: "three"}


@pytest.mark.parametrize("seed", range(3))
def test_held_and_released_at_random_while_batches_come_it_ends_in_the_right_state(scene: Scene, seed: int) -> None:
    rng = random.Random(seed)
    history = History(ITEMS, INTEGERS, rng).write(160)
    done = threading.Event()

    def steer() -> None:
        chance = random.Random(seed + 100)
        while not done.is_set():
            scene.holds.follow(chance.choice((HELD, NONE)))

    steering = threading.Thread(target=steer)
    steering.start()
    try:
        for rows in cut(history.rows, rng, 16):
            scene.live(rows)
    finally:
        done.set()
        steering.join(60)
    scene.holds.follow(NONE)
    stored = scene.sink.stored(ITEMS).to_pylist()
    assert stored == scene.sink.expected(ITEMS, images(history.state())).to_pylist()
