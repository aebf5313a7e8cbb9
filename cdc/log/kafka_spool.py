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
from cdc.errors import LogError
from cdc.log.files import make_folder, room
from cdc.model import LOG_SCHEMA, Lsn


class Publisher(Protocol):
    """What a spool needs of the writer."""

    def publish(self, tables: Iterable[pa.Table], end: Lsn, marks: Mapping[str, str]) -> None:
        """Commit rows and position at once."""


class _Stored:
    """The rows in a file; can be gone through more than once."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[pa.Table]:
        with pa.OSFile(str(self._path), "rb") as source, pa.ipc.open_stream(source) as stream:
            for batch in stream:
                yield pa.Table.from_batches([batch])


class KafkaSpool:
    """Rows in an Arrow file of the state folder; removed with it, whatever happens."""

    def __init__(self, writer: Publisher, folder: Path) -> None:
        make_folder(folder)
        self._writer = writer
        self._folder = folder
        self._path = folder / f"spool-{secrets.token_hex(8)}.arrow"
        self._file = pa.OSFile(str(self._path), "wb")
        self._path.chmod(0o600)
        self._stream = pa.ipc.new_stream(self._file, LOG_SCHEMA, options=pa.ipc.IpcWriteOptions(compression="lz4"))
        self._over = False

    def write(self, rows: pa.Table) -> None:
        """Set rows aside."""
        self._must_be_open()
        with room(self._folder):
            self._stream.write_table(rows.select(LOG_SCHEMA.names).cast(LOG_SCHEMA))

    def publish(self, end: Lsn) -> None:
        """Produce all of it in one Kafka transaction."""
        self._must_be_open()
        self._close()
        failpoint.reached("log.spool_publish")
        self._writer.publish(_Stored(self._path), end, {})
        self.discard()

    def discard(self) -> None:
        """Forget it."""
        self._close()
        self._path.unlink(missing_ok=True)

    def _close(self) -> None:
        if not self._over:
            self._over = True
            self._stream.close()
            self._file.close()

    def _must_be_open(self) -> None:
        if self._over:
            raise LogError("This spool was published or discarded.", "Begin a new one.")


def discard_leftovers(folder: Path) -> None:
    """What a writer that died had set aside: its transaction comes again from the source."""
    for path in folder.glob("spool-*.arrow"):
        path.unlink(missing_ok=True)
