"""The content of a segment: Parquet with LOG_SCHEMA, page checksums, and marks and cuts in its key-value metadata.

Large segments of a pipeline on a cluster are ordered by bucket (`bucket_layout`): format 2.

Readers check schema, row count and checksums; if one is wrong, LogCorrupt names the file. Nothing is ever unpickled
or evaluated.
"""

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import IO, Any, Literal, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.errors import LogCorrupt
from cdc.log.bucket_layout import BUCKETED, LEAST_ROWS, arranged, in_buckets, in_order
from cdc.log.key_hash import BUCKETS
from cdc.log.segments.segment_names import Segment, parse
from cdc.log.segments.storage import SegmentPart, StoredSegment
from cdc.model import LOG_SCHEMA, ZERO_LSN, Lsn

_METADATA_KEY = b"millrace"
_FORMAT, _BUCKETED_FORMAT = 1, 2
_MAX_GROUP_BYTES = 8 << 30
"""Readers refuse a row group that claims to be larger uncompressed: the writer's have at most one append or 128 MB."""
GROUP_ROWS = 1 << 17
ALL_BUCKETS = range(BUCKETS)
Compression = Literal["lz4", "zstd", "none"]
_ORDERED = ("version", "commit_lsn", "ordinal", "xid", "commit_ts")


@dataclass(frozen=True, slots=True)
class Cut:
    """One original entry of a merged segment: its sequence number, end, number of rows and newest commit time."""

    sequence: int
    end: Lsn
    rows: int
    newest: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """What a segment stores beside its rows."""

    marks: Mapping[str, str]
    cuts: Sequence[Cut] = ()
    segment: Segment | None = None
    """The segment that the file is, where the file's name does not say it."""
    parts: Sequence[tuple[str, int]] = ()
    """Path and size of the files that have the rows, if this one has none."""

    def encoded(self, stripes: Sequence[int] | None = None) -> dict[str, str]:
        """As Parquet key-value metadata. `stripes`: the row groups of each stripe, in a file ordered by bucket."""
        cuts = [[cut.sequence, cut.end, cut.rows, cut.newest] for cut in self.cuts]
        metadata: dict[str, object] = {"format": _FORMAT, "marks": dict(self.marks), "cuts": cuts}
        if stripes is not None:
            metadata |= {"format": _BUCKETED_FORMAT, "stripes": list(stripes)}
        if self.segment is not None:
            metadata |= {"segment": str(self.segment), "parts": [list(part) for part in self.parts]}
        return {_METADATA_KEY.decode(): json.dumps(metadata, separators=(",", ":"))}


class SegmentFile:
    """Writes one Parquet file of the log. `by_bucket` orders each stripe by bucket."""

    def __init__(
        self,
        sink: pa.NativeFile | IO[bytes],
        compression: Compression,
        level: int | None = None,
        *,
        by_bucket: bool = False,
    ) -> None:
        self._parquet = _writer(sink, compression, level, BUCKETED if by_bucket else LOG_SCHEMA)
        self._stripes: list[int] | None = [] if by_bucket else None

    def write(self, rows: pa.Table) -> None:
        """Write rows as one stripe; in the order of the log as row groups of limited size."""
        if self._stripes is None:
            self._parquet.write_table(rows, row_group_size=GROUP_ROWS)
            return
        groups = list(arranged(rows))
        for group in groups:
            self._parquet.write_table(group, row_group_size=group.num_rows)
        self._stripes.append(len(groups))

    def finish(self, metadata: Metadata) -> None:
        """Write the metadata and the footer."""
        self._parquet.add_key_value_metadata(metadata.encoded(self._stripes))
        self._parquet.close()


def _writer(
    sink: pa.NativeFile | IO[bytes], compression: Compression, level: int | None, schema: pa.Schema
) -> pq.ParquetWriter:
    """A Parquet writer with the log's options.

    Measured on rows of 220 bytes: with dictionaries only for the two columns that repeat and delta encoding for the
    ascending ones a row takes 0.65 µs, against 0.9 µs with Parquet's defaults; checksums add no measurable cost.
    """
    return pq.ParquetWriter(
        sink,
        schema,
        compression=compression,
        compression_level=level,
        use_dictionary=["table", "op"],  # type: ignore[arg-type]
        column_encoding=dict.fromkeys(_ORDERED, "DELTA_BINARY_PACKED"),
        write_statistics=["table", "version", "commit_lsn", *(["bucket"] if schema is BUCKETED else [])],
        store_schema=False,
        write_page_checksum=True,
    )


