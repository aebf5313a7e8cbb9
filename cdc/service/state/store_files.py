"""What the state folder knows of a sink's store: the last fingerprint of each table, and its lost tables. JSON files.

Promise: the losses file exists before anything is done about a loss, and until nothing is missing any more.
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
    """A point in the log. How far a sink is, table by table, is `sink_positions.SinkPosition`."""

    reached: Lsn = ZERO_LSN
    offset: Offset | None = None


@dataclass(frozen=True, slots=True)
class StoredMark:
    """The last good fingerprint of a table, and the sink's position then."""

    mark: Mark
    position: LogPosition


@dataclass(frozen=True, slots=True)
class Loss:
    """A table whose content in the store is no longer what was written. Its changes are due from `position` on."""

    message: str
    remedy: str
    position: LogPosition
    state: State = "lost"
    refill: bool = True
    final: bool = False
    """Only a refill can repair it: an unchanged fingerprint from now on proves nothing."""
    backfill: str = ""
    until: LogPosition | None = None
    """The head of the log once everything missing was in it: the sink must pass it."""

    @property
    def blocks_writes(self) -> bool:
        """Whether nothing may be written into the table."""
        return self.state in ("lost", "renewing")

    def facts(self) -> dict[str, str]:
        """For the status."""
        return {"message": self.message, "remedy": self.remedy, "state": self.state}


class StoreFiles:
    """The files of one sink. Written by the apply process, except for refill requests; read by any process."""

    def __init__(self, state: Path, sink: str) -> None:
        self._folder = state / "stores"
        self._marks, self._losses, self._request = (
            self._folder / f"{sink}.{name}.json" for name in ("marks", "losses", "refill")
        )

    def losses(self) -> dict[TableId, Loss]:
        """The lost tables that are not repaired yet."""
        return {TableId.parse(name): _loss(facts) for name, facts in _read(self._losses).items()}

    def any_loss(self) -> bool:
        """Whether there are losses; cheaper than reading them."""
        return self._losses.exists()

    def write_losses(self, losses: Mapping[TableId, Loss]) -> None:
        """Durable on return; without losses the file is removed. Raises LogFull."""
        if losses:
            self._write(self._losses, {str(table): _facts(loss) for table, loss in losses.items()})
        else:
            durable_files.remove(self._losses)

    def marks(self) -> dict[TableId, StoredMark]:
        """The last good fingerprint of each table."""
        return {TableId.parse(name): _mark(facts) for name, facts in _read(self._marks).items()}

    def write_marks(self, marks: Mapping[TableId, StoredMark]) -> None:
        """Durable on return. Raises LogFull."""
        self._write(self._marks, {str(table): _facts(mark) for table, mark in marks.items()})

    def request_refill(self, tables: Collection[TableId]) -> None:
        """Ask the apply process to refill lost tables."""
        self._write(self._request, {"tables": sorted(map(str, tables))})

    def requested_refills(self) -> frozenset[TableId]:
        """The lost tables that a user wants refilled."""
        return frozenset(map(TableId.parse, _read(self._request).get("tables", ())))

    def remove_refill_request(self) -> None:
        """The apply process has taken the request over."""
        self._request.unlink(missing_ok=True)

    def _write(self, path: Path, facts: Mapping[str, object]) -> None:
        durable_files.make_folder(self._folder)
        with durable_files.write_errors(path):
            durable_files.replace(path, json.dumps(facts).encode())


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _facts(item: StoredMark | Loss) -> dict[str, Any]:
    """As the files have it, where `position` is called `place`."""
    facts = asdict(item)
    facts["place"] = facts.pop("position")
    return facts


def _mark(facts: Mapping[str, Any]) -> StoredMark:
    return StoredMark(facts["mark"], _position(facts["place"]) or LogPosition())


def _loss(facts: Mapping[str, Any]) -> Loss:
    position = _position(facts["place"]) or LogPosition()
    others = {name: value for name, value in facts.items() if name != "place"}
    return Loss(**{**others, "position": position, "until": _position(facts["until"])})


def _position(facts: Mapping[str, Any] | None) -> LogPosition | None:
    return LogPosition(Lsn(facts["reached"]), facts["offset"]) if facts else None
