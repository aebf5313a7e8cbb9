"""The segment log's writer in a bucket: an entry is one conditional PUT, and so is the manifest of a merge.

See `sequence` for the fence, docs/adr/0027-segments-in-a-bucket.md for the reasons.
"""

import os
import secrets
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from cdc import failpoint
from cdc.durable_files import make_folder, open_new, open_or_make, remove, write_errors
from cdc.errors import LogError, LogFenced, LogLost
from cdc.log.segments.bucket.access import LogBucket
from cdc.log.segments.bucket.content import StoredObjects
from cdc.log.segments.bucket.manifest import Manifest, StoredObject
from cdc.log.segments.bucket.sequence import MOST_SEAL_BYTES, Name, fenced
from cdc.log.segments.bucket.storage import BucketStorage
from cdc.log.segments.folder.writer_lock import lock_file
from cdc.log.segments.segment_file import Encoding, Metadata
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.storage import LogLocation, Parts, StagedFile, StoredSegment, View
from cdc.model import LOG_SCHEMA

_NO_FACTS = Metadata({})


class BucketParts:
    """The parts of one large transaction, in a folder of their own."""

    def __init__(self, bucket: LogBucket, folder: str, encoding: Encoding) -> None:
        self.objects: list[StoredObject] = []
        self._bucket = bucket
        self._folder = folder
        self._encoding = encoding

    def add(self, rows: pa.Table) -> None:
        """See Parts."""
        content = self._encoding.encode(rows, _NO_FACTS).to_pybytes()
        path = f"{self._folder}/part-{len(self.objects):06d}.parquet"
        self._bucket.put(path, content)
        self.objects.append((path, len(content)))

    def sync(self) -> None:
        """See Parts. A PUT that has returned is durable."""

    def discard(self) -> None:
        """See Parts."""
        self._bucket.delete([path for path, _ in self.objects])


