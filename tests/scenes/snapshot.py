"""What tests of snapshots share: settings for a test's own database, and the log read back."""

import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa

import cdc.log
from cdc.capture.source import slot as slots
from cdc.config.settings import Settings
from cdc.model import LOG_SCHEMA, Lsn
from sinks.context import SinkContext
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from sinks.memory import MemorySettings, open_sink
from snapshots.initial.snapshot import SnapshotProgress, run_initial
from tests.fix_servers import Database

MakeSettings = Callable[..., Settings]


def pipeline(make: MakeSettings, database: Database, *tables: Any, **source: Any) -> Settings:
    """Settings that read this database as its owner."""
    server = database.server
    section = {
        "host": server.host,
        "port": server.port,
        "database": database.name,
        "user": "postgres",
        "password": server.password,
        "slot": database.name,
        "tables": list(tables),
        **source,
    }
    return make(source=section)


def take_snapshot(settings: Settings, report: Callable[[SnapshotProgress], None] = lambda progress: None) -> pa.Table:
    """Make the slot, read everything, and give back what the log then holds."""
    writer = cdc.log.open_writer(settings)
    try:
        with slots.create(settings.source, 30, lambda text: None) as made:
            run_initial(settings, made, writer, report)
    finally:
        writer.close()
    return logged(settings)


def logged(settings: Settings) -> pa.Table:
    """Every row of the log, in log order."""
    reader = cdc.log.open_reader(settings)
    slices = [part.rows for part in reader.read(reader.start())]
    return pa.concat_tables(slices)


def images(rows: pa.Table) -> dict[str, dict[str, Any]]:
    """The newest image of every key."""
    pairs = zip(rows["key"].to_pylist(), rows["after"].to_pylist(), strict=True)
    return {str(key): json.loads(str(after)) for key, after in pairs}


class Applied:
    """A store in this process, filled from the log as far as somebody asks."""

    def __init__(self, settings: Settings, name: str) -> None:
        self._reader = cdc.log.open_reader(settings)
        self._offset = self._reader.start()
        self.sink = open_sink(MemorySettings(name=name), SinkContext(settings.state))

    def catch_up(self, lsn: Lsn | None = None) -> None:
        """Apply what the log holds as one batch, up to an LSN: writers would be ahead of it for ever."""
        rows = [LOG_SCHEMA.empty_table()]
        for part in self._reader.read(self._offset):
            rows.append(part.rows)
            self._offset = part.offset
            if lsn is not None and part.end >= lsn:
                break
        for batch in gather(ranked(pa.concat_tables(rows)), self._reader.schemas).batches:
            self.sink.apply(batch)
