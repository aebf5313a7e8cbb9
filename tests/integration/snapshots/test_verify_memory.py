"""What `verify` holds does not grow with the table: a few pieces of it, and the rows that differ up to a limit."""

import threading
import weakref
from collections.abc import Iterator, Sequence

import pyarrow as pa
import pytest

from cdc.config.settings import SourceSettings, TableSettings
from cdc.model import TableId, TableSchema
from sinks.memory import MemorySink, Row, Store, StoredRow
from snapshots.tables import copy
from snapshots.verify import comparison
from snapshots.verify.comparison import Compared, verify_table
from snapshots.verify.row_comparison import Comparison, compare
from tests.fix_servers import Database
from tests.scenes.snapshot import MakeSettings, pipeline

TABLE = TableSettings(name=TableId("public", "items"))
ROWS = 4000
_PIECE = 100


class Counted:
    """How many tables are alive, and the most that ever were."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._alive = self.most = 0

    def __call__(self, rows: pa.Table) -> pa.Table:
        with self._lock:
            self._alive += 1
            self.most = max(self.most, self._alive)
        weakref.finalize(rows, self._gone)
        return rows

    def _gone(self) -> None:
        with self._lock:
            self._alive -= 1


class PiecewiseSink(MemorySink):
    """Gives its rows in pieces, in an order of its own, and has its pieces counted."""

    def __init__(self, count: int) -> None:
        super().__init__("store", Store())
        self.counted = Counted()
        self._count = count

    def stored(self, schema: TableSchema) -> pa.Table:
        raise AssertionError("the whole table was asked for")

    def stored_pieces(self, schema: TableSchema, keys: Sequence[str] | None = None) -> Iterator[pa.Table]:
        for start in reversed(range(0, self._count, _PIECE)):
            ids = range(start + 1, min(start + _PIECE, self._count) + 1)
            images = {"key": [f'{{"id":{one}}}' for one in ids], "after": [f'{{"id":{one},"n":{one}}}' for one in ids]}
            yield self.counted(pa.table(images))

    def expected(self, schema: TableSchema, images: pa.Table) -> pa.Table:
        return self.counted(super().expected(schema, images))


@pytest.fixture
def source(database: Database, settings_of: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> SourceSettings:
    monkeypatch.setattr(copy, "BLOCK_ROWS", _PIECE)
    monkeypatch.setattr(copy, "_PART_BYTES", 200)
    database.execute(
        "create table items (id int primary key, n int)",
        f"insert into items select g, g from generate_series(1, {ROWS}) g",
        "analyze items",
    )
    return pipeline(settings_of, database, "public.items").source


def test_a_few_pieces_of_an_equal_table_are_held_at_once(source: SourceSettings) -> None:
    sink = PiecewiseSink(ROWS)
    seen: list[Compared] = []
    found = verify_table(source, TABLE, sink, report=seen.append)
    assert (found.equal, found.rows, found.undecided) == (True, ROWS, 0)
    assert sink.counted.most <= 6, "of 80 pieces"
    assert max(one.source for one in seen) == max(one.stored for one in seen) == seen[0].estimate == ROWS


def test_a_store_that_lost_most_rows_differs_and_only_a_part_of_them_is_held(
    source: SourceSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comparison, "SUSPECT_ROWS", 300)
    found = verify_table(source, TABLE, PiecewiseSink(500))
    assert not found.equal
    assert 0 < found.missing <= 300
    assert ROWS - 500 <= found.missing + found.undecided < ROWS, "with rows that share a group with missing ones"
    assert (found.extra, found.different) == (0, 0)


def test_equal_rows_of_a_table_without_a_key_are_one_row_in_the_store(
    database: Database, settings_of: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store holds one of them, however many the source has; and few of them are held to see it."""
    monkeypatch.setattr(copy, "BLOCK_ROWS", _PIECE)
    monkeypatch.setattr(copy, "_PART_BYTES", 200)
    database.execute(
        "create table items (n int)",
        "alter table items replica identity full",
        f"insert into items select 7 from generate_series(1, {ROWS})",
    )
    store = {"public.items": StoredRow({'{"n":7}': Row(1, '{"n":7}')})}
    held: list[int] = []

    def compared(schema: TableSchema, expected: pa.Table, stored: pa.Table) -> Comparison:
        held.append(expected.num_rows)
        return compare(schema, expected, stored)

    monkeypatch.setattr(comparison, "compare", compared)
    source = pipeline(settings_of, database, "public.items").source
    found = verify_table(source, TABLE, MemorySink("store", store))
    assert (found.equal, found.rows, found.undecided) == (True, ROWS, 0)
    assert 0 < max(held) <= ROWS / 50
