"""Registered consumers: one small file each, so that no two consumers ever write the same file."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cdc.durable_files import make_folder, replace, write_errors
from cdc.errors import ConfigError, LogCorrupt
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

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def all(self) -> Sequence[ConsumerPosition]:
        """Every registered consumer, ordered by name."""
        paths = self._folder.glob("*.json") if self._folder.is_dir() else ()
        found = (self._read(path) for path in sorted(paths))
        return [item for item in found if item is not None]

    def get(self, name: str) -> ConsumerPosition | None:
        """One consumer, if it is registered."""
        return self._read(self._path(name))

    def commit(self, name: str, sequence: int, reached: Lsn) -> None:
        """Move a consumer forward; never back."""
        path = self._path(name)
        known = self._read(path)
        if known is not None and (known.sequence >= sequence and known.reached >= reached):
            return
        if known is not None:
            sequence, reached = max(sequence, known.sequence), max(reached, known.reached)
        data = {"name": name, "sequence": sequence, "reached": reached, "at": datetime.now(UTC).isoformat()}
        make_folder(self._folder)
        with write_errors(self._folder):
            replace(path, json.dumps(data).encode())

    def forget(self, name: str) -> None:
        """Unregister a consumer: retention no longer keeps changes for it."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is not a valid consumer name.", "Use letters, digits, _, . and -.")
        return self._folder / f"{name}.json"

    @staticmethod
    def _read(path: Path) -> ConsumerPosition | None:
        try:
            data = json.loads(os.fsdecode(path.read_bytes()))
            return ConsumerPosition(
                str(data["name"]), int(data["sequence"]), Lsn(int(data["reached"])), datetime.fromisoformat(data["at"])
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise LogCorrupt(
                f"Consumer file {path.name} is not readable.", "Remove it: the consumer registers again by itself."
            ) from None
