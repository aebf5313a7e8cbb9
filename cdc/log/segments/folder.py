"""The log's folder: `hot/` for what was appended lately, `history/` for what was merged, and cheap listings of both.

A listing is kept as long as the folder's modification time stands still. The trap: that time has the grain of a
kernel tick, so a listing taken within a grain of the last change may have missed a second one and is not kept.
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cdc.errors import LogError
from cdc.log.segments.segment_names import Chain, Hole, Segment, chain, parse

HOT = "hot"
HISTORY = "history"
_GRAIN_NS = 50_000_000
_HOLE_LOOKS = 5


@dataclass(frozen=True, slots=True)
class Listing:
    """What a folder held at one time."""

    changed: int
    """Modification time (ns) that this listing stands for; 0: do not keep it."""
    places: Mapping[Segment, Path]
    strangers: tuple[str, ...]


_NOTHING = Listing(0, {}, ())


def _changed(path: Path) -> int:
    try:
        stamp = path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
    return stamp if time.time_ns() - stamp > _GRAIN_NS else 0


def _listed(path: Path) -> Listing:
    changed = _changed(path)
    names = _names(path)
    places, strangers = _sorted(path, names)
    if not changed or _changed(path) != changed:
        # The folder changes while it is read, and may have shown a newer name without an older one. All names up to
        # the newest that was seen were there before a second look began, so that look has every one of them.
        newest = max((segment.stop for segment in places), default=0)
        places, strangers = _sorted(path, _names(path))
        places = {segment: place for segment, place in places.items() if segment.stop <= newest}
        changed = 0
    return Listing(changed, places, tuple(sorted(strangers)))


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 -- ten thousand names: Path objects only for those that are ours
    except FileNotFoundError:
        return []


def _sorted(path: Path, names: list[str]) -> tuple[dict[Segment, Path], list[str]]:
    """Our segments, and what else lies there."""
    places: dict[Segment, Path] = {}
    strangers = []
    for name in names:
        segment = parse(name)
        if segment is None:
            strangers.append(name)
        else:
            places[segment] = path / name
    return places, strangers


@dataclass(frozen=True, slots=True)
class View:
    """The whole log at one time: its segments in order, and where each lies."""

    chain: Chain
    places: Mapping[Segment, Path]
    strangers: tuple[str, ...]


class LogFolder:
    """Lists the segments of one log; safe to share between threads."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hot = root / HOT
        self.history = root / HISTORY
        self._lock = threading.Lock()
        self._listings = (_NOTHING, _NOTHING)
        self._view = View(Chain(), {}, ())

    def view(self) -> View:
        """The log now. Looks again when there seems to be a hole: a folder that changes while it is read may
        show a newer name and miss an older one."""
        with self._lock:
            for look in range(_HOLE_LOOKS):
                try:
                    return self._look()
                except Hole:
                    self._listings = (_NOTHING, _NOTHING)
                    if look == _HOLE_LOOKS - 1:
                        raise
                    time.sleep(0.01 * (look + 1))
            raise LogError("The log folder could not be listed.")

    def _look(self) -> View:
        # Hot first: what a merge moves between the two looks is then seen twice, never not at all.
        hot = self._fresh(self._listings[0], self.hot)
        history = self._fresh(self._listings[1], self.history)
        if hot is not self._listings[0] or history is not self._listings[1]:
            places = {**hot.places, **history.places}
            strangers = (
                *(f"{HOT}/{name}" for name in hot.strangers),
                *(f"{HISTORY}/{name}" for name in history.strangers),
            )
            self._view = View(chain(places), places, strangers)
            self._listings = (hot, history)
        return self._view

    @staticmethod
    def _fresh(known: Listing, path: Path) -> Listing:
        if known.changed and _changed(path) == known.changed:
            return known
        return _listed(path)
