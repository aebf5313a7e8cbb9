"""A row that gets another key while its large column is not sent: from Postgres through the log into a store, whole.

Under the default identity Postgres sends neither the old row nor the unchanged large value, and the new key has no
stored row to keep it from: the row is read again from the source.
"""

import threading
from collections.abc import Callable

import pyarrow as pa
import pytest

import cdc.log
from cdc.model import TableId, TableSchema
from cdc.ports import Sink
from cdc.service.reselect import SourceRows
from sinks import redis, redis_settings
from sinks.applier import Applier
from sinks.context import SinkContext
from sinks.dead_letters import DeadLetters
from sinks.fold_arrow import ranked
from sinks.folded import gather
from sinks.memory import MemorySink, Store
from snapshots.verify import verify_table
from tests.fix_capture import Rig

ITEMS = TableId("public", "items")
LARGE = "(select string_agg(md5((g * id)::text), '') from generate_series(1, 400) g)"


class Follower:
    """A sink fed from the log as its query would: entry by entry, or all at once."""

    def __init__(self, rig: Rig, sink: Sink) -> None:
        self.sink = sink
        self._reader = cdc.log.open_reader(rig.settings)
        self._offset = self._reader.start()
        letters = DeadLetters(rig.state / "letters")
        self.applier = Applier(
            "store", open_sink=lambda: sink, log=self._reader, letters=letters, stop=threading.Event(),
            reselect=SourceRows(rig.settings.source),
        )  # fmt: skip

    @property
    def schema(self) -> TableSchema:
        return self._reader.schemas.newest()[0]

    def catch_up(self, at_once: bool) -> None:
        pieces = list(self._reader.read(self._offset))
        whole = [pa.concat_tables([piece.rows for piece in pieces])]
        for rows in whole if at_once else [piece.rows for piece in pieces]:
            self.applier.apply(gather(ranked(rows), self._reader.schemas))
        self._offset = pieces[-1].offset


@pytest.fixture(params=["memory", "redis"])
def store(request: pytest.FixtureRequest) -> Callable[[Rig], Sink]:
    def opened(rig: Rig) -> Sink:
        if request.param == "memory":
            return MemorySink("store", Store())
        settings = redis_settings.RedisSettings(name="store", url=request.getfixturevalue("redis_url"))
        return redis.open_sink(settings, SinkContext(rig.state))

    return opened


@pytest.mark.parametrize("at_once", [True, False])
def test_a_row_under_a_new_key_has_the_large_column_that_was_not_sent(
    rig: Rig, store: Callable[[Rig], Sink], at_once: bool
) -> None:
    rig.capture_tables(
        "create table items (id int primary key, label text, big text)",
        "alter table items alter column big set storage external",
    )
    rig.begin()
    sink = store(rig)
    follower = Follower(rig, sink)
    with rig.following() as following:
        rig.database.execute(
            "insert into items select g, 'new', '' from generate_series(1, 6) g",
            f"update items set big = {LARGE}",
        )
        following.reaches(rig.now())
        if not at_once:
            follower.catch_up(at_once=False)
            assert sink.stored(follower.schema).num_rows == 6
        rig.database.execute(
            "update items set id = id + 100 where id <= 3",
            "update items set id = id + 100 where id = 101",  # and on to a third key
            "delete from items where id = 4",
            "update items set id = 4 where id = 5",  # to a key that was deleted
            "update items set label = 'changed' where id = 4",
        )
        following.reaches(rig.now())
        moved = [row for row in rig.rows() if row["op"] == "c" and row["unchanged"]]
        assert len(moved) == 5, "the server must have left the large column out for this test to say anything"
        follower.catch_up(at_once)
        found = verify_table(rig.settings.source, rig.settings.source.tables[0], sink, lambda _: None)
    assert found.equal and follower.applier.status.dead_letters == 0
    assert sink.stored(follower.schema).num_rows == 5


@pytest.mark.parametrize("at_once", [True, False])
def test_rows_that_swap_their_keys_keep_their_own_large_columns(
    rig: Rig, store: Callable[[Rig], Sink], at_once: bool
) -> None:
    """In one batch each key is deleted and taken over: the large column of the row before must not be kept for it."""
    rig.capture_tables(
        "create table items (id int primary key, label text, big text)",
        "alter table items alter column big set storage external",
    )
    rig.begin()
    sink = store(rig)
    follower = Follower(rig, sink)
    with rig.following() as following:
        rig.database.execute(
            "insert into items values (1, 'first', ''), (2, 'second', '')", f"update items set big = {LARGE}"
        )
        following.reaches(rig.now())
        if not at_once:
            follower.catch_up(at_once=False)
        rig.database.execute(
            "begin; update items set id = -1 where id = 1; update items set id = 1 where id = 2;"
            " update items set id = 2 where id = -1; commit"
        )
        following.reaches(rig.now())
        follower.catch_up(at_once)
        found = verify_table(rig.settings.source, rig.settings.source.tables[0], sink, lambda _: None)
    assert found.equal and follower.applier.status.dead_letters == 0
