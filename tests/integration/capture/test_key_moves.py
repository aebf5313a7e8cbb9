"""A row that gets another key while its large column is not sent: from Postgres through the log into a store, whole.

Under the default identity Postgres sends neither the old row nor the unchanged large value, and the new key has no
stored row to keep it from: the row is read again from the source.
"""

import threading
from collections.abc import Sequence

import pyarrow as pa
import pytest

import cdc.log
from cdc.ports import Sink
from cdc.service.apply.reselect import SourceRows
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.context import SinkContext
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from sinks.memory import MemorySink, Store
from sinks.redis import settings as redis_settings
from sinks.redis import sink as redis
from snapshots.verify.comparison import verify_table
from tests.fix_capture import Rig

LARGE = "(select string_agg(md5((g * id)::text), '') from generate_series(1, 400) g)"


class Follower:
    """A sink fed from the log as its query would: entry by entry, or all at once."""

    def __init__(self, rig: Rig, sink: Sink, at_once: bool) -> None:
        self.rig, self.sink, self._at_once = rig, sink, at_once
        self._reader = cdc.log.open_reader(rig.settings)
        self._offset = self._reader.start()
        letters = DeadLetters(rig.state / "letters")
        self.applier = Applier(
            "store", open_sink=lambda: sink, log=self._reader, letters=letters, stop=threading.Event(),
            reselect=SourceRows(rig.settings.source),
        )  # fmt: skip

    def stored(self) -> int:
        return self.sink.stored(self._reader.schemas.newest()[0]).num_rows

    def follows(self, first: Sequence[str], moves: Sequence[str]) -> None:
        """The sink ends as the source, nothing put aside; one by one, it has the first rows before the moves."""
        with self.rig.following() as following:
            self.rig.database.execute(*first)
            following.reaches(self.rig.now())
            if not self._at_once:
                self._catch_up()
                assert self.stored() == self.rig.ask("select count(*) from items")
            self.rig.database.execute(*moves)
            following.reaches(self.rig.now())
            self._catch_up()
            source = self.rig.settings.source
            found = verify_table(source, source.tables[0], self.sink, lambda _: None)
        assert found.equal and self.applier.status.dead_letters == 0

    def _catch_up(self) -> None:
        pieces = list(self._reader.read(self._offset))
        each = [piece.rows for piece in pieces]
        for rows in [pa.concat_tables(each)] if self._at_once else each:
            self.applier.apply(gather(ranked(rows), self._reader.schemas))
        self._offset = pieces[-1].offset


@pytest.fixture(params=["memory", "redis"])
def sink(request: pytest.FixtureRequest, rig: Rig) -> Sink:
    if request.param == "memory":
        return MemorySink("store", Store())
    settings = redis_settings.RedisSettings(name="store", url=request.getfixturevalue("redis_url"))
    return redis.open_sink(settings, SinkContext(rig.state))


@pytest.fixture(params=[True, False], ids=["at_once", "one_by_one"])
def follower(request: pytest.FixtureRequest, rig: Rig, sink: Sink) -> Follower:
    rig.capture_tables(
        "create table items (id int primary key, label text, big text)",
        "alter table items alter column big set storage external",
    )
    rig.begin()
    return Follower(rig, sink, request.param)


def test_a_row_under_a_new_key_has_the_large_column_that_was_not_sent(follower: Follower) -> None:
    follower.follows(
        ["insert into items select g, 'new', '' from generate_series(1, 6) g", f"update items set big = {LARGE}"],
        [
            "update items set id = id + 100 where id <= 3",
            "update items set id = id + 100 where id = 101",  # and on to a third key
            "delete from items where id = 4",
            "update items set id = 4 where id = 5",  # to a key that was deleted
            "update items set label = 'changed' where id = 4",
        ],
    )
    moved = [row for row in follower.rig.rows() if row["op"] == "c" and row["unchanged"]]
    assert len(moved) == 5, "the server must have left the large column out for this test to say anything"
    assert follower.stored() == 5


def test_rows_that_swap_their_keys_keep_their_own_large_columns(follower: Follower) -> None:
    """In one batch each key is deleted and taken over: the large column of the row before must not be kept for it."""
    follower.follows(
        ["insert into items values (1, 'first', ''), (2, 'second', '')", f"update items set big = {LARGE}"],
        [
            "begin; update items set id = -1 where id = 1; update items set id = 1 where id = 2;"
            " update items set id = 2 where id = -1; commit"
        ],
    )
    assert follower.stored() == 2