class BucketWriter(BucketStorage):
    """The bucket as its only writer sees it."""

    append_interval = 0.2
    """A PUT takes 10 to 50 ms and costs as much as twelve GETs. Five a second are 65 dollars a month at Amazon's prices
    while changes arrive all the time; a reader sees a change 0.1 s later on average."""

    def __init__(self, location: LogLocation, folder: Path, encoding: Encoding, unreadable: int = 0) -> None:
        """Take over from any earlier writer. `folder`, on this machine, has the file lock and merges while they are
        written. `unreadable` is the number of a segment that counts as empty, if its object is unreadable.

        Raises LogFenced while a process with the same folder writes.
        """
        super().__init__(location, unreadable)
        self._folder = folder
        self._encoding = encoding
        self._appended: deque[tuple[Segment, StoredObjects]] = deque()
        """Segments of this writer that its view does not have yet. An append must not wait for a view."""
        self._outcome_unknown = False
        self._cleaned = False
        make_folder(folder)
        with write_errors(folder / "lock"):
            self._file_lock = open_or_make(folder / "lock")
        try:
            with write_errors(folder / "lock"):
                lock_file(self._file_lock, folder, takeover=False)
            self._epoch = self._take_over()
        except BaseException:
            self.close()
            raise

    def _take_over(self) -> int:
        if not self.bucket.has_conditional_puts("probes"):
            raise LogError(
                f"The bucket {self.bucket.name} ignores `If-None-Match: *`: two writers could write the same segment.",
                "Use a store that honours conditional PUTs, and do not switch them off in log.storage_options.",
            )
        self.view()
        epoch = self._manifests.take_over(self._state.manifest_name).epoch
        self._hot.take_over(self._state.next, epoch)
        self._missed()  # the earlier writer may have appended or merged until now
        self.view()
        return epoch

    def view(self) -> View:
        """See LogStorage. What this process has appended is not read again."""
        with self._lock:
            following, own = self._state.next, list[tuple[Segment, StoredObjects]]()
            while self._appended:
                own.append(self._appended.popleft())
            own = [found for found in own if found[0].start >= following.number]
            if own and own[0][0].start == following.number:
                after = replace(following, number=own[-1][0].stop + 1)
                self._set(replace(self._state, fresh=(*self._state.fresh, *own), next=after))
            return super().view()

    def append(self, segment: Segment, rows: pa.Table, marks: Mapping[str, str]) -> None:
        """See WriterStorage. The PUT is the commit."""
        self._append(segment, self._encoding.encode(rows, Metadata(marks, (), segment)).to_pybytes(), ())

    def new_parts(self) -> BucketParts:
        """See WriterStorage."""
        return BucketParts(self.bucket, f"parts/{self._epoch:010d}-{secrets.token_hex(8)}", self._encoding)

    def append_parts(self, segment: Segment, parts: Parts) -> None:
        """See WriterStorage. The object of the segment has no rows, and names the parts."""
        assert isinstance(parts, BucketParts)
        metadata = Metadata({}, (), segment, parts.objects)
        self._append(segment, self._encoding.encode(LOG_SCHEMA.empty_table(), metadata).to_pybytes(), parts.objects)

    def _append(self, segment: Segment, content: bytes, parts: Sequence[StoredObject]) -> None:
        if self._outcome_unknown:
            raise LogLost(
                f"The bucket {self.bucket.name} did not say whether it has the last entry of the log.",
                "Restart the process: it reads the durable position again.",
            )
        name = Name(segment.start, self._epoch)
        failpoint.reached("log.before_put")
        try:
            self._hot.create(name, content)
        except LogFenced:
            raise
        except BaseException:
            self._outcome_unknown = True
            raise
        failpoint.reached("log.after_put")
        self._appended.append((segment, self._stored([(self._hot.key(name), len(content)), *parts])))

    def sync(self) -> None:
        """See WriterStorage. A PUT that has returned is durable."""

    @contextmanager
    def staged(self, name: str) -> Iterator[StagedFile]:
        """See WriterStorage."""
        path = self._folder / name
        remove(path)  # of a process that was killed
        try:
            with write_errors(self._folder), os.fdopen(open_new(path), "wb") as file:
                yield StagedFile(file, path)
        finally:
            remove(path)

    def publish(self, run: Sequence[Segment], segment: Segment, staged: StagedFile) -> None:
        """See WriterStorage. The manifest is the commit."""
        path = f"history/{self._epoch:010d}-{secrets.token_hex(4)}-{segment}"
        size = staged.path.stat().st_size
        self.bucket.put(path, staged.path)
        self._commit(run[-1].stop, frozenset(run), [(segment, [(path, size)])])

    def archive(self, segments: Sequence[Segment]) -> None:
        """See WriterStorage. The objects stay where they are; the manifest names them."""
        if segments and segments[-1].stop > self._state.manifest.stop:
            self._commit(segments[-1].stop)

    def _commit(
        self,
        stop: int,
        replaced: frozenset[Segment] = frozenset(),
        added: Sequence[tuple[Segment, Sequence[StoredObject]]] = (),
    ) -> None:
        """Write the next manifest, with everything up to `stop`. Raises LogFenced."""
        with self._lock:
            self._missed()  # an earlier manifest whose answer was lost may be there all the same
            view, before = self.view(), self._state
            if before.manifest_name.epoch != self._epoch:
                raise fenced(self.bucket.name, self._epoch)
            ends = {segment.stop: (segment.stop, self._epoch_of(stored)) for segment, stored in before.fresh}
            stop, epoch = max((before.manifest.stop, before.manifest.epoch), ends.get(stop, (0, 0)))
            floor = () if view.chain.floor is None else (view.chain.floor,)
            kept = [
                (segment, _objects(view.stored[segment]))
                for segment in (*floor, *view.chain.kept)
                if segment.stop <= stop and segment not in replaced
            ]
            manifest = Manifest(stop, epoch, sorted([*kept, *added], key=lambda item: item[0].start))
            self._manifests.create(before.manifest_name, manifest.encoded())
            fresh = tuple(item for item in before.fresh if item[0].start > stop)
            number = before.manifest_name.number
            self._set(replace(before, manifest=manifest, manifest_name=Name(number + 1, self._epoch), fresh=fresh))
        self._remove_manifests(number)

    def _epoch_of(self, stored: StoredObjects) -> int:
        name = self._hot.name_of(stored.name)
        return 0 if name is None else name.epoch

    def _remove_manifests(self, before: int) -> None:
        with self._cleaned_again_after_an_error():
            written = [(name, path) for name, path, size in self._manifests.listed() if size > MOST_SEAL_BYTES]
            self.bucket.delete([path for name, path in written if name and name.number < before])

    def remove(self, stored: StoredSegment) -> None:
        """See WriterStorage."""
        with self._cleaned_again_after_an_error():
            self.bucket.delete([path for path, _ in _objects(stored)])

    @contextmanager
    def _cleaned_again_after_an_error(self) -> Iterator[None]:
        try:
            yield
        except LogError:
            self._cleaned = False
            raise

    def clean(self) -> None:
        """See WriterStorage. Done once, and after an error: otherwise this writer removes what it replaces itself."""
        view = self.view()
        if not self._state.next.epoch == self._state.manifest_name.epoch == self._epoch:
            raise fenced(self.bucket.name, self._epoch)
        if self._cleaned:
            return
        used = {path for stored in view.stored.values() for path, _ in _objects(stored)}
        written = [(name, path) for name, path, size in self._hot.listed() if size > MOST_SEAL_BYTES]
        merged = self._state.manifest.stop
        gone = [path for name, path in written if name and name.number <= merged and path not in used]
        for folder in ("history", "parts"):
            own = f"{folder}/{self._epoch:010d}"
            gone += [item.path for item in self.bucket.listed(folder) if item.path < own and item.path not in used]
        self.bucket.delete(gone)
        self._cleaned = True

    def quarantine(self, stored: StoredSegment) -> None:
        """See WriterStorage."""
        for path, _ in _objects(stored):
            self.bucket.copy(path, f"quarantine/{path.rpartition('/')[2]}")

    def close(self) -> None:
        """Release the lock of this machine."""
        if self._file_lock >= 0:
            os.close(self._file_lock)
            self._file_lock = -1


def _objects(stored: StoredSegment) -> Sequence[StoredObject]:
    assert isinstance(stored, StoredObjects)
    return [(part.path, part.size) for part in stored.objects]
