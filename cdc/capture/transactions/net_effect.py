"""The net effect of a transaction on a key that two rows had at the same time. Pure.

Inside a transaction two rows may have the same deferrable key, and a table without a key may have equal rows: `update t
set id = id + 1` over 1, 2, 3 inserts 2 before it deletes the old 2. Applied in order, the delete would win and the row
would be lost. So a delete applies only to the row whose values it has:

- a delete whose row was inserted before it in the same transaction cancels that insert;
- any other delete ends the row that the key had before the transaction, which an insert has already replaced. There
  is at most one such row, so a second delete of that kind cancels the last insert, whatever its values.

Rows are compared by their values. If the table's columns changed between an insert and a delete, the same row has other
values: then the delete cancels the insert, as it does under every key that is not deferrable.

This needs the deleted row (`before`), which identity FULL sends; every other identity requires a key that is not
deferrable, so no two rows ever have the same key.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.arrays import AnyArray, Bools, Ints

PASS_BYTES = 64 * 2**20
"""Bytes of a transaction on disk that are processed in one pass: all rows of a key are in the same pass."""
_SEEN = ["table", "op", "key", "after", "before", "commit_lsn", "schema_id"]


def has_full_deletes(rows: pa.Table) -> bool:
    """Whether there are deletes of a table with identity FULL: only those can be superfluous."""
    return bool(pc.any(_full_deletes(rows)).as_py())


def reduced(rows: pa.Table) -> pa.Table:
    """Complete transactions without the changes that are not part of their net effect."""
    if not has_full_deletes(rows):
        return rows
    return rows.filter(pa.array(~_superfluous(rows.select(_SEEN).combine_chunks())))


def reduced_parts(read: Callable[[], Iterable[pa.Table]]) -> Iterator[pa.Table]:
    """The same for one transaction in parts; `read` is called several times and must return the same parts."""
    sizes = [(part.num_rows, part.select(_SEEN).nbytes) for part in read()]
    passes = -(-sum(size for _, size in sizes) // PASS_BYTES)
    superfluous = np.zeros(sum(count for count, _ in sizes), np.bool_)
    for number in range(passes):
        positions, rows = _rows_of_pass(read(), number, passes)
        superfluous[positions[_superfluous(rows)]] = True
    at = 0
    for part in read():
        yield part.filter(pa.array(~superfluous[at : at + part.num_rows]))
        at += part.num_rows


def _rows_of_pass(parts: Iterable[pa.Table], number: int, passes: int) -> tuple[Ints, pa.Table]:
    """The rows of one pass and their row numbers in the transaction. Truncates are in every pass."""
    at, positions, tables = 0, [], []
    for part in parts:
        mine = np.flatnonzero((_hashes(part["key"]) % np.uint64(passes) == number) | _ops(part, "t"))
        positions.append(at + mine)
        tables.append(part.select(_SEEN).take(mine))
        at += part.num_rows
    return np.concatenate(positions), pa.concat_tables(tables).combine_chunks()


def _superfluous(rows: pa.Table) -> Bools:
    """Which rows to drop. `rows` are in log order and have every row of their keys and transactions."""
    found = np.zeros(rows.num_rows, np.bool_)
    for group in _candidates(rows):
        changes = rows.take(group).select(["op", "after", "before", "schema_id"]).to_pylist()
        found[group[_kept(changes) :]] = True
    return found


def _candidates(rows: pa.Table) -> list[Ints]:
    """The rows of each key that a transaction first wrote and then deleted, of tables with identity FULL."""
    group = _groups(rows)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    # The first change of a key is never superfluous: a delete there ends the row of before the transaction.
    later = np.ones(len(order), np.bool_)
    later[starts] = False
    deleted = np.asarray(_full_deletes(rows))[order] & later
    ends = np.append(starts[1:], len(order))
    many = np.add.reduceat(deleted, starts) > 0 if len(starts) else np.zeros(0, np.bool_)
    return [order[start:end] for start, end in zip(starts[many], ends[many], strict=True)]


def _groups(rows: pa.Table) -> Ints:
    """A number for each transaction, table and key; a truncate of the table starts new groups."""
    table = _paired(_codes(rows["commit_lsn"]), _codes(rows["table"]))
    group = _paired(table, _codes(rows["key"]))
    truncates = np.flatnonzero(_ops(rows, "t"))
    if len(truncates):
        before = np.zeros(rows.num_rows, np.int64)
        for at in truncates.tolist():
            before[at:] += table[at:] == table[at]
        group = _paired(group, before)
    return group


def _paired(left: Ints, right: Ints) -> Ints:
    """One number for each pair."""
    return left * (int(right.max(initial=0)) + 1) + right


def _kept(changes: list[dict[str, Any]]) -> int:
    """How many changes of one key in one transaction to keep, from the first one on. A key rarely has more than three.

    The last insert that no delete has cancelled is the key's row; without one, a delete of the former row ends it;
    without that, the key is unchanged.
    """
    live: list[tuple[int, tuple[int, str]]] = []
    former_deleted = False
    for at, change in enumerate(changes):
        if change["before"] is not None:
            inserted = _cancelled(live, (change["schema_id"], change["before"]), former_deleted)
            if inserted is None:
                former_deleted = True
            else:
                del live[inserted]
        if change["op"] != "d":
            live.append((at, (change["schema_id"], change["after"])))
    if live:
        return live[-1][0] + 1
    return len(changes) if former_deleted else 0


def _cancelled(live: list[tuple[int, tuple[int, str]]], deleted: tuple[int, str], former_deleted: bool) -> int | None:
    """Which of the inserts a delete cancels; None: it ends the row of before the transaction."""
    same = [index for index, (_, row) in enumerate(live) if row == deleted]
    others = [index for index, (_, (schema_id, _)) in enumerate(live) if schema_id != deleted[0] or former_deleted]
    return max(same or others, default=None)


def _full_deletes(rows: pa.Table) -> AnyArray:
    return pc.and_(pc.equal(rows["op"], pa.scalar("d")), pc.is_valid(rows["before"]))


def _ops(rows: pa.Table, op: str) -> Bools:
    return np.asarray(pc.equal(rows["op"], pa.scalar(op)))


def _codes(column: AnyArray) -> Ints:
    coded = column.combine_chunks().dictionary_encode(null_encoding="encode")
    codes: Ints = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def _hashes(keys: AnyArray) -> NDArray[np.uint64]:
    """A number for each key, to distribute keys over passes: equal keys get the same number."""
    texts = keys.combine_chunks().fill_null("")
    spans = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8).astype(np.uint64)
    weight = (np.arange(spans[0], spans[-1]) - np.repeat(spans[:-1], np.diff(spans)) + 1).astype(np.uint64)
    sums = np.concatenate(([np.uint64(0)], np.cumsum(data[spans[0] : spans[-1]] * weight)))
    found: NDArray[np.uint64] = sums[spans[1:] - spans[0]] - sums[spans[:-1] - spans[0]]
    return found
