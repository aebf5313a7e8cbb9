"""Numbered objects that exactly one writer may create: the commits of a log in a bucket, and its fence.

An object is called `<number>-<epoch>`, and is created by one PUT with `If-None-Match: *`. A writer has an epoch of its
own and writes one number after the other. A new writer first *seals* the sequence: it creates the very name that the
writer before it would use next, as a small object that names the new epoch, and goes on with that number in its own
epoch. So the earlier writer, whenever it wakes up, finds its next name taken. Two writers never both create a number.

The trap: a seal is never removed, or the name would be free again.
"""

import json
import re
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass

from cdc.errors import LogCorrupt, LogFenced, LogLost
from cdc.log.segments.bucket.access import LogBucket

MOST_SEAL_BYTES = 64
"""A seal is shorter, a Parquet file or a manifest longer."""
_PATIENCE_SECONDS = 30.0
_RETRY_SECONDS = 0.5
_NAME = re.compile(r"(\d{15})-(\d{10})")
_LAST = "~"  # after every epoch of a number


@dataclass(frozen=True, slots=True, order=True)
class Name:
    """A name in a sequence."""

    number: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.number:015d}-{self.epoch:010d}"


@dataclass(frozen=True, slots=True)
class Seal:
    """What ends an epoch."""

    epoch: int
    """The epoch that goes on with this number."""
    token: str
    """Tells the seals of different writers apart."""

    def encoded(self) -> bytes:
        """The object's content."""
        return json.dumps({"sealed": self.token, "next": self.epoch}).encode()

    @classmethod
    def decoded(cls, content: bytes, name: str) -> "Seal":
        """Raises LogCorrupt."""
        try:
            data = json.loads(content)
            return cls(int(data["next"]), str(data["sealed"]))
        except (ValueError, KeyError, TypeError):
            raise LogCorrupt(f"Log object {name} is not readable.", "Another program wrote it: move it away.") from None


def fenced(bucket: str, epoch: int) -> LogFenced:
    """The error for a writer whose epoch is over."""
    return LogFenced(
        f"Epoch {epoch} of the log in the bucket {bucket} is over: another writer took over.", "Stop this process."
    )


class SealedSequence:
    """The objects of one folder of the bucket."""

    def __init__(self, bucket: LogBucket, folder: str) -> None:
        self._bucket = bucket
        self._folder = folder

    def key(self, name: Name) -> str:
        """The object's path."""
        return f"{self._folder}/{name}"

    def name_of(self, path: str) -> Name | None:
        """The name of an object; None: another program's."""
        match = _NAME.fullmatch(path.removeprefix(f"{self._folder}/"))
        return None if match is None else Name(int(match[1]), int(match[2]))

    def listed(self, after: int = 0) -> Iterator[tuple[Name | None, str, int]]:
        """Name, path and size of the objects after a number, in order; no name: another program's object."""
        for item in self._bucket.listed(self._folder, self._folder + f"/{after:015d}{_LAST}"):
            yield self.name_of(item.path), item.path, item.size

    def following(self, name: Name, size: int) -> Name:
        """The name that is contested after this one, which is the newest."""
        if size > MOST_SEAL_BYTES:
            return Name(name.number + 1, name.epoch)
        return Name(name.number, Seal.decoded(self._bucket.get(self.key(name)), self.key(name)).epoch)

    def take_over(self, at: Name, epoch: int | None = None) -> Name:
        """Seal the sequence for this process; `at` is the next name as far as known. Returns the name to go on with.

        `epoch` is the epoch to take (None: the next one). Raises LogFenced if a newer writer was faster.
        """
        token = secrets.token_hex(8)
        while True:
            seal = Seal(at.epoch + 1 if epoch is None else epoch, token)
            if seal.epoch <= at.epoch:
                raise LogFenced("Another process just became the writer of this log.", "Stop it first.")
            try:
                self._bucket.create(self.key(at), seal.encoded())
            except FileExistsError:
                content = self._bucket.get(self.key(at))
                if len(content) > MOST_SEAL_BYTES:
                    at = Name(at.number + 1, at.epoch)  # the earlier writer still appends
                    continue
                found = Seal.decoded(content, self.key(at))
                if found.token != token:
                    at = Name(at.number, found.epoch)
                    continue
            return Name(at.number, seal.epoch)

    def create(self, name: Name, content: bytes) -> None:
        """Commit an object of this process's epoch. Raises LogFenced once another writer has taken over.

        After LogLost nobody knows whether it was committed: only a new writer may go on.
        """
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            try:
                return self._bucket.create(self.key(name), content)
            except FileExistsError:
                if self._bucket.get(self.key(name)) == content:
                    return None  # an earlier attempt, whose answer was lost
                raise fenced(self._bucket.name, name.epoch) from None
            except LogLost:
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)
