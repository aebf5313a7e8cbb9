"""From a real Postgres through the log into Delta, and proven equal value by value."""

from pathlib import Path

import pytest

import cdc.log
from cdc.config.settings import Settings, TableSettings
from cdc.model import Lsn, TableId
from sinks.context import SinkContext
from sinks.delta import sink
from sinks.delta.settings import DeltaSettings
from snapshots.verify.comparison import Differences, verify_table
from tests.fix_capture import Following, Rig
from tests.scenes.histories import Row, batch

TABLE = TableSettings(name=TableId("public", "items"))
ITEMS = (
    "create table items (id bigint primary key, label text, amount numeric(12,2), at timestamptz, clock timestamp,"
    " day date, raw bytea, doc jsonb, tags text[], ratio double precision, big text)"
)
FILL = (
    "insert into items select g, 'l' || g, g / 7.0, now() - g * interval '1 hour', now(), current_date - g,"
    " decode(md5(g::text), 'hex'), jsonb_build_object('g', g), array['a', g::text], 1 / g::float8, 'short'"
    " from generate_series(1, 300) g"
)
LARGE = "(select string_agg(md5(g::text), '') from generate_series(1, 400) g)"


class Lake:
    """A Delta sink fed from the log slice by slice."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._reader = cdc.log.open_reader(settings)
        self._offset = self._reader.start()
        self.sink = sink.open_sink(DeltaSettings(path=str(folder)), SinkContext(settings.state))

    def catch_up(self) -> None:
        for part in self._reader.read(self._offset):
            rows = [row for row in part.rows.to_pylist() if row["table"] == str(TABLE.name)]
            for schema_id in sorted({row["schema_id"] for row in rows}):
                schema = self._reader.schemas.get(TABLE.name, schema_id)
                self.sink.prepare(schema)
                for run in _runs([row for row in rows if row["schema_id"] == schema_id]):
                    self.sink.apply(batch(schema, run))
            self._offset = part.offset


def _runs(rows: list[Row]) -> list[list[Row]]:
    """Partial rows alone: what fills them must be the lake, and the fold of the tests prints documents anew."""
    runs: list[list[Row]] = [[]]
    for row in rows:
        if row["unchanged"]:
            runs += [[row], []]
        else:
            runs[-1].append(row)
    return [run for run in runs if run]


@pytest.fixture
def filled(rig: Rig) -> Rig:
    rig.capture_tables(ITEMS, FILL, snapshot="initial")
    rig.begin()
    return rig


def verified(rig: Rig, lake: Lake, following: Following) -> Differences:
    def wait(lsn: Lsn) -> None:
        following.reaches(lsn)
        lake.catch_up()

    return verify_table(rig.settings.source, TABLE, lake.sink, wait)


def test_snapshot_and_stream_end_as_the_source(filled: Rig, tmp_path: Path) -> None:
    lake = Lake(filled.settings, tmp_path / "lake")
    with filled.following() as following:
        assert verified(filled, lake, following).equal
        filled.database.execute(
            f"update items set big = {LARGE} where id <= 20",
            "update items set label = 'toast is not sent' where id <= 10",
            "update items set id = id + 1000 where id between 30 and 40",
            "delete from items where id between 50 and 60",
            "insert into items (id, ratio, amount) values (5000, 'NaN', -9999999999.99), (5001, '-Infinity', 0)",
            "insert into items (id, big) select 6000, string_agg(md5(g::text), '') from generate_series(1, 400) g",
            "update items set label = 'same batch' where id = 6000",
        )
        found = verified(filled, lake, following)
        assert (found.missing, found.extra, found.different, found.rows) == (0, 0, 0, 292)
        filled.database.execute(
            "alter table items add column extra int",
            "update items set extra = id where id < 5",
            "alter table items alter column extra type bigint",
            "update items set extra = 1234567890123 where id = 1",
        )
        found = verified(filled, lake, following)
        assert (found.missing, found.extra, found.different, found.rows) == (0, 0, 0, 292)
        filled.database.execute("truncate items", "insert into items (id, label) values (1, 'after')")
        found = verified(filled, lake, following)
        assert (found.missing, found.extra, found.different, found.rows) == (0, 0, 0, 1)


def test_a_changed_value_in_the_lake_is_found(filled: Rig, tmp_path: Path) -> None:
    lake = Lake(filled.settings, tmp_path / "lake")
    with filled.following() as following:
        assert verified(filled, lake, following).equal
        table = lake.sink.store(TABLE.name).current()
        table.update({"clock": "clock + INTERVAL '1 microsecond'"}, predicate="id = 7")
        table.delete("id = 8")
        found = verified(filled, lake, following)
    assert (found.missing, found.extra, found.different) == (1, 0, 1)
    assert found.examples == {"missing": ("8",), "different": ("7",)}
