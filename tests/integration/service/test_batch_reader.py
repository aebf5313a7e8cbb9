"""What follows a batch is limited in bytes: the entries of a snapshot share an LSN, and need no WAL."""

from pathlib import Path

from cdc.model import Entry, Lsn
from sinks.spark.batch_reader import BatchReader
from tests.fix_log import FilledLog
from tests.scenes.histories import change, log_table, table


def test_many_bytes_at_one_lsn_are_left_to_tasks(filled_log: FilledLog, tmp_path: Path) -> None:
    filled_log.record(table())
    for number in range(30):  # chunks of a snapshot
        row = change("r", f'{{"id":{number}}}', 10, f'{{"id":{number},"label":"{"x" * 1_000_000}"}}')
        filled_log.writer.append(Entry(log_table([row]), Lsn(11), {"snapshot": str(number)}))
    log = filled_log.reader
    first = next(iter(log.read(log.start())))
    reader = BatchReader(log, tmp_path)
    reader._after, reader._reached = first.offset, first.end
    assert list(reader.follow(lambda: False)) == []
