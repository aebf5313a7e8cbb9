"""Which batch of a sink applied which log entries: one line per batch, for `why`. The last tens of thousands are kept.

Promise: a line is written when every row of its batch is in the store and before the position moves. So the entries
between its two positions were applied by that batch, and after a crash perhaps again by the next one.
"""

import json
import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cdc.model import Lsn, TableId, format_lsn, parse_lsn

_log = logging.getLogger(__name__)
_LARGEST = 2 << 20  # about 20,000 lines; the older file keeps as many again


@dataclass(frozen=True, slots=True)
class AppliedBatch:
    """The batch that applied an entry, and when. A range where chunks share an LSN, or a crash repeated the entry."""

    first: int
    last: int
    at: str


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch: it moved the sink from `after` to `reached`, except for its held-back tables."""

    batch: int
    after: Lsn
    reached: Lsn
    at: str
    held_back: Sequence[str]

    def covers(self, end: Lsn) -> bool:
        """Whether it may have applied an entry that ends at `end`. Chunks of a snapshot do not move the position."""
        return self.after < end <= self.reached or self.after == self.reached == end


class BatchHistory:
    """Writes the batches of one sink. For the apply process."""

    def __init__(self, state: Path, sink: str, position: Callable[[], Lsn]) -> None:
        self._paths = _paths(state, sink)
        self._position = position
        self._number = 0
        self._reached: Lsn | None = None
        self._lock = threading.Lock()

    def record(self, reached: Lsn, held_back: Collection[TableId]) -> None:
        """Record that a batch up to `reached` is in the store, but for held-back tables. Lost if the disk is full."""
        with self._lock:
            if self._reached is None:
                self._reached = self._position()
                self._number = _last_number(self._paths)
            self._number += 1
            line = {"batch": self._number, "after": format_lsn(self._reached), "reached": format_lsn(reached)}
            more = {"at": datetime.now(UTC).isoformat(), "held": sorted(map(str, held_back))}
            self._reached = max(reached, self._reached)
            try:
                _append(self._paths, json.dumps({**line, **more}) + "\n")
            except OSError as error:
                _log.debug("a batch was not recorded: %s", type(error).__name__)


class BatchHistoryReader:
    """Reads the batches of one sink."""

    def __init__(self, state: Path, sink: str) -> None:
        self._found = sorted(_lines(_paths(state, sink)), key=lambda line: (line.reached, line.batch))
        self._reached = [line.reached for line in self._found]

    def batch_of(self, end: Lsn, table: str) -> AppliedBatch | None:
        """The batch that applied the entry of a table that ends at `end`; None if it was not recorded."""
        covering: list[BatchRecord] = []
        for line in self._found[bisect_left(self._reached, end) :]:
            if not line.covers(end):
                break
            covering.append(line)
        covering = [line for line in covering if table not in line.held_back]
        if not covering:
            return None
        first = min(covering, key=lambda line: line.batch)
        return AppliedBatch(first.batch, max(line.batch for line in covering), first.at)


def _paths(state: Path, sink: str) -> tuple[Path, Path]:
    """The files of the older and of the newer lines."""
    folder = state / "batches"
    return folder / f"{sink}.older.jsonl", folder / f"{sink}.jsonl"


def _append(paths: tuple[Path, Path], line: str) -> None:
    older, newer = paths
    newer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if newer.exists() and newer.stat().st_size > _LARGEST:
        newer.replace(older)
    with newer.open("a", encoding="utf-8") as file:
        file.write(line)


def _last_number(paths: tuple[Path, Path]) -> int:
    """The last batch's number. Parses one line, not all forty thousand: the first batch waits for it."""
    lines = filter(None, (_parsed(text) for path in reversed(paths) for text in reversed(_texts(path))))
    return next((line.batch for line in lines), 0)


def _lines(paths: tuple[Path, Path]) -> Iterator[BatchRecord]:
    for path in paths:
        yield from filter(None, map(_parsed, _texts(path)))


def _texts(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _parsed(text: str) -> BatchRecord | None:
    """None for a line that a crash cut short."""
    try:
        facts = json.loads(text)
        after, reached = parse_lsn(facts["after"]), parse_lsn(facts["reached"])
        return BatchRecord(int(facts["batch"]), after, reached, facts["at"], facts["held"])
    except (ValueError, KeyError, TypeError):
        return None
