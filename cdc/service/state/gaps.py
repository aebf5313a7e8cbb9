"""Rows that a new sink lacks because retention removed log entries before the sink existed.

Retention removes what every registered sink has read. A sink that is added later starts at the oldest entry left, and
never sees a row that has not changed since. Its status and health name these tables until a backfill or a resync has
read each of them whole. Views are asked to hand over all their rows again.
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
from views.output_files import OutputFolder

_log = logging.getLogger(__name__)
_HEX = re.compile("[0-9A-F]+")


@dataclass(frozen=True, slots=True)
class Gap:
    """Rows of these tables that did not change since LSN `removed` are missing. `noted` is the log's head back then."""

    removed: Lsn
    noted: Lsn
    tables: tuple[str, ...]

    def facts(self) -> dict[str, object]:
        """For the status."""
        lsns = {"removed": format_lsn(self.removed), "noted": format_lsn(self.noted)}
        message, remedy = self.explain()
        return {**lsns, "tables": list(self.tables), "message": message, "remedy": remedy}

    def remaining(self, capture: Mapping[str, object]) -> "Gap":
        """Without the tables that, by capture's status, were read whole again."""
        exact = capture.get("history_exact_from")
        if isinstance(exact, str) and exact and parse_lsn(exact) > self.noted:
            return replace(self, tables=())
        jobs = capture.get("backfills")
        filled = set(self._backfilled(jobs if isinstance(jobs, list) else ()))
        return replace(self, tables=tuple(table for table in self.tables if table not in filled))

    def _backfilled(self, jobs: Iterable[object]) -> Iterator[str]:
        for job in jobs:
            if isinstance(job, Mapping) and job.get("state") == "done" and job.get("whole"):
                identity = str(job.get("id"))  # the LSN of its request; `table:…` in place of a first snapshot
                if _HEX.fullmatch(identity) and int(identity, 16) > self.noted:
                    yield str(job.get("table"))

    def explain(self) -> tuple[str, str]:
        """Message and remedy."""
        since = f" up to {format_lsn(self.removed)}" if self.removed > 1 else ""
        return (
            f"lacks the rows of {', '.join(self.tables)} that have not changed since retention removed the log{since}",
            f"Read them again with: {'; '.join(f'millrace backfill {table}' for table in self.tables)}",
        )


class GapFile:
    """One sink's gap, beside its checkpoint."""

    def __init__(self, settings: Settings, sink: SinkSettings, log: LogReader) -> None:
        self._state = settings.state
        folder = settings.state / "checkpoints"
        self._path = folder / f"{sink.name}.gap"
        self._views = {view.table for view in settings.views}
        started = any((folder / name).exists() for name in (sink.name, f"{sink.name}.shared"))
        known = self._path.exists() or any(consumer.name == sink.name for consumer in log.consumers())
        if not started and not known and (removed := log.removed()):
            for view in self._views & set(settings.tables_of(sink)):
                OutputFolder(settings.state, view.name).ask_to_emit_again()
            gap = Gap(removed, log.head()[1], tuple(map(str, settings.tables_of(sink))))
            self._write(gap)
            _log.warning("sink %s is new and %s. %s", sink.name, *gap.explain())

    def gap(self) -> Gap | None:
        """What is missing now; None if nothing is."""
        try:
            facts = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        recorded = Gap(parse_lsn(facts["removed"]), parse_lsn(facts["noted"]), tuple(facts["tables"]))
        left = self._without_views(recorded.remaining(status.read(self._state, "capture")))
        if not left.tables:
            self._path.unlink()
            return None
        if left != recorded:
            self._write(left)
        return left

    def _without_views(self, gap: Gap) -> Gap:
        """Without the views that have handed over their rows."""
        views = {str(view): OutputFolder(self._state, view.name).asked_to_emit_again() for view in self._views}
        return replace(gap, tables=tuple(table for table in gap.tables if views.get(table, "asked")))

    def _write(self, gap: Gap) -> None:
        durable_files.make_folder(self._path.parent)
        durable_files.replace(self._path, json.dumps(gap.facts()).encode())
