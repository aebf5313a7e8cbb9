"""What a sink lacks because it is younger than the log's oldest entry: noted when it begins, until it is made good.

Retention removes what every registered sink has read; a sink that is added later begins at what is left, and never sees
a row that has not changed since. So the tables are named in its status and its health until each was read again as a
whole, by a backfill or a resync, after the sink had begun.
"""

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from cdc import durable_files
from cdc.config.settings import Settings, SinkSettings
from cdc.model import Lsn, format_lsn, parse_lsn
from cdc.ports import LogReader
from cdc.service.state import status

_log = logging.getLogger(__name__)
_HEX = re.compile("[0-9A-F]+")


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows of these tables that did not change since the LSN `removed` are missing; `noted` is where the log was."""

    removed: Lsn
    noted: Lsn
    tables: tuple[str, ...]

    def facts(self) -> dict[str, object]:
        """For the status."""
        places = {"removed": format_lsn(self.removed), "noted": format_lsn(self.noted)}
        message, remedy = self.said()
        return {**places, "tables": list(self.tables), "message": message, "remedy": remedy}

    def without(self, capture: Mapping[str, object]) -> "Gap":
        """Less the tables that capture says were read again as a whole."""
        exact = capture.get("history_exact_from")
        if isinstance(exact, str) and exact and parse_lsn(exact) > self.noted:
            return replace(self, tables=())
        jobs = capture.get("backfills")
        healed = set(self._healed(jobs if isinstance(jobs, list) else ()))
        return replace(self, tables=tuple(table for table in self.tables if table not in healed))

    def _healed(self, jobs: Iterable[object]) -> Iterator[str]:
        for job in jobs:
            if isinstance(job, Mapping) and job.get("state") == "done" and job.get("whole"):
                asked = str(job.get("id"))  # where in the WAL it was asked for, or what it took the place of
                if _HEX.fullmatch(asked) and int(asked, 16) > self.noted:
                    yield str(job.get("table"))

    def said(self) -> tuple[str, str]:
        """A sentence and a remedy for people."""
        since = f" up to {format_lsn(self.removed)}" if self.removed > 1 else ""
        return (
            f"lacks the rows of {', '.join(self.tables)} that have not changed since retention removed the log{since}",
            f"Read them again: {'; '.join(f'millrace backfill {table}' for table in self.tables)}",
        )


class GapFile:
    """One sink's gap, beside its checkpoint."""

    def __init__(self, settings: Settings, sink: SinkSettings, log: LogReader) -> None:
        self._state = settings.state
        folder = settings.state / "checkpoints"
        self._path = folder / f"{sink.name}.gap"
        begun = any((folder / name).exists() for name in (sink.name, f"{sink.name}.shared"))
        known = self._path.exists() or any(consumer.name == sink.name for consumer in log.consumers())
        if not begun and not known and (removed := log.removed()):
            gap = Gap(removed, log.head()[1], tuple(map(str, settings.tables_of(sink))))
            self._write(gap)
            _log.warning("sink %s is new and %s. %s", sink.name, *gap.said())

    def gap(self) -> Gap | None:
        """What is missing now; None when all was made good."""
        try:
            said = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        held = Gap(parse_lsn(said["removed"]), parse_lsn(said["noted"]), tuple(said["tables"]))
        left = held.without(status.read(self._state, "capture"))
        if not left.tables:
            self._path.unlink()
            return None
        if left != held:
            self._write(left)
        return left

    def _write(self, gap: Gap) -> None:
        durable_files.make_folder(self._path.parent)
        durable_files.replace(self._path, json.dumps(gap.facts()).encode())