def encode(rows: pa.Table, metadata: Metadata, compression: Compression, *, by_bucket: bool = False) -> pa.Buffer:
    """The bytes of one segment; ordered by bucket, if asked, where it is large enough to be worth it."""
    sink = pa.BufferOutputStream()
    file = SegmentFile(sink, compression, by_bucket=by_bucket and rows.num_rows >= LEAST_ROWS)
    file.write(rows)
    file.finish(metadata)
    return sink.getvalue()


@dataclass(frozen=True, slots=True)
class Encoding:
    """How a writer encodes fresh segments."""

    compression: Compression = "lz4"
    by_bucket: bool = False

    def encode(self, rows: pa.Table, metadata: Metadata) -> pa.Buffer:
        """The bytes of one file."""
        return encode(rows, metadata, self.compression, by_bucket=self.by_bucket)


def checked(rows: pa.Table) -> pa.Table:
    """The rows with exactly LOG_SCHEMA. Raises if a column is missing, so that the caller fails and not a reader."""
    return rows if rows.schema.equals(LOG_SCHEMA) else rows.select(LOG_SCHEMA.names).cast(LOG_SCHEMA)


@dataclass(frozen=True, slots=True)
class Extent:
    """The number of rows and their range of LSNs and times, as stored in a segment's name."""

    rows: int = 0
    first: Lsn = ZERO_LSN
    last: Lsn = ZERO_LSN
    newest: int = 0

    @classmethod
    def of(cls, rows: pa.Table) -> Self:
        """The extent of some rows."""
        if rows.num_rows == 0:
            return cls()
        lsns: dict[str, int] = pc.min_max(rows["commit_lsn"]).as_py()  # type: ignore[assignment]
        newest = pc.max(rows["commit_ts"]).cast(pa.int64()).as_py()
        return cls(rows.num_rows, Lsn(lsns["min"]), Lsn(lsns["max"]), max(newest, 0))

    def with_more(self, other: Self) -> Self:
        """The extent of both."""
        if not (self.rows and other.rows):
            return self if self.rows else other
        first, last = min(self.first, other.first), max(self.last, other.last)
        return replace(self, rows=self.rows + other.rows, first=first, last=last, newest=max(self.newest, other.newest))


@contextmanager
def opened(part: SegmentPart) -> Iterator[pq.ParquetFile]:
    """Open one Parquet file for reading. FileNotFoundError reaches the caller: a merge may have removed the file."""
    try:
        with part.open() as source, _parquet(source, part.name) as file:
            yield file
    except (pa.ArrowException, ValueError) as error:
        raise corrupt(part.name, "is not readable") from error
    except OSError as error:
        # pyarrow reports bad bytes as an OSError without an errno.
        if error.errno in (None, errno.EIO, errno.ELOOP):
            raise corrupt(part.name, "is not readable") from error
        raise


def _parquet(source: pa.NativeFile, name: str) -> pq.ParquetFile:
    file = pq.ParquetFile(source, page_checksum_verification=True)
    if not file.schema_arrow.equals(LOG_SCHEMA) and not file.schema_arrow.equals(BUCKETED):
        raise corrupt(name, "has columns that are not the log's")
    groups = (file.metadata.row_group(index) for index in range(file.metadata.num_row_groups))
    if any(group.total_byte_size > _MAX_GROUP_BYTES for group in groups):
        raise corrupt(name, "claims a row group larger than any that the log writes")
    return file


def corrupt(name: str, what: str) -> LogCorrupt:
    """The error that names a bad file."""
    return LogCorrupt(
        f"Log file {name} {what}.",
        "Restore it from a backup, or remove it with `millrace log quarantine` and backfill its tables.",
    )


