"""What a view hands over besides the changes of a batch: its whole content, and what replaces a former content."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import Ints
from cdc.model import LOG_SCHEMA, Lsn, TableId
from cdc.ports import LogReader, Offset
from views.dataflow.delta import AT, ID, SIGN, delta_schema, net
from views.dataflow.output import OUTPUT, ROW, Output, changes
from views.state import checkpoint
from views.state.table import StateTable


def stamped(rows: pa.Table, batch: pa.Table) -> pa.Table:
    """Changes of a view with the commit times of the transactions that they reflect, which are in `batch`."""
    if not rows.num_rows or not batch.num_rows:
        return rows
    lsns, first = np.unique(batch.column("commit_lsn").to_numpy(), return_index=True)
    place = np.searchsorted(lsns, rows.column("commit_lsn").to_numpy()).clip(0, len(lsns) - 1)
    times = batch.column("commit_ts").combine_chunks().take(pa.array(first[place]))
    return _with(rows, "commit_ts", times)


def whole_content(output: Output) -> Iterator[pa.Table]:
    """Every row with its own version, in pieces; at least one, which may be empty."""
    yield LOG_SCHEMA.empty_table()
    yield from output.all_rows()


def replacement(output: Output, former: pa.Table, at: Lsn) -> pa.Table:
    """The changes that turn a former content (ID and ROW) into that of `output`, all as of one LSN."""
    view = output.view
    parts = [_signed(former.column(ID), former.column(ROW), -1)]
    parts += [_signed(rows.column(ID), rows.column(ROW), 1) for rows in output.rows.scan()]
    found = changes(view, net(pa.concat_tables(parts).combine_chunks()))
    lsns = pa.array(np.full(found.num_rows, at, np.int64))
    return _with(_with(found, "version", lsns), "commit_lsn", lsns)


def former_content(folder: Path, definition: str, view: TableId, log: LogReader) -> pa.Table:
    """The rows (ID and ROW) that the log has of a view, by the last checkpoint of that definition and what the log has
    beyond it. Without a checkpoint, by the whole log."""
    facts: Mapping[str, str] = checkpoint.facts_of(folder / definition) or {}
    stored = Output(view)
    checkpoint.load(folder / definition, {"output rows": stored.rows})
    after = Offset(facts["offset"]) if facts else log.start()
    for piece in log.read(after):
        _replay(piece.rows.filter(pc.equal(piece.rows.column("table"), pa.scalar(str(view)))), stored.rows)
    found = [rows.select([ID, ROW]) for rows in stored.rows.scan()]
    return pa.concat_tables([pa.schema([(ID, pa.string()), (ROW, pa.string())]).empty_table(), *found])


def _replay(rows: pa.Table, table: StateTable) -> None:
    ops = rows.column("op").to_pylist()
    start = len(ops) - ops[::-1].index("t") if "t" in ops else 0
    if start:
        table.clear()
    rows = rows.slice(start)
    live = pc.not_equal(rows.column("op"), pa.scalar("d")).to_numpy()
    columns = pa.table([rows.column("key"), rows.column("commit_lsn"), rows.column("after")], table.columns)
    table.put(rows.column("key"), rows.column("key"), live, columns)


def _signed(ids: pa.ChunkedArray, rows: pa.ChunkedArray, sign: int) -> pa.Table:
    count = len(ids)
    zeros: Ints = np.zeros(count, np.int64)
    return pa.table([ids, pa.array(np.full(count, sign, np.int8)), pa.array(zeros), rows], delta_schema(OUTPUT))


def _with(rows: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return rows.set_column(rows.column_names.index(name), LOG_SCHEMA.field(name), values)
