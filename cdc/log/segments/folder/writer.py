"""The segment log's writer in a folder: everything is written aside, synced and renamed into place.

See docs/adr/0005-segment-log.md.
"""

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from cdc import failpoint
from cdc.durable_files import FOLDER_MODE, make_folder, open_new, remove, sync_folder, write_errors, write_new
from cdc.log.segments.folder.storage import FolderStorage
from cdc.log.segments.folder.writer_lock import WriterLock
from cdc.log.segments.segment_file import Encoding, Metadata
from cdc.log.segments.segment_names import Segment
from cdc.log.segments.storage import Parts, StagedFile, StoredSegment

_NO_FACTS = Metadata({})


class LocalParts:
    """Part files in a folder of their own under the writer's folder."""

    def __init__(self, staging: Path, encoding: Encoding) -> None:
        self.folder = staging / f"spool-{secrets.token_hex(8)}"
        self._staging = staging
        self._encoding = encoding
        self._count = 0
        self._synced = False

    def add(self, rows: pa.Table) -> None:
        """See Parts."""
        data = self._encoding.encode(rows, _NO_FACTS)
        with write_errors(self._staging):
            if not self._count:
                self.folder.mkdir(mode=FOLDER_MODE, exist_ok=True)
            write_new(self.folder / f"part-{self._count:06d}.parquet", memoryview(data))
        self._count += 1

    def sync(self) -> None:
        """See Parts. The files are synced already: this is for their names."""
        if not self._synced:
            with write_errors(self._staging):
                sync_folder(self.folder)
            self._synced = True  # a repeated call may find the folder already renamed

    def discard(self) -> None:
        """See Parts."""
        remove(self.folder)


class FolderWriter(FolderStorage):
    """The folder as its only writer sees it."""

    append_interval = 0.03
    """An append costs the writer a few syncs and every reader one more file to open."""

    def __init__(self, root: Path, encoding: Encoding, takeover: bool = False) -> None:
        """Raises LogFenced while another process has the lock, unless `takeover` is set."""
        super().__init__(root)
        self._encoding = encoding
        self._lock = WriterLock.take(root, takeover)
        try:
            make_folder(self.folder.hot)
            make_folder(self.folder.history)
        except BaseException:
            self._lock.release()
            raise

    def append(self, segment: Segment, rows: pa.Table, marks: Mapping[str, str]) -> None:
        """See WriterStorage. The rename is the commit."""
        data = self._encoding.encode(rows, Metadata(marks))
        staged = self._lock.staging / f"{segment.start}.parquet"
        try:
            with write_errors(self._lock.staging):
                write_new(staged, memoryview(data))
            self._place(staged, segment)
        except BaseException:
            remove(staged)  # the next attempt creates a file of the same name
            raise

    def new_parts(self) -> LocalParts:
        """See WriterStorage."""
        return LocalParts(self._lock.staging, self._encoding)

    def append_parts(self, segment: Segment, parts: Parts) -> None:
        """See WriterStorage."""
        assert isinstance(parts, LocalParts)
        self._place(parts.folder, segment)

    def _place(self, staged: Path, segment: Segment) -> None:
        failpoint.reached("log.before_rename")
        self._lock.rename(staged, self.folder.hot / str(segment))

    def sync(self) -> None:
        """See WriterStorage."""
        with write_errors(self.folder.hot):
            sync_folder(self.folder.hot)

    @contextmanager
    def staged(self, name: str) -> Iterator[StagedFile]:
        """See WriterStorage."""
        path = self._lock.staging / name
        try:
            with write_errors(self._lock.staging), os.fdopen(open_new(path), "wb") as file:
                yield StagedFile(file, path)
        except BaseException:
            remove(path)  # the next round creates a file of the same name
            raise

    def publish(self, run: Sequence[Segment], segment: Segment, staged: StagedFile) -> None:
        """See WriterStorage. Superseded segments must not be removed before the names in history are durable."""
        os.fsync(staged.file.fileno())
        self._lock.rename(staged.path, self.folder.history / str(segment))
        self._sync_history()

    def remove(self, stored: StoredSegment) -> None:
        """See WriterStorage."""
        self._lock.remove_published(Path(stored.place))

    def archive(self, segments: Sequence[Segment]) -> None:
        """See WriterStorage."""
        stored = self.view().stored
        for segment in segments:
            path = Path(stored[segment].place)
            if path.parent == self.folder.hot:
                self._lock.rename(path, self.folder.history / path.name)
                self._sync_history()

    def clean(self) -> None:
        """See WriterStorage. Staging folders of earlier writers are gone since the start."""
        self._lock.require()
        view = self.view()
        if view.chain.superseded:
            self._sync_history()  # the merged segment may be visible but not yet durable
        for segment in view.chain.superseded:
            self.remove(view.stored[segment])

    def quarantine(self, stored: StoredSegment) -> None:
        """See WriterStorage."""
        _copy(Path(stored.place), self.folder.root / "quarantine")

    def close(self) -> None:
        """Release the lock."""
        self._lock.release()

    def _sync_history(self) -> None:
        with write_errors(self.folder.history):
            sync_folder(self.folder.history)


def _copy(path: Path, folder: Path) -> None:
    make_folder(folder)
    copy = folder / path.name
    if path.is_dir() and not path.is_symlink():
        shutil.copytree(path, copy, symlinks=True, dirs_exist_ok=True)
    elif not copy.exists():
        os.link(path, copy, follow_symlinks=False)
    sync_folder(folder)
