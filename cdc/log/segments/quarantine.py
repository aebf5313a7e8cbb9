"""Setting aside a segment that cannot be read, so that the rest of the log can be.

Never done by itself: a reader that meets bad bytes stops and names the file. Who sets it aside loses its changes, and
must read the tables again; the file is kept under `quarantine/` for whoever wants to look.
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
    """Put an empty segment in the place of the one that holds this sequence number; returns the one set aside.

    Raises LogFenced while the writer runs. Marks that only this segment carried are forgotten with it.
    """
    lease = WriterLock.take(root)
    try:
        folder = LogFolder(root)
        view = folder.view()
        segment = next(iter(after(view.chain.kept, sequence - 1)), None)
        if segment is None or segment.start > sequence:
            raise LogCorrupt(f"The log holds no segment with sequence {sequence}.", "See: millrace log show")
        _keep(view.places[segment], root / "quarantine")
        cut = segment_file.Cut(segment.stop, segment.end, 0, 0)
        marks = recover_marks(view, segment.start - 1)
        SegmentMerger(folder, lease).replace(view, (segment,), (), (cut,), marks=marks)
    finally:
        lease.release()
    return segment


def _keep(place: Path, folder: Path) -> None:
    make_folder(folder)
    copy = folder / place.name
    if place.is_dir() and not place.is_symlink():
        shutil.copytree(place, copy, symlinks=True, dirs_exist_ok=True)
    elif not copy.exists():
        os.link(place, copy, follow_symlinks=False)
    sync_folder(folder)
