"""Retention by age and size: one empty segment, which keeps position and marks, replaces the oldest segments."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from cdc.log.segments import segment_file
from cdc.log.segments.consumers import Consumers
from cdc.log.segments.merge import SegmentMerger, sizes_of
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.storage import View


def expired(
    kept: Sequence[Segment], sizes: Mapping[Segment, int], oldest: int, room: int, protected: int | None
) -> Sequence[Segment]:
    """The oldest segments that may be removed: past the age or beyond the size, and read by every consumer. Pure.

    `oldest` is the commit time (µs) before which rows are too old, `protected` the last sequence number that every
    registered consumer has read (None: no consumer is registered). A segment without rows has no age: it is removed
    together with the next one that has rows, so that a new log does not lose its start while a first reader opens it.
    """
    total = sum(sizes[segment] for segment in kept)
    going = 0
    for count, segment in enumerate(kept, start=1):
        if protected is not None and segment.stop > protected:
            break
        if total > room or (segment.rows and segment.newest < oldest):
            going = count
        elif segment.rows:
            break
        total -= sizes[segment]
    return kept[:going]


class SegmentRetention:
    """Applies `expired` to a log."""

    def __init__(self, history: SegmentMerger, consumers: Consumers) -> None:
        self._history = history
        self._consumers = consumers

    def apply(self, hours: float, gigabytes: float, force: bool = False) -> int:
        """Remove segments past retention; returns how many entries they had. `force` ignores the consumers."""
        view = self._history.view()
        gone = self.due(view, hours, gigabytes, force)
        if not gone:
            return 0
        floor = () if view.chain.floor is None else (view.chain.floor,)
        last = gone[-1]
        cut = segment_file.Cut(last.stop, last.end, 0, 0)
        self._history.replace(view, (*floor, *gone), (), (cut,), expired=True)
        return last.stop - gone[0].start + 1

    def due(self, view: View, hours: float, gigabytes: float, force: bool = False) -> Sequence[Segment]:
        """The segments that `apply` would remove now."""
        oldest = int((datetime.now(UTC).timestamp() - hours * 3600) * 1e6)
        protected = None if force else self.protected()
        return expired(view.chain.kept, sizes_of(view), oldest, int(gigabytes * 2**30), protected)

    def protected(self) -> int | None:
        """The last sequence number that every registered consumer has read; None if there are no consumers."""
        return min((item.sequence for item in self._consumers.all()), default=None)
