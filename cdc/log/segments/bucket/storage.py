"""A segment log in a bucket, as its readers see it. See docs/adr/0027-segments-in-a-bucket.md.

hot/<number>-<epoch>        fresh segments: one object per entry, its name is its sequence number
manifests/<number>-<epoch>  which objects have the entries before those
history/, parts/            merged segments; the parts of large transactions
consumers/, schemas/        small JSON objects
"""

import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from cdc.errors import LogCorrupt
from cdc.log.segments import segment_file
from cdc.log.segments.bucket.access import LogBucket
from cdc.log.segments.bucket.content import ContentCache, ObjectPart, StoredObjects
from cdc.log.segments.bucket.manifest import Manifest, StoredObject
from cdc.log.segments.bucket.schemas import BucketSchemas
from cdc.log.segments.bucket.sequence import MOST_SEAL_BYTES, Name, SealedSequence
from cdc.log.segments.bucket.small_files import BucketSmallFiles
from cdc.log.segments.segment_names import Chain, Segment, SequenceGap, chain
from cdc.log.segments.storage import LogLocation, StoredSegment, View
from cdc.model import ZERO_LSN, Lsn

_PROBES = 8
"""Names that are tried one after the other before the rest is listed: a request for a name costs a twelfth."""
_LISTING_SECONDS = 5.0
"""After this time the bucket is listed: what a reader looks for by its name may have been merged meanwhile."""
_LISTING_TRIES = 5
_READERS = 16
_FIRST = Name(1, 0)


@dataclass(frozen=True, slots=True)
class _State:
    """What is known of the log: a manifest, and the fresh segments after it without a gap."""

    manifest: Manifest = field(default_factory=Manifest)
    manifest_name: Name = _FIRST
    """The name after the newest manifest."""
    fresh: tuple[tuple[Segment, StoredObjects], ...] = ()
    next: Name = _FIRST
    """The name of the next segment."""
    foreign_files: tuple[str, ...] = ()

    @property
    def end(self) -> Lsn:
        """The LSN up to which the log is complete."""
        newest = [segment for segment, _ in (*self.manifest.segments[-1:], *self.fresh[-1:])]
        return newest[-1].end if newest else ZERO_LSN


