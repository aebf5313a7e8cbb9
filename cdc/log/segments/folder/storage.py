"""A segment log in a folder: a local disk, or a file system that several machines mount.

`hot/` holds fresh segments, `history/` merged ones, `consumers/` and `schemas/` small JSON files.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from cdc.durable_files import make_folder, replace, write_errors
from cdc.log.segments.folder.files import LocalSegment
from cdc.log.segments.folder.listing import LogFolder
from cdc.log.segments.schemas import FolderSchemas
from cdc.log.segments.storage import LogLocation, StoredSegment, View


class FolderSmallFiles:
    """Small files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> Mapping[str, bytes]:
        """See SmallFiles."""
        paths = sorted(self._folder.glob("*.json")) if self._folder.is_dir() else ()
        found = {path.name: self.read(path.name) for path in paths}
        return {name: content for name, content in found.items() if content is not None}

    def read(self, name: str) -> bytes | None:
        """See SmallFiles."""
        try:
            return (self._folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        """See SmallFiles."""
        make_folder(self._folder)
        with write_errors(self._folder):
            replace(self._folder / name, content)

    def remove(self, name: str) -> None:
        """See SmallFiles."""
        (self._folder / name).unlink(missing_ok=True)


class FolderStorage:
    """The folder as readers see it. Cheap to create; the listing is cached while the folder does not change."""

    poll_seconds = 0.01
    """Looking costs two `stat`: 2.4 % of a core, when Spark is answered five times a second."""

    def __init__(self, root: Path) -> None:
        self.folder = LogFolder(root)
        self.schemas = FolderSchemas(root / "schemas")
        self.consumers = FolderSmallFiles(root / "consumers")

    @property
    def location(self) -> LogLocation:
        """Its absolute path."""
        return LogLocation(os.fspath(self.folder.root.absolute()))

    def view(self) -> View:
        """The segments now."""
        return self.folder.view()

    def located(self, place: str) -> StoredSegment:
        """See LogStorage."""
        return LocalSegment(Path(place))
