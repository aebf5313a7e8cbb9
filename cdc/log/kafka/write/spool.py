"""One transaction too large for memory, on local disk until it is complete.

An open Kafka transaction would hide all later messages of its partitions from readers, and a producer can have only one
open transaction, while smaller Postgres transactions commit before the large one is complete.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa

from cdc import failpoint
from cdc.durable_files import make_folder, open_new, write_errors
from cdc.errors import LogError
from cdc.model import LOG_SCHEMA, Lsn
from cdc.row_file import RowFile

Publish = Callable[[Iterable[pa.Table], Lsn], None]
"""Commits rows and position in one transaction."""


class _Stored:
    """The rows in a file; can be iterated more than once."""

    def __init__(self, file: RowFile) -> None:
        self._file = file

    def __iter__(self) -> Iterator[pa.Table]:
        return self._file.read()


class KafkaSpool:
    """Rows in a file of the state folder. After LogFull the caller may repeat the call: earlier rows are kept."""

    def __init__(self, publish: Publish, folder: Path) -> None:
        make_folder(folder)
        self._publish = publish
        self._path = folder / f"spool-{secrets.token_hex(8)}.arrow"
        with write_errors(folder):
            self._file = RowFile(open_new(self._path), str(folder))
        self._closed = False

    def write(self, rows: pa.Table) -> None:
        """Append rows to the file."""
        self._require_open()
        self._file.write(rows.select(LOG_SCHEMA.names).cast(LOG_SCHEMA))

    def publish(self, end: Lsn) -> None:
        """Write all rows in one Kafka transaction."""
        self._require_open()
        failpoint.reached("log.spool_publish")
        self._publish(_Stored(self._file), end)
        self.discard()

    def discard(self) -> None:
        """Remove the file."""
        self._closed = True
        self._file.close()
        self._path.unlink(missing_ok=True)

    def _require_open(self) -> None:
        if self._closed:
            raise LogError("This spool was already published or discarded.", "Begin a new one.")


def discard_leftovers(folder: Path) -> None:
    """Remove the spool files of a crashed writer: Postgres sends their transactions again."""
    for path in folder.glob("spool-*.arrow"):
        path.unlink(missing_ok=True)
