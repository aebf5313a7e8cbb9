"""Registered consumers: one small file each, so that no two consumers ever write the same file."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from cdc.errors import ConfigError, LogCorrupt
from cdc.log.segments.storage import SmallFiles
from cdc.model import Lsn

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")


@dataclass(frozen=True, slots=True)
class ConsumerPosition:
    """How far one consumer has applied the log: it no longer needs anything up to `sequence`."""

    name: str
    sequence: int
    reached: Lsn
    at: datetime


class Consumers:
    """Consumer positions stored beside a log. One process commits for a consumer at a time."""

    def __init__(self, files: SmallFiles) -> None:
        self._files = files

    def all(self) -> Sequence[ConsumerPosition]:
        """Every registered consumer, ordered by name."""
        return [_decoded(name, content) for name, content in self._files.all().items()]

    def get(self, name: str) -> ConsumerPosition | None:
        """One consumer, if it is registered."""
        content = self._files.read(_file_name(name))
        return None if content is None else _decoded(_file_name(name), content)

    def commit(self, name: str, sequence: int, reached: Lsn) -> None:
        """Move a consumer forward; never back."""
        known = self.get(name)
        if known is not None and (known.sequence >= sequence and known.reached >= reached):
            return
        if known is not None:
            sequence, reached = max(sequence, known.sequence), max(reached, known.reached)
        data = {"name": name, "sequence": sequence, "reached": reached, "at": datetime.now(UTC).isoformat()}
        self._files.replace(_file_name(name), json.dumps(data).encode())

    def forget(self, name: str) -> None:
        """Unregister a consumer: retention no longer keeps changes for it."""
        self._files.remove(_file_name(name))


def _file_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a valid consumer name.", "Use letters, digits, _, . and -.")
    return f"{name}.json"


def _decoded(file_name: str, content: bytes) -> ConsumerPosition:
    try:
        data = json.loads(content)
        return ConsumerPosition(
            str(data["name"]), int(data["sequence"]), Lsn(int(data["reached"])), datetime.fromisoformat(data["at"])
        )
    except (ValueError, KeyError, TypeError):
        raise LogCorrupt(
            f"Consumer file {file_name} is not readable.", "Remove it: the consumer registers again by itself."
        ) from None
