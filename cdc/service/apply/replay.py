"""Applies a range of the log again to chosen sinks, while the live pipeline runs.

Promise: no key gets an older value, since every store refuses an older version. The positions of the live queries do
not change, since a replay commits none. It runs in its own process, with the same fold and the same applier.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.settings import Settings, SinkSettings
from cdc.model import ZERO_LSN, Lsn, TableId
from cdc.ports import LogReader
from cdc.service.apply.driver import applier_of
from cdc.service.observe.positions import open_log
from sinks.apply.applier import Applier
from sinks.context import SinkContext
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather

_BATCH_ROWS = 50_000


@dataclass(frozen=True, slots=True)
class ReplayRange:
    """What to apply again: after one point (None: from the oldest entry) until another (None: the head of the log)."""

    after: Lsn | datetime | None = None
    until: Lsn | datetime | None = None
    tables: tuple[TableId, ...] = ()
    keys: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Replayed:
    """Progress of a replay: log `entries` read, matching `changes` among them."""

    entries: int = 0
    changes: int = 0
    at: Lsn = ZERO_LSN


Report = Callable[[Replayed], None]


def replay(
    settings: Settings, sinks: Sequence[SinkSettings], asked: ReplayRange, report: Report, dry_run: bool
) -> Replayed:
    """Apply every change of the range to the sinks; a dry run only counts them."""
    reader = open_log(settings)
    context, stop = SinkContext(settings.state), threading.Event()
    appliers = [] if dry_run else [applier_of(settings, sink, reader, context, stop) for sink in sinks]
    done = Replayed()
    try:
        for rows, reached in _batches(reader, asked):
            if appliers and rows.num_rows:
                _apply(appliers, reader, rows)
            done = replace(reached, changes=done.changes + rows.num_rows)
            report(done)
    finally:
        for applier in appliers:
            applier.finish(30.0)
    return done


def _apply(appliers: Sequence[Applier], reader: LogReader, rows: pa.Table) -> None:
    batch = gather(ranked(rows), reader.schemas)
    for applier in appliers:
        applier.apply(replace(batch, reached=ZERO_LSN))


def _batches(reader: LogReader, asked: ReplayRange) -> Iterator[tuple[pa.Table, Replayed]]:
    """The chosen rows, about `_BATCH_ROWS` at a time, each with the progress so far."""
    pending: list[pa.Table] = []
    reached = Replayed()
    after = reader.start() if asked.after is None else reader.seek(asked.after)
    until = None if asked.until is None else reader.seek(asked.until)
    for piece in reader.read(after, until):
        pending.append(_chosen(piece.rows, asked))
        reached = replace(reached, entries=reached.entries + 1, at=piece.end)
        if sum(rows.num_rows for rows in pending) >= _BATCH_ROWS:
            yield pa.concat_tables(pending), reached
            pending = []
    if pending:
        yield pa.concat_tables(pending), reached


def _chosen(rows: pa.Table, asked: ReplayRange) -> pa.Table:
    """Rows of the chosen tables and keys. Truncates and removed key ranges concern every key."""
    if asked.tables:
        rows = rows.filter(pc.field("table").isin([str(table) for table in asked.tables]))
    if asked.keys:
        rows = rows.filter(pc.field("key").isin(list(asked.keys)) | pc.field("op").isin(["t", "p"]))
    return rows
