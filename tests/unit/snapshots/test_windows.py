"""Chunks between their marks: what each event of the stream does to those who wait."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from cdc.model import LOG_SCHEMA, Lsn, TableId, TableSchema
from snapshots.backfill.pace import Pace
from snapshots.backfill.reconcile import Chunk, Merged, PgSnapshot, Reread
from snapshots.backfill.windows import PendingChunk, Windows

SCHEMA = TableSchema(TableId("public", "t"), (), id=1)
ROWS = pa.table({"key": ["1", "2"], "after": ["{}", "{}"]})


def change(key: str, xid: int, table: str = "public.t") -> pa.Table:
    row = {
        "table": table,
        "op": "u",
        "key": key,
        "after": "{}",
        "version": 5,
        "commit_lsn": 6,
        "ordinal": 0,
        "xid": xid,
        "commit_ts": datetime.now(UTC),
        "schema_id": 1,
    }
    return pa.Table.from_pylist([row], schema=LOG_SCHEMA)


def expecting(windows: Windows) -> PendingChunk:
    pending = PendingChunk("job", SCHEMA, chunk=Chunk(ROWS, PgSnapshot.parse("100:100:"), Lsn(1), 1))
    windows.expect("token", pending)
    return pending


def outcome(windows: Windows) -> Merged | Reread:
    pending = windows.high("token")
    assert pending is not None
    assert pending.window is not None
    assert pending.chunk is not None
    return pending.window.merge(pending.chunk)


def test_only_changes_between_the_marks_and_of_the_table_count() -> None:
    windows = Windows()
    expecting(windows)
    windows.add(change("1", 10))
    windows.low("token")
    windows.add(change("2", 11))
    windows.add(change("1", 12, "public.other"))
    merged = outcome(windows)
    assert isinstance(merged, Merged)
    assert merged.rows["key"].to_pylist() == ["1"]
    assert merged.dropped == 1


def test_a_commit_before_the_low_mark_that_the_chunk_cannot_see_asks_for_another_look() -> None:
    windows = Windows()
    expecting(windows)
    windows.add(change("9", 105))
    windows.low("token")
    assert outcome(windows) == Reread("a transaction in the log is not visible yet")


def test_a_transaction_too_large_to_look_at_asks_for_a_smaller_chunk() -> None:
    windows = Windows()
    expecting(windows)
    windows.low("token")
    windows.invalidate(change("1", 10), "too large")
    windows.add(change("2", 11))
    assert outcome(windows) == Reread("too large", smaller=True)


def test_an_interrupted_stream_tells_those_who_wait() -> None:
    windows = Windows()
    pending = expecting(windows)
    windows.low("token")
    windows.reset()
    assert pending.done.is_set()
    assert isinstance(pending.outcome, Reread)
    assert windows.high("token") is None


def test_marks_of_an_earlier_life_are_passed_over() -> None:
    windows = Windows()
    windows.low("unknown")
    assert windows.high("unknown") is None


@pytest.mark.parametrize(
    ("seconds", "size", "limit"),
    [(0.25, 100, 4000), (0.01, 100, 4000), (5.0, 100, 1000), (0.5, 100, 2000), (0.01, 2_000 * 2**20, 16)],
    ids=["quick", "very quick", "slow", "right", "wide rows"],
)
def test_chunks_grow_and_shrink_with_what_they_cost(seconds: float, size: int, limit: int) -> None:
    pace = Pace()
    pace.chunk_done(2000, size, seconds)
    assert pace.limit == limit


def test_a_smaller_chunk_is_never_empty_and_waiting_does_not_shrink() -> None:
    pace = Pace(limit=2)
    pace.chunk_reread(smaller=False)
    assert pace.limit == 2
    for _ in range(3):
        pace.chunk_reread(smaller=True)
    assert pace.limit == 1
    assert pace.rereads == 4


def test_progress_has_a_rate_and_an_end() -> None:
    pace = Pace()
    pace.begin(100.0, 1000)
    pace.chunk_done(250, 1000, 0.5)
    facts = pace.facts(105.0, running=True)
    assert (facts["rows_per_second"], facts["eta_seconds"], facts["estimate"]) == (50.0, 15.0, 1000)
