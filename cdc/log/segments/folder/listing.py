"""The log's folder: `hot/` holds fresh segments, `history/` merged ones. Listings of both are cached.

A listing is cached while the folder's modification time does not change. The trap: that time advances in kernel ticks,
so a listing taken within one tick of the last change may have missed a second change and is not cached. While entries
are appended all the time, the names are therefore listed at each look, and only new ones are parsed and put in order:
with 500 fresh segments that is a tenth of the cost of all of them.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
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
    names: frozenset[str]
    paths: Mapping[Segment, Path]
    foreign_files: tuple[str, ...]


_NOTHING = Listing(0, frozenset(), {}, ())


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
        names = [*(each.name for each in paths.values()), *foreign_files]
        changed = 0
    return Listing(changed, frozenset(names), paths, tuple(sorted(foreign_files)))


def _with_appended(known: Listing, path: Path, head: int) -> tuple[Listing, Sequence[Segment] | None]:
    """The folder now, and the entries that were appended after `head`; None if it has changed in any other way."""
    changed = _mtime(path)
    if known.changed and changed == known.changed:
        return known, ()
    names = _names(path)
    new = [name for name in names if name not in known.names]
    appended = sorted(filter(None, map(parse, new)), key=lambda segment: segment.start)
    expected = list(range(head + 1, head + 1 + len(new)))
    if len(names) - len(new) < len(known.names) or [one.start for one in appended] != expected:
        return _list_folder(path), None
    if any(one.start != one.stop for one in appended):
        return _list_folder(path), None
    paths = {segment: path / str(segment) for segment in appended}
    changed = changed if _mtime(path) == changed else 0
    return Listing(changed, known.names.union(new), {**known.paths, **paths}, known.foreign_files), appended


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
        known_hot, known_history = self._listings
        # Hot first: a segment that a merge moves between the two listings is seen twice rather than not at all.
        hot, appended = _with_appended(known_hot, self.hot, self._view.chain.head)
        history = self._current(known_history, self.history)
        if appended is None or history is not known_history:
            self._view = _view(hot, history)
        elif appended:
            self._view = _continued(self._view, appended, hot.paths)
        self._listings = (hot, history)
        return self._view

    @staticmethod
    def _current(known: Listing, path: Path) -> Listing:
        if known.changed and _mtime(path) == known.changed:
            return known
        return _list_folder(path)


def _view(hot: Listing, history: Listing) -> View:
    paths = {**hot.paths, **history.paths}
    foreign_files = (
        *(f"{HOT}/{name}" for name in hot.foreign_files),
        *(f"{HISTORY}/{name}" for name in history.foreign_files),
    )
    stored = {segment: LocalSegment(path) for segment, path in paths.items()}
    return View(chain(paths), stored, foreign_files)


def _continued(view: View, appended: Sequence[Segment], paths: Mapping[Segment, Path]) -> View:
    known = view.chain
    more = {segment: LocalSegment(paths[segment]) for segment in appended}
    longer = Chain((*known.kept, *appended), known.floor, known.superseded)
    return View(longer, {**view.stored, **more}, view.foreign_files)
