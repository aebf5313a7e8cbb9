"""What a view hands over besides the changes of a batch: its whole content, and what replaces a former content."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.model import LOG_SCHEMA, Op, TableId
from cdc.ports import LogReader, Offset
from views.dataflow.delta import ID, net, signed
from views.dataflow.output import ROW, Moment, Output, changes
from views.state import checkpoint
from views.state.table import StateTable


def emptied(view: TableId, moment: Moment) -> pa.Table:
    """A truncate of the view: one row, just below the content that follows."""
    facts = {"table": str(view), "op": Op.TRUNCATE.value, "version": moment.lsn - 1, "commit_lsn": moment.lsn - 1}
    more = {"ordinal": 0, "xid": 0, "commit_ts": moment.committed, "schema_id": 0}
    return pa.Table.from_pylist([{**facts, **more}], LOG_SCHEMA)


def whole_content(output: Output, moment: Moment) -> Iterator[pa.Table]:
    """Every row as a row of LOG_SCHEMA, in pieces; at least one, which may be empty."""
    yield LOG_SCHEMA.empty_table()
    for piece in output.content():
        yield changes(output.view, piece, moment, read=True)


def replacement(output: Output, former: pa.Table, moment: Moment) -> pa.Table:
    """The changes that turn a former content (ID and ROW) into that of `output`."""
    gone = signed(former.select([ID, ROW]), np.full(former.num_rows, -1, np.int8))
    return changes(output.view, net(pa.concat_tables([gone, *output.content()]).combine_chunks()), moment)


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
    return pa.concat_tables([stored.rows.columns.empty_table(), *found])


def _replay(rows: pa.Table, table: StateTable) -> None:
    ops = rows.column("op").to_pylist()
    start = len(ops) - ops[::-1].index("t") if "t" in ops else 0
    if start:
        table.clear()
    rows = rows.slice(start)
    live = pc.not_equal(rows.column("op"), pa.scalar("d")).to_numpy()
    images = rows.select(["key", "after"]).rename_columns([ID, ROW])
    table.put(rows.column("key"), rows.column("key"), live, images)
