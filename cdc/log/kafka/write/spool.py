"""One transaction too large for memory, on local disk until its end is known.

A Kafka transaction left open meanwhile would hide everything behind it from readers of the same partitions, and one
producer has only one open: other, smaller transactions commit while a large one is still coming.
"""

import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from cdc import failpoint
from cdc.durable_files import make_folder, open_new, room
from cdc.errors import LogError
from cdc.model import LOG_SCHEMA, Lsn
from cdc.row_file import RowFile


class TransactionPublisher(Protocol):
    """What a spool needs of the writer."""

    def publish(self, tables: Iterable[pa.Table], end: Lsn, marks: Mapping[str, str]) -> None:
        """Commit rows and position at once."""


class _Stored:
    """The rows in a file; can be gone through more than once."""

    def __init__(self, file: RowFile) -> None:
        self._file = file

    def __iter__(self) -> Iterator[pa.Table]:
        return self._file.read()


class KafkaSpool:
    """Rows in a file of the state folder; removed with it, whatever happens. After LogFull the same call may be made
    again: what was set aside before stays."""

    def __init__(self, writer: TransactionPublisher, folder: Path) -> None:
        make_folder(folder)
        self._writer = writer
        self._path = folder / f"spool-{secrets.token_hex(8)}.arrow"
        with room(folder):
            self._file = RowFile(open_new(self._path), str(folder))
        self._over = False

    def write(self, rows: pa.Table) -> None:
        """Set rows aside."""
        self._must_be_open()
        self._file.write(rows.select(LOG_SCHEMA.names).cast(LOG_SCHEMA))

    def publish(self, end: Lsn) -> None:
        """Produce all of it in one Kafka transaction."""
        self._must_be_open()
        failpoint.reached("log.spool_publish")
        self._writer.publish(_Stored(self._file), end, {})
        self.discard()

    def discard(self) -> None:
        """Forget it."""
        self._over = True
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _must_be_open(self) -> None:
        if self._over:
            raise LogError("This spool was published or discarded.", "Begin a new one.")


def discard_leftovers(folder: Path) -> None:
    """What a writer that died had set aside: its transaction comes again from the source."""
    for path in folder.glob("spool-*.arrow"):
        path.unlink(missing_ok=True)
