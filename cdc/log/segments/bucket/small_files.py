"""Small objects that are replaced as a whole."""

import threading
from collections.abc import Mapping

from cdc.log.segments.bucket.access import LogBucket


class BucketSmallFiles:
    """The objects under a folder of the bucket. A listing is one request; only what has changed is read again."""

    def __init__(self, bucket: LogBucket, folder: str) -> None:
        self._bucket = bucket
        self._folder = folder
        self._lock = threading.Lock()
        self._known: dict[str, tuple[str, bytes]] = {}

    def all(self) -> Mapping[str, bytes]:
        """See SmallFiles."""
        with self._lock:
            found: dict[str, tuple[str, bytes]] = {}
            for item in self._bucket.listed(self._folder):
                name = item.path.removeprefix(f"{self._folder}/")
                known = self._known.get(name)
                content = known[1] if known is not None and known[0] == item.tag else self.read(name)
                if content is not None:
                    found[name] = (item.tag, content)
            self._known = found
            return {name: content for name, (_, content) in found.items()}

    def read(self, name: str) -> bytes | None:
        """See SmallFiles."""
        try:
            return self._bucket.get(f"{self._folder}/{name}")
        except FileNotFoundError:
            return None

    def replace(self, name: str, content: bytes) -> None:
        """See SmallFiles."""
        self._bucket.put(f"{self._folder}/{name}", content)

    def remove(self, name: str) -> None:
        """See SmallFiles."""
        self._bucket.delete([f"{self._folder}/{name}"])