class BucketStorage:
    """Looks for the next segment by its name, and lists the bucket only now and then."""

    poll_seconds = 0.1
    """Looking costs a request: ten a second are 10 dollars a month at Amazon's prices."""

    def __init__(self, location: LogLocation, unreadable: int = 0) -> None:
        """`unreadable` is the number of a fresh segment that counts as empty, if its object is unreadable."""
        self.location = location
        self.bucket = LogBucket(location)
        self.schemas = BucketSchemas(self.bucket)
        self.consumers = BucketSmallFiles(self.bucket, "consumers")
        self._hot = SealedSequence(self.bucket, "hot")
        self._manifests = SealedSequence(self.bucket, "manifests")
        self._cache = ContentCache(self.bucket, self._missed)
        self._lock = threading.RLock()
        self._state = _State()
        self._view = View(Chain(), {}, ())
        self._listed_at = float("-inf")
        self._unreadable = unreadable

    def view(self) -> View:
        """The log now: one request, if nothing is new."""
        with self._lock:
            if time.monotonic() - self._listed_at > _LISTING_SECONDS:
                self._list()
            else:
                self._probe()
            return self._view

    def located(self, place: str) -> StoredSegment:
        """See LogStorage."""
        return self._stored([(str(path), int(size)) for path, size in json.loads(place)])

    def _missed(self) -> None:
        """An object is gone: a merge has replaced it, so what is known is out of date."""
        self._listed_at = float("-inf")

    def _stored(self, objects: Sequence[StoredObject]) -> StoredObjects:
        return StoredObjects(tuple(ObjectPart(path, size, self._cache) for path, size in objects))

    def _set(self, state: _State) -> None:
        self._state = state
        segments = [(segment, self._stored(objects)) for segment, objects in state.manifest.segments]
        stored: Mapping[Segment, StoredSegment] = dict([*segments, *state.fresh])
        self._view = View(chain(stored), stored, state.foreign_files)

    def _probe(self) -> None:
        """Ask for the next segments by their names."""
        name, found = self._state.next, list[tuple[Segment, StoredObjects]]()
        for _ in range(_PROBES):
            try:
                size = self._cache.fetch(self._hot.key(name))
            except FileNotFoundError:
                break
            if size <= MOST_SEAL_BYTES:
                name = self._hot.following(name, size)
                continue
            found.append(self._fresh(name, size))
            name = Name(name.number + 1, name.epoch)
        else:
            return self._list()
        if name != self._state.next:
            self._set(replace(self._state, fresh=(*self._state.fresh, *found), next=name))
        return None

    def _list(self) -> None:
        """List what is new. The listings are not of one moment: a segment that is not there may be in a newer manifest,
        and a manifest that is not there has a newer one."""
        for look in range(_LISTING_TRIES):
            try:
                self._set(self._with_listed(self._newest_manifest()))
            except (SequenceGap, FileNotFoundError):
                if look == _LISTING_TRIES - 1:
                    raise
            else:
                self._listed_at = time.monotonic()
                return

    def _newest_manifest(self) -> _State:
        """The state with the newest manifest, and without fresh segments that are in it."""
        names = [(name, size) for name, _, size in self._manifests.listed(self._state.manifest_name.number - 1) if name]
        state = self._state
        written = [name for name, size in names if size > MOST_SEAL_BYTES]
        if written:
            key = self._manifests.key(written[-1])
            manifest = Manifest.decoded(self.bucket.get(key), key)
            fresh = tuple(item for item in state.fresh if item[0].start > manifest.stop)
            state = replace(state, manifest=manifest, fresh=fresh)
            if state.next.number <= manifest.stop:
                state = replace(state, next=Name(manifest.stop + 1, manifest.epoch))
        if names:
            state = replace(state, manifest_name=self._manifests.following(*names[-1]))
        return state

    def _with_listed(self, state: _State) -> _State:
        """The state with all fresh segments. Raises SequenceGap."""
        newest: dict[int, tuple[Name, int]] = {}
        foreign = []
        for name, path, size in self._hot.listed(state.next.number - 1):
            if name is None:
                foreign.append(path)
            else:
                newest[name.number] = (name, size)  # of several, all but the last are seals
        following = self._hot.following(*newest[max(newest)]) if newest else state.next
        segments = [found for found in newest.values() if found[1] > MOST_SEAL_BYTES]
        for number, (name, _) in enumerate(segments, start=state.next.number):
            if name.number != number:
                raise SequenceGap(
                    f"The log has a gap: sequence numbers {number} to {name.number - 1} are missing.",
                    "Restore the missing objects, or take a new snapshot into an empty prefix of the bucket.",
                )
        fresh: Sequence[tuple[Segment, StoredObjects]] = ()
        if segments:
            with ThreadPoolExecutor(_READERS) as readers:
                fresh = tuple(readers.map(lambda found: self._fresh(*found), segments))
        known = {*state.foreign_files, *foreign}
        fresh = (*state.fresh, *_with_ends(fresh, state.end))
        return replace(state, fresh=fresh, next=following, foreign_files=tuple(sorted(known)))

    def _fresh(self, name: Name, size: int) -> tuple[Segment, StoredObjects]:
        """A segment, which its own object describes."""
        part = ObjectPart(self._hot.key(name), size, self._cache)
        try:
            segment, parts = segment_file.described(part)
        except LogCorrupt:
            if name.number != self._unreadable:
                raise
            segment, parts = Segment(name.number, name.number, 0, ZERO_LSN, ZERO_LSN, ZERO_LSN, 0, 0), []
        if not segment.start == segment.stop == name.number:
            raise segment_file.corrupt(part.name, f"says that it is {segment.described}")
        return segment, self._stored([(part.path, part.size), *parts])


def _with_ends(fresh: Iterable[tuple[Segment, StoredObjects]], before: Lsn) -> Iterator[tuple[Segment, StoredObjects]]:
    """An unreadable segment, which counts as empty, ends where the one before it does."""
    for segment, stored in fresh:
        before = max(before, segment.end)
        yield segment if segment.end else replace(segment, first=before, last=before, end=before), stored
