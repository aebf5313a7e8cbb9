"""Segments that are ordered by bucket: the same log for readers of all of it, less to read for a task."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdc.log import bucket_layout
from cdc.log.key_hash import buckets_of
from cdc.log.segments.log import SegmentSettings, SegmentWriter
from cdc.log.shares import bucket_ranges
from cdc.log.spark.splits import share_of
from cdc.model import LOG_SCHEMA, Entry, Lsn
from cdc.ports import Offset
from tests.scenes.histories import change, log_table
from tests.scenes.segment_logs import folder_reader, folder_writer

ROWS = 3_000


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SegmentWriter:
    monkeypatch.setattr("cdc.log.segments.segment_file.LEAST_ROWS", 100)
    settings = SegmentSettings(hot_segments=1, retention_hours=1e6)
    return folder_writer(tmp_path / "log", settings, by_bucket=True)


def entry(number: int, rows: int = ROWS) -> Entry:
    """Random keys, and a truncate in the middle, which has no key."""
    first = 1_000_000 * (number + 1)
    keys = np.random.default_rng(number).integers(0, 500, rows).tolist()
    found = [change("u", f'{{"id":{key}}}', first + at, f'{{"id":{key}}}', ordinal=at) for at, key in enumerate(keys)]
    found[rows // 2] = change("t", None, first + rows // 2, ordinal=rows // 2)
    return Entry(log_table(found), Lsn(first + rows))


def everything(root: Path) -> pa.Table:
    pieces = folder_reader(root).read(Offset("0"))
    return pa.concat_tables([LOG_SCHEMA.empty_table(), *(piece.rows for piece in pieces)])


def shared(root: Path, after: int, until: int, count: int) -> list[pa.Table]:
    reader = folder_reader(root)
    shares = [share_of(after, until, *buckets) for buckets in bucket_ranges(count)]
    return [pa.concat_tables([LOG_SCHEMA.empty_table(), *reader.read_share(share)]) for share in shares]


def test_the_whole_log_keeps_its_order_also_after_a_merge_and_as_a_large_transaction(
    writer: SegmentWriter, tmp_path: Path
) -> None:
    entries = [entry(number) for number in range(4)]
    for one in entries[:3]:
        writer.append(one)
    spool = writer.spool()
    spool.write(entries[3].rows)
    spool.publish(entries[3].end)
    wanted = pa.concat_tables([one.rows for one in entries])
    assert everything(tmp_path / "log").equals(wanted)
    assert [piece.rows.num_rows for piece in folder_reader(tmp_path / "log").read(Offset("1"))] == [ROWS] * 3
    writer.maintain()
    assert any(path.suffix == ".parquet" for path in (tmp_path / "log" / "history").iterdir())
    assert everything(tmp_path / "log").equals(wanted)


@pytest.mark.parametrize("count", [1, 3, 8])
def test_shares_divide_the_rows_by_key_and_keep_the_order_of_each_key(
    count: int, writer: SegmentWriter, tmp_path: Path
) -> None:
    entries = [entry(0), entry(1, 50), entry(2)]  # the second is too small to be ordered by bucket
    for one in entries:
        writer.append(one)
    for merged in (False, True):
        found = shared(tmp_path / "log", 0, 3, count)
        wanted = pa.concat_tables([one.rows for one in entries])
        assert sum(rows.num_rows for rows in found) == wanted.num_rows
        for (low, high), rows in zip(bucket_ranges(count), found, strict=True):
            buckets = buckets_of(wanted["key"].combine_chunks())
            assert rows.equals(wanted.filter(pa.array((buckets >= low) & (buckets < high)))), merged
        writer.maintain()
    assert [rows.num_rows for rows in shared(tmp_path / "log", 1, 2, 1)] == [50]


def test_a_task_opens_only_row_groups_that_may_have_its_buckets(
    writer: SegmentWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.append(entry(0))
    opened: list[int] = []
    read = pq.ParquetFile.read_row_group

    def counted(file: pq.ParquetFile, index: int, use_threads: bool) -> pa.Table:
        opened.append(index)
        return read(file, index, use_threads=use_threads)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    (first, *_) = shared(tmp_path / "log", 0, 1, 8)
    assert first.num_rows and sorted(set(opened)) == list(range(8))
    assert len(opened) == 8, "each of eight tasks opens its own row group"


def test_the_bucket_of_a_key_does_not_depend_on_the_process_or_on_the_other_keys() -> None:
    keys = pa.array(['{"id":1}', None, '{"id":2}', '{"id":"ü"}', ""])
    assert buckets_of(keys).tolist() == [buckets_of(keys.slice(at, 1)).tolist()[0] for at in range(len(keys))]
    assert buckets_of(keys).tolist() == [36, 0, 168, 221, 217]
    assert list(bucket_layout.arranged(LOG_SCHEMA.empty_table())) == []
