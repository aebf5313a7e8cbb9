"""Large columns that Postgres does not send again, from a real source into Delta."""

import threading
from pathlib import Path

import pytest

import cdc.log
from cdc.config.settings import Settings, TableSettings
from cdc.model import Lsn, TableId
from cdc.service.apply.reselect import SourceRows
from sinks.apply.applier import Applier
from sinks.apply.dead_letters import DeadLetters
from sinks.context import SinkContext
from sinks.delta import sink
from sinks.delta.settings import DeltaSettings
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from snapshots.verify.comparison import Differences, verify_table
from tests.fix_capture import Following, Rig

TABLE = TableSettings(name=TableId("public", "items"))
ITEMS = "create table items (id int primary key, n int, words text, doc jsonb, raw bytea, list text[])"
LARGE = (
    "select string_agg(md5(random()::text), '') as words,"
    " jsonb_build_object('x', string_agg(md5(random()::text), '')) as doc,"
    " decode(string_agg(md5(random()::text), ''), 'hex') as raw, array_agg(md5(random()::text)) as list"
    " from generate_series(1, 400)"
)
"""Some ten kilobytes in each column that do not compress: stored aside, and not sent when another column changes."""
FILL = f"insert into items select id, 0, words, doc, raw, list from generate_series(1, 20) id, lateral ({LARGE}) large"


class Lake:
    """A Delta sink behind its applier, fed from the log as a query would feed it."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._reader = cdc.log.open_reader(settings)
        self._offset = self._reader.start()
        self.sink = sink.open_sink(DeltaSettings(path=str(folder)), SinkContext(settings.state))
        self.letters = DeadLetters(folder / "letters")
        self.partial = 0
        self._applier = Applier(
            "delta",
            open_sink=lambda: self.sink,
            log=self._reader,
            letters=self.letters,
            stop=threading.Event(),
            reselect=SourceRows(settings.source),
        )

    def catch_up(self) -> None:
        for part in self._reader.read(self._offset):
            folded = gather(ranked(part.rows), self._reader.schemas)
            self.partial += sum(bool(row["unchanged"]) for rows in folded.batches for row in rows.rows.to_pylist())
            self._applier.apply(folded)
            self._offset = part.offset


def verified(rig: Rig, lake: Lake, following: Following) -> Differences:
    def wait(lsn: Lsn) -> None:
        following.reaches(lsn)
        lake.catch_up()

    return verify_table(rig.settings.source, TABLE, lake.sink, wait)


@pytest.mark.parametrize("identity", ["default", "full"])
def test_an_update_keeps_the_large_columns_it_did_not_send(rig: Rig, tmp_path: Path, identity: str) -> None:
    rig.capture_tables(ITEMS, f"alter table items replica identity {identity}", FILL, snapshot="initial")
    rig.begin()
    lake = Lake(rig.settings, tmp_path / "lake")
    with rig.following() as following:
        assert verified(rig, lake, following).rows == 20
        rig.database.execute("update items set n = id where id > 5", "update items set n = n + 1 where id > 15")
        found = verified(rig, lake, following)
        assert (found.missing, found.extra, found.different, found.rows) == (0, 0, 0, 20)
        rig.database.execute(
            f"{FILL.replace('(1, 20)', '(30, 32)')};"
            "update items set n = 7 where id >= 30; update items set id = id + 100 where id = 31"
        )
        found = verified(rig, lake, following)
        assert (found.missing, found.extra, found.different, found.rows) == (0, 0, 0, 23)
    assert identity == "full" or lake.partial > 0, "the server sent everything: nothing was tried"
    assert lake.letters.count() == 0


def test_a_partial_change_of_a_row_that_the_lake_lost_is_read_again(rig: Rig, tmp_path: Path) -> None:
    rig.capture_tables(ITEMS, FILL, snapshot="initial")
    rig.begin()
    lake = Lake(rig.settings, tmp_path / "lake")
    with rig.following() as following:
        assert verified(rig, lake, following).equal
        lake.sink.store(TABLE.name).current().delete("id in (3, 4)")
        rig.database.execute("update items set n = 1 where id in (3, 5)")
        found = verified(rig, lake, following)
        assert (found.missing, found.different) == (1, 0), "4 did not change: only verify sees that it is missing"
    assert lake.letters.count() == 0
    assert None not in lake.sink.stored(lake._reader.schemas.newest()[0])["words"].to_pylist()
