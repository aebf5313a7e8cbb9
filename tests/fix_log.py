"""A log with rows in it, as capture would have written them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import cdc.log
from cdc.config.settings import Settings
from cdc.model import Entry, Lsn, TableSchema
from cdc.ports import LogReader, LogWriter
from tests.scenes.histories import Row, log_table


@dataclass
class FilledLog:
    """The test's log: `append` writes one entry, `reader` reads it."""

    settings: Settings
    writer: LogWriter

    @property
    def reader(self) -> LogReader:
        return cdc.log.open_reader(self.settings)

    def record(self, schema: TableSchema) -> TableSchema:
        """Note a table's schema."""
        return self.writer.schemas.record(schema)

    def append(self, rows: Sequence[Row]) -> Lsn:
        """One entry; returns the LSN that it brings a reader to."""
        end = Lsn(max(self.writer.progress().end + 1, *(row["commit_lsn"] + 1 for row in rows)))
        self.writer.append(Entry(log_table(rows), end))
        return end


@pytest.fixture
def filled_log(settings_of: Callable[..., Settings], state_dir: Path) -> Iterator[FilledLog]:
    """An empty segment log under this test's state folder."""
    settings = settings_of()
    writer = cdc.log.open_writer(settings)
    yield FilledLog(settings, writer)
    writer.close()