def metadata(stored: StoredSegment, segment: Segment) -> Metadata:
    """The metadata of a segment. A fresh segment has one cut: itself."""
    with opened(stored.parts()[0]) as file:
        data = _decoded(file, stored.name)
    cuts = tuple(Cut(sequence, Lsn(end), rows, newest) for sequence, end, rows, newest in data["cuts"])
    return Metadata(data["marks"], cuts or (Cut(segment.stop, segment.end, segment.rows, segment.newest),))


def described(part: SegmentPart) -> tuple[Segment, Sequence[tuple[str, int]]]:
    """The segment of a file that holds its own name, and where its rows are, if they are not in this file."""
    with opened(part) as file:
        data = _decoded(file, part.name)
    segment = parse(data.get("segment", ""))
    if segment is None:
        raise corrupt(part.name, "does not say which segment it is")
    return segment, [(str(path), int(size)) for path, size in data.get("parts", ())]


def _decoded(file: pq.ParquetFile, name: str) -> dict[str, Any]:
    raw = (file.metadata.metadata or {}).get(_METADATA_KEY)
    if raw is None:
        raise corrupt(name, "was not written by millrace")
    data: dict[str, Any] = json.loads(raw)
    if data.get("format") not in (_FORMAT, _BUCKETED_FORMAT):
        raise corrupt(name, f"has format {data.get('format')!r}, this version reads {_FORMAT} and {_BUCKETED_FORMAT}")
    return data


def rows(stored: StoredSegment, segment: Segment, start: int = 0, stop: int | None = None) -> pa.Table:
    """Rows `start` to `stop` of a segment, in order. Reads only the row groups that contain them."""
    wanted = segment.rows if stop is None else stop
    tables = list(batches(stored, segment, start, wanted))
    table = pa.concat_tables(tables) if tables else LOG_SCHEMA.empty_table()
    if table.num_rows != wanted - start:
        raise corrupt(stored.name, f"has {table.num_rows} rows, but its name says {wanted - start}")
    return table


def batches(
    stored: StoredSegment, segment: Segment, start: int, stop: int, buckets: range = ALL_BUCKETS
) -> Iterator[pa.Table]:
    """The same rows, one stripe at a time, or only those with keys in some buckets."""
    seen = 0
    for part in stored.parts():
        with opened(part) as file:
            for stripe in _stripes(file):
                count = sum(file.metadata.row_group(index).num_rows for index in stripe)
                low, high = max(start - seen, 0), min(stop - seen, count)
                seen += count
                if low < high:
                    yield _stripe_rows(file, stripe, low, high, buckets)
    if seen != segment.rows:
        raise corrupt(stored.name, f"has {seen} rows, but its name says {segment.rows}")


def _stripes(file: pq.ParquetFile) -> list[range]:
    """The row groups of each stripe; in a file in the order of the log, each row group by itself."""
    raw = (file.metadata.metadata or {}).get(_METADATA_KEY, b"{}")
    counts = json.loads(raw).get("stripes") if file.schema_arrow.equals(BUCKETED) else None
    ends = np.cumsum(counts if counts is not None else [1] * file.metadata.num_row_groups).tolist()
    return [range(start, end) for start, end in pairwise([0, *ends])]


def _stripe_rows(file: pq.ParquetFile, stripe: range, low: int, high: int, buckets: range) -> pa.Table:
    """Rows `low` to `high` of a stripe, in the order of the log; opens only row groups that may have these buckets."""
    if not file.schema_arrow.equals(BUCKETED):
        table = file.read_row_group(stripe.start, use_threads=False).cast(LOG_SCHEMA)
        return in_buckets(table.slice(low, high - low), buckets)
    wanted = [index for index in stripe if _may_have(file, index, buckets)]
    groups = [file.read_row_group(index, use_threads=False).cast(BUCKETED) for index in wanted]
    if len(buckets) < BUCKETS:
        bucket = pc.field("bucket")
        groups = [group.filter((bucket >= buckets.start) & (bucket < buckets.stop)) for group in groups]
    return in_order(groups, low, high)


def _may_have(file: pq.ParquetFile, index: int, buckets: range) -> bool:
    found: Any = file.metadata.row_group(index).column(BUCKETED.get_field_index("bucket")).statistics
    return found is None or (found.min < buckets.stop and found.max >= buckets.start)
