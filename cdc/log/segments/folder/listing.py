"""The log's folder: `hot/` holds fresh segments, `history/` merged ones. Listings of both are cached.

A listing is cached while the folder's modification time does not change. The trap: that time advances in kernel ticks,
so a listing taken within one tick of the last change may have missed a second change and is not cached.
"""

import os
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cdc.errors import LogError
from cdc.log.segments.folder.files import LocalSegment
from cdc.log.segments.segment_names import Chain, Segment, SequenceGap, chain, parse
from cdc.log.segments.storage import View

HOT = "hot"
HISTORY = "history"
_MTIME_TICK_NS = 50_000_000
_LISTING_TRIES = 5


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a folder at one time."""

    changed: int
    """Modification time (ns) of the folder for this listing; 0: do not cache it."""
    paths: Mapping[Segment, Path]
    foreign_files: tuple[str, ...]


_NOTHING = Listing(0, {}, ())


def _mtime(path: Path) -> int:
    try:
        stamp = path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
    return stamp if time.time_ns() - stamp > _MTIME_TICK_NS else 0


def _list_folder(path: Path) -> Listing:
    changed = _mtime(path)
    names = _names(path)
    paths, foreign_files = _sort_names(path, names)
    if not changed or _mtime(path) != changed:
        # The folder changed during the listing, which may show a newer name and miss an older one. Every name up to
        # the newest one seen existed before the second listing began, so the second listing has all of them.
        newest = max((segment.stop for segment in paths), default=0)
        paths, foreign_files = _sort_names(path, _names(path))
        paths = {segment: paths[segment] for segment in paths if segment.stop <= newest}
        changed = 0
    return Listing(changed, paths, tuple(sorted(foreign_files)))


def _names(path: Path) -> list[str]:
    try:
        return os.listdir(path)  # noqa: PTH208 -- ten thousand names: build Path objects only for segments
    except FileNotFoundError:
        return []


def _sort_names(folder: Path, names: list[str]) -> tuple[dict[Segment, Path], list[str]]:
    """The segments among these names, and the names that are not segments."""
    paths: dict[Segment, Path] = {}
    foreign_files = []
    for name in names:
        segment = parse(name)
        if segment is None:
            foreign_files.append(name)
        else:
            paths[segment] = folder / name
    return paths, foreign_files


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
        """The log now. Lists again if a sequence number seems missing: a listing of a folder that changes may show a
        newer name and miss an older one."""
        with self._lock:
            for look in range(_LISTING_TRIES):
                try:
                    return self._list()
                except SequenceGap:
                    self._listings = (_NOTHING, _NOTHING)
                    if look == _LISTING_TRIES - 1:
                        raise
                    time.sleep(0.01 * (look + 1))
            raise LogError("The log folder could not be listed.")

    def _list(self) -> View:
        # Hot first: a segment that a merge moves between the two listings is seen twice rather than not at all.
        hot = self._current(self._listings[0], self.hot)
        history = self._current(self._listings[1], self.history)
        if hot is not self._listings[0] or history is not self._listings[1]:
            paths = {**hot.paths, **history.paths}
            foreign_files = (
                *(f"{HOT}/{name}" for name in hot.foreign_files),
                *(f"{HISTORY}/{name}" for name in history.foreign_files),
            )
            stored = {segment: LocalSegment(path) for segment, path in paths.items()}
            self._view = View(chain(paths), stored, foreign_files)
            self._listings = (hot, history)
        return self._view

    @staticmethod
    def _current(known: Listing, path: Path) -> Listing:
        if known.changed and _mtime(path) == known.changed:
            return known
        return _list_folder(path)
