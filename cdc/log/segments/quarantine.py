"""Quarantines an unreadable segment, so that the rest of the log can be read.

Never automatic: a reader that meets bad bytes stops and names the file. Quarantine loses the segment's changes, so its
tables need a backfill. The file is kept under `quarantine/` for inspection.
"""

import os
import shutil
from pathlib import Path

from cdc.durable_files import make_folder, sync_folder
from cdc.errors import LogCorrupt
from cdc.log.segments import segment_file
from cdc.log.segments.folder import LogFolder
from cdc.log.segments.merge import SegmentMerger, recover_marks
from cdc.log.segments.segment_names import Segment, after
from cdc.log.segments.writer_lock import WriterLock


def quarantine(root: Path, sequence: int) -> Segment:
    """Replace the segment with this sequence number by an empty one; returns the quarantined segment.

    Raises LogFenced while the writer runs. Marks that only this segment has are lost.
    """
    writer_lock = WriterLock.take(root)
    try:
        folder = LogFolder(root)
        view = folder.view()
        segment = next(iter(after(view.chain.kept, sequence - 1)), None)
        if segment is None or segment.start > sequence:
            raise LogCorrupt(f"The log has no segment with sequence {sequence}.", "See: millrace log show")
        _copy(view.paths[segment], root / "quarantine")
        cut = segment_file.Cut(segment.stop, segment.end, 0, 0)
        marks = recover_marks(view, segment.start - 1)
        SegmentMerger(folder, writer_lock).replace(view, (segment,), (), (cut,), marks=marks)
    finally:
        writer_lock.release()
    return segment


def _copy(path: Path, folder: Path) -> None:
    make_folder(folder)
    copy = folder / path.name
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, copy, symlinks=True, dirs_exist_ok=True)
    elif not copy.exists():
        os.link(path, copy, follow_symlinks=False)
    sync_folder(folder)
