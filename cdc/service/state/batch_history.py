"""Which batch of a sink applied what: a short line a batch, for `why`. The last tens of thousands are kept.

Promise: a line is written only when every row of its batch is in the store, and before the position moves; so what lies
between its two positions was applied by that batch, and perhaps by the next one too, after a crash. What no line covers
is not recorded, and nothing is said of it.
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
_LARGEST = 2 << 20  # some 20,000 lines; twice that is kept


@dataclass(frozen=True, slots=True)
class AppliedBatch:
    """The batch that applied an entry, and when. A range where chunks share an LSN, or a crash had it done twice."""

    first: int
    last: int
    at: str


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch: it brought the sink from `after` to `reached`, but for the tables that were held back."""

    batch: int
    after: Lsn
    reached: Lsn
    at: str
    held: Sequence[str]

    def covers(self, end: Lsn) -> bool:
        """Whether it may have applied an entry that ends there: chunks of a snapshot do not move the position."""
        return self.after < end <= self.reached or self.after == self.reached == end


class BatchHistory:
    """The book of one sink, written by the process that applies."""

    def __init__(self, state: Path, sink: str, position: Callable[[], Lsn]) -> None:
        self._paths = _paths(state, sink)
        self._position = position
        self._number = 0
        self._reached: Lsn | None = None
        self._lock = threading.Lock()

    def note(self, reached: Lsn, held: Collection[TableId]) -> None:
        """A batch up to there is in the store, but for the tables that are held back. A full disk costs the line."""
        with self._lock:
            if self._reached is None:
                self._reached = self._position()
                self._number = _newest(self._paths)
            self._number += 1
            line = {"batch": self._number, "after": format_lsn(self._reached), "reached": format_lsn(reached)}
            more = {"at": datetime.now(UTC).isoformat(), "held": sorted(map(str, held))}
            self._reached = max(reached, self._reached)
            try:
                _append(self._paths, json.dumps({**line, **more}) + "\n")
            except OSError as error:
                _log.debug("a batch is not noted: %s", type(error).__name__)


class BatchHistoryReader:
    """What is recorded of one sink."""

    def __init__(self, state: Path, sink: str) -> None:
        self._found = sorted(_lines(_paths(state, sink)), key=lambda line: (line.reached, line.batch))
        self._reached = [line.reached for line in self._found]

    def of(self, end: Lsn, table: str) -> AppliedBatch | None:
        """The batch that applied an entry of a table; None if that is not recorded."""
        covering: list[BatchRecord] = []
        for line in self._found[bisect_left(self._reached, end) :]:
            if not line.covers(end):
                break
            covering.append(line)
        covering = [line for line in covering if table not in line.held]
        if not covering:
            return None
        first = min(covering, key=lambda line: line.batch)
        return AppliedBatch(first.batch, max(line.batch for line in covering), first.at)


def _paths(state: Path, sink: str) -> tuple[Path, Path]:
    """Older lines, newer lines."""
    folder = state / "batches"
    return folder / f"{sink}.older.jsonl", folder / f"{sink}.jsonl"


def _append(paths: tuple[Path, Path], line: str) -> None:
    older, newer = paths
    newer.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if newer.exists() and newer.stat().st_size > _LARGEST:
        newer.replace(older)
    with newer.open("a", encoding="utf-8") as file:
        file.write(line)


def _newest(paths: tuple[Path, Path]) -> int:
    """The last batch's number: of forty thousand lines one is parsed, before the first row of a start is there."""
    lines = filter(None, (_parsed(text) for path in reversed(paths) for text in reversed(_texts(path))))
    return next((line.batch for line in lines), 0)


def _lines(paths: tuple[Path, Path]) -> Iterator[BatchRecord]:
    for path in paths:
        yield from filter(None, map(_parsed, _texts(path)))


def _texts(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def _parsed(text: str) -> BatchRecord | None:
    """A line that a crash cut short is passed over."""
    try:
        facts = json.loads(text)
        after, reached = parse_lsn(facts["after"]), parse_lsn(facts["reached"])
        return BatchRecord(int(facts["batch"]), after, reached, facts["at"], facts["held"])
    except (ValueError, KeyError, TypeError):
        return None
