"""Quarantines an unreadable segment, so that the rest of the log can be read.

Never automatic: a reader that meets bad bytes stops and names the file. Quarantine loses the segment's changes, so its
tables need a backfill. The file is kept under `quarantine/` for inspection.
"""

from cdc.errors import LogCorrupt
from cdc.log.segments import segment_file
from cdc.log.segments.merge import SegmentMerger, recover_marks
from cdc.log.segments.segment_names import Segment, after
from cdc.log.segments.storage import WriterStorage


def quarantine(storage: WriterStorage, sequence: int) -> Segment:
    """Replace the segment with this sequence number by an empty one; returns the quarantined segment.

    Marks that only this segment has are lost.
    """
    view = storage.view()
    segment = next(iter(after(view.chain.kept, sequence - 1)), None)
    if segment is None or segment.start > sequence:
        raise LogCorrupt(f"The log has no segment with sequence {sequence}.", "See: millrace log show")
    storage.quarantine(view.stored[segment])
    cut = segment_file.Cut(segment.stop, segment.end, 0, 0)
    marks = recover_marks(view, segment.start - 1)
    SegmentMerger(storage).replace(view, (segment,), (), (cut,), marks=marks)
    return segment
