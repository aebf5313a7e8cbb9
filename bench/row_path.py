"""The path of an UPDATE through Millrace, step by step: CPU of this process in microseconds per change.

    python -m bench.row_path        (CHANGES, RUNS, OUT from the environment)

Each step calls the function that the product calls there, in one process and one thread, on the same changes; the
median of some runs. What Spark, its JVM and the stores' servers spend is not in it: `bench.sinks.run` measures all.
docs/architecture.md walks the same path in words.
"""

import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from bench.comparison import RESULTS, machine, write
from bench.sinks.batches import TABLE, values
from cdc.capture.pgoutput.decoder import Decoder
from cdc.capture.transactions.assembly import Assembler
from cdc.capture.transactions.spill import SpillFolder
from cdc.log.segments.folder.storage import FolderStorage
from cdc.log.segments.folder.writer import FolderWriter
from cdc.log.segments.log import SegmentSettings, SegmentWriter
from cdc.log.segments.reader import SegmentReader
from cdc.log.segments.segment_file import Encoding
from cdc.log.spark import packed_rows
from cdc.model import ZERO_LSN, Entry, PgType
from sinks.context import SinkContext
from sinks.delta import sink as delta
from sinks.delta.rows.changes import changes
from sinks.delta.schema.layout import new_layout
from sinks.delta.settings import DeltaSettings
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather

T = TypeVar("T")
_PER_TRANSACTION = 50
_EPOCH = 946_684_800_000_000


@dataclass
class _Steps:
    """Microseconds per change by step, one figure a run."""

    count: int
    taken: dict[str, list[float]] = field(default_factory=dict)

    def time(self, step: str, action: Callable[[], T]) -> T:
        """Run a step and note its CPU."""
        begun = time.process_time()
        result = action()
        self.taken.setdefault(step, []).append((time.process_time() - begun) * 1e6 / self.count)
        return result

    def medians(self) -> dict[str, float]:
        """The figures."""
        return {step: round(statistics.median(taken), 2) for step, taken in self.taken.items()}


def measure(count: int, runs: int) -> dict[str, float]:
    """All steps, on so many updates, so many times."""
    frames, steps = list(_frames(count)), _Steps(count)
    for _ in range(runs):
        with tempfile.TemporaryDirectory(prefix="millrace-path-") as folder:
            _run(frames, steps, Path(folder))
    return steps.medians()


def _run(frames: list[bytes], steps: _Steps, folder: Path) -> None:
    log = SegmentWriter(FolderWriter(folder / "log", Encoding()), SegmentSettings())
    decoder = Decoder(log.schemas, _no_type)
    decoded = steps.time("decode: WAL messages to rows with JSON images", lambda: decoder.feed(frames))
    assembler = Assembler(ZERO_LSN, 1 << 30, SpillFolder(folder / "scratch").open)
    items = steps.time(
        "assemble: rows to whole transactions",
        lambda: assembler.take(decoded.rows, decoded.events, decoded.subxids),
    )
    (entry,) = [item for item in items if isinstance(item, Entry)]
    steps.time("append: a Parquet segment, synced and renamed", lambda: log.append(entry))
    reader = SegmentReader(FolderStorage(folder / "log"))
    rows = steps.time(
        "read: the segment in a Spark task",
        lambda: pa.concat_tables([slice.rows for slice in reader.read(reader.start())]),
    )
    blocks = steps.time("pack: rows to blocks for Spark", lambda: list(packed_rows.pack(rows)))
    unpacked = steps.time("unpack: blocks to rows in the driver", lambda: _rows(blocks))
    folded = steps.time("fold: the newest change of each key", lambda: gather(ranked(unpacked), log.schemas))
    (batch,) = folded.batches
    layout = new_layout(batch.schema)
    steps.time("type: JSON images to Delta's columns", lambda: changes(batch, layout))
    sink = delta.open_sink(DeltaSettings(path=str(folder / "lake"), maintain_minutes=0), SinkContext(folder))
    sink.prepare(batch.schema)
    steps.time("apply: a commit to an empty Delta table, typing included", lambda: sink.apply(batch))
    sink.close()
    log.close()


def _rows(blocks: list[pa.RecordBatch]) -> pa.Table:
    rows = packed_rows.unpack(pa.Table.from_batches(blocks))
    assert isinstance(rows, pa.Table)
    return rows


def _no_type(oid: int) -> PgType:
    raise KeyError(oid)


def _frames(count: int) -> Iterator[bytes]:
    """What a server sends of updates of bench.orders: protocol 1, text values."""
    columns = b"".join(
        struct.pack("!B", column.key) + _text(column.name) + struct.pack("!Ii", column.type.oid, column.modifier)
        for column in TABLE.columns
    )
    relation = b"R" + struct.pack("!I", 10) + _text("bench") + _text("orders") + b"d"
    relation += struct.pack("!H", len(TABLE.columns)) + columns
    row = {name: column.cast(pa.string()).to_pylist() for name, column in values(np.arange(count)).items()}
    lsn = 1_000_000
    for start in range(0, count, _PER_TRANSACTION):
        final = lsn + 100 * _PER_TRANSACTION
        yield _frame(struct.pack("!cQqI", b"B", final, -_EPOCH, 1), lsn)
        if start == 0:
            yield _frame(relation, 0)
        for at in range(start, min(count, start + _PER_TRANSACTION)):
            texts = [row["id"][at], row["customer"][at], f"{row['amount'][at]}.00", row["status"][at], row["note"][at]]
            new = b"".join(_value(text) for text in (*texts, "2026-03-01 12:00:00+00"))
            yield _frame(b"U" + struct.pack("!I", 10) + b"N" + struct.pack("!H", len(TABLE.columns)) + new, lsn)
            lsn += 100
        yield _frame(struct.pack("!cBQQq", b"C", 0, final, final + 60, -_EPOCH), final)
        lsn = final + 100


def _frame(payload: bytes, lsn: int) -> bytes:
    return struct.pack("!cQQq", b"w", lsn, lsn, 0) + payload


def _value(text: str) -> bytes:
    data = text.encode()
    return b"t" + struct.pack("!I", len(data)) + data


def _text(text: str) -> bytes:
    return text.encode() + b"\0"


def main() -> None:
    """Measure, print, and write bench/results/row_path.json."""
    count, runs = int(os.environ.get("CHANGES", "100000")), int(os.environ.get("RUNS", "7"))
    found: dict[str, Any] = {"machine": machine(), "changes": count, "runs": runs}
    found["cpu_us_per_change"] = measure(count, runs)
    write(Path(os.environ.get("OUT") or RESULTS / "row_path.json"), found)


if __name__ == "__main__":
    main()
