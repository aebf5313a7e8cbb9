"""Segment logs that tests open themselves: in a folder, or in a bucket."""

from collections.abc import Mapping
from pathlib import Path

from cdc.log.segments.bucket.storage import BucketStorage
from cdc.log.segments.bucket.writer import BucketWriter
from cdc.log.segments.folder.storage import FolderStorage
from cdc.log.segments.folder.writer import FolderWriter
from cdc.log.segments.log import SegmentSettings, SegmentWriter
from cdc.log.segments.reader import SegmentReader
from cdc.log.segments.segment_file import Encoding
from cdc.log.segments.storage import LogLocation


def folder_writer(
    root: Path, settings: SegmentSettings, takeover: bool = False, *, by_bucket: bool = False
) -> SegmentWriter:
    """The writer of a log in a folder."""
    storage = FolderWriter(root, Encoding(settings.compression, by_bucket), takeover)
    return SegmentWriter(storage, settings, by_bucket=by_bucket)


def folder_reader(root: Path) -> SegmentReader:
    """A reader of a log in a folder."""
    return SegmentReader(FolderStorage(root))


def location(uri: str, options: Mapping[str, str]) -> LogLocation:
    """A log in a bucket."""
    return LogLocation(uri, tuple(sorted(options.items())))


def bucket_writer(where: LogLocation, folder: Path, settings: SegmentSettings, unreadable: int = 0) -> SegmentWriter:
    """The writer of a log in a bucket; with a folder of its own it is on another machine."""
    return SegmentWriter(BucketWriter(where, folder, Encoding(settings.compression), unreadable), settings)


def bucket_reader(where: LogLocation) -> SegmentReader:
    """A reader of a log in a bucket that knows nothing yet."""
    return SegmentReader(BucketStorage(where))
