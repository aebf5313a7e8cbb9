"""What is kept of a sink's store in the state folder: the marks that it last showed, and its losses. Small JSON files.

Promise: a losses file is there before anything is done about a loss, and gone only when nothing is missing.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cdc import durable_files
from cdc.model import ZERO_LSN, Lsn, TableId
from cdc.ports import Offset
from sinks.fingerprints import Mark

State = Literal["lost", "renewing", "asking", "refilling", "rewinding"]


@dataclass(frozen=True, slots=True)
class LogPosition:
    """Where a sink was in the log."""

    reached: Lsn = ZERO_LSN
    offset: Offset | None = None


@dataclass(frozen=True, slots=True)
class StoredMark:
    """What a table last showed when it was well, and where the sink was then."""

    mark: Mark
    place: LogPosition


@dataclass(frozen=True, slots=True)
class Loss:
    """A table that a store does not hold as it was written."""

    message: str
    remedy: str
    place: LogPosition
    state: State = "lost"
    refill: bool = True
    final: bool = False
    """What the store shows from now on proves nothing: only a refill makes it good."""
    backfill: str = ""
    until: LogPosition | None = None
    """The end of the log when everything that is missing was in it: the sink has to pass it."""

    @property
    def waits(self) -> bool:
        """Whether nothing may be written into the table."""
        return self.state in ("lost", "renewing")

    def facts(self) -> dict[str, str]:
        """For the status."""
        return {"message": self.message, "remedy": self.remedy, "state": self.state}


class StoreFiles:
    """The files of one sink. Written by the process that applies, read by anybody."""

    def __init__(self, state: Path, sink: str) -> None:
        self._folder = state / "stores"
        self._marks, self._losses, self._request = (
            self._folder / f"{sink}.{name}.json" for name in ("marks", "losses", "refill")
        )

    def losses(self) -> dict[TableId, Loss]:
        """What the store has lost and not got back yet."""
        return {TableId.parse(name): _loss(said) for name, said in _read(self._losses).items()}

    def any_loss(self) -> bool:
        """Whether there are losses; cheaper than to read them."""
        return self._losses.exists()

    def write_losses(self, losses: Mapping[TableId, Loss]) -> None:
        """Durable on return; there is no file where there is nothing lost. Raises LogFull."""
        if losses:
            self._write(self._losses, {str(table): asdict(loss) for table, loss in losses.items()})
        else:
            durable_files.remove(self._losses)

    def marks(self) -> dict[TableId, StoredMark]:
        """What each table last showed."""
        return {TableId.parse(name): _seen(said) for name, said in _read(self._marks).items()}

    def write_marks(self, marks: Mapping[TableId, StoredMark]) -> None:
        """Durable on return. Raises LogFull."""
        self._write(self._marks, {str(table): asdict(seen) for table, seen in marks.items()})

    def ask_refill(self, tables: Collection[TableId]) -> None:
        """Have lost tables filled again by the process that applies."""
        self._write(self._request, {"tables": sorted(map(str, tables))})

    def asked_refills(self) -> frozenset[TableId]:
        """The tables that somebody wants filled again."""
        return frozenset(map(TableId.parse, _read(self._request).get("tables", ())))

    def forget_request(self) -> None:
        """It was taken up."""
        self._request.unlink(missing_ok=True)

    def _write(self, path: Path, facts: Mapping[str, object]) -> None:
        durable_files.make_folder(self._folder)
        with durable_files.room(path):
            durable_files.replace(path, json.dumps(facts).encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _seen(said: Mapping[str, Any]) -> StoredMark:
    return StoredMark(said["mark"], _place(said["place"]) or LogPosition())


def _loss(said: Mapping[str, Any]) -> Loss:
    place = _place(said["place"]) or LogPosition()
    return Loss(**{**said, "place": place, "until": _place(said["until"])})


def _place(said: Mapping[str, Any] | None) -> LogPosition | None:
    return LogPosition(Lsn(said["reached"]), said["offset"]) if said else None
