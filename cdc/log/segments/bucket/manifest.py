"""The manifest: which objects have the log up to a sequence number. Pure.

A merge, retention and compaction become visible by the next manifest, all at once. Segments after `stop` are the
objects of the sequence `hot`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from cdc.errors import LogCorrupt
from cdc.log.segments.segment_names import Segment, parse

_FORMAT = 1
StoredObject = tuple[str, int]
"""Path and size."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The segments up to `stop`."""

    stop: int = 0
    epoch: int = 0
    """The epoch of the object in `hot` that had the entry `stop`: where the sequence goes on."""
    segments: Sequence[tuple[Segment, Sequence[StoredObject]]] = ()

    def encoded(self) -> bytes:
        """The object's content."""
        segments = [[str(segment), [list(item) for item in objects]] for segment, objects in self.segments]
        data = {"format": _FORMAT, "stop": self.stop, "epoch": self.epoch, "segments": segments}
        return json.dumps(data, separators=(",", ":")).encode().ljust(128)  # longer than a seal

    @classmethod
    def decoded(cls, content: bytes, name: str) -> "Manifest":
        """Raises LogCorrupt."""
        try:
            data = json.loads(content)
            if data["format"] != _FORMAT:
                raise ValueError(data["format"])
            segments = [
                (_segment(segment), [(str(path), int(size)) for path, size in objects])
                for segment, objects in data["segments"]
            ]
            return cls(int(data["stop"]), int(data["epoch"]), segments)
        except (ValueError, KeyError, TypeError):
            raise LogCorrupt(f"Log object {name} is not readable.", "Restore it from a backup.") from None


def _segment(name: str) -> Segment:
    segment = parse(name)
    if segment is None:
        raise ValueError(name)
    return segment
