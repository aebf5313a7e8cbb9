"""What a transaction leaves of a key that it gave to one row while another still had it.

Inside a transaction a deferrable key may be held by two rows at once, and a table without a key may hold equal rows:
`update t set id = id + 1` over 1, 2, 3 inserts 2 before it deletes the old 2. Taken in order, the delete would win and
the row would be lost. So a delete ends the very row that it shows, and nothing else:

- a delete whose row was inserted before it in the same transaction cancels that insert;
- any other delete ends the row that the key had before the transaction, which an insert has already replaced. There
  is at most one such row, so a second delete of that kind cancels the last insert, whatever it shows.

Rows are told apart by what they show. Where the table's columns changed between an insert and a delete, the same row
shows otherwise: then the delete counts as the insert's, as it is under every key that is checked at once.

This needs the deleted row itself (`before`), which identity FULL sends; under any other identity Postgres demands an
immediate key, and no key is ever held twice. Pure.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from cdc.arrays import AnyArray, Bools, Ints

PASS_BYTES = 64 * 2**20
"""Rows of a transaction on disk that are looked at in one pass: all of a key's rows come in the same pass."""
_SEEN = ["table", "op", "key", "after", "before", "commit_lsn", "schema_id"]


def shows_deleted_rows(rows: pa.Table) -> bool:
    """Whether a table with identity FULL lost rows here: only then is there anything to settle."""
    return bool(pc.any(_full_deletes(rows)).as_py())


def settled(rows: pa.Table) -> pa.Table:
    """Whole transactions without the changes that their net effect does not have."""
    if not shows_deleted_rows(rows):
        return rows
    return rows.filter(pa.array(~_superfluous(rows.select(_SEEN).combine_chunks())))


def settled_parts(read: Callable[[], Iterable[pa.Table]]) -> Iterator[pa.Table]:
    """The same for one transaction in parts, which `read` gives as often as it is asked."""
    sizes = [(part.num_rows, part.select(_SEEN).nbytes) for part in read()]
    passes = -(-sum(size for _, size in sizes) // PASS_BYTES)
    superfluous = np.zeros(sum(count for count, _ in sizes), np.bool_)
    for number in range(passes):
        places, rows = _share(read(), number, passes)
        superfluous[places[_superfluous(rows)]] = True
    at = 0
    for part in read():
        yield part.filter(pa.array(~superfluous[at : at + part.num_rows]))
        at += part.num_rows


def _share(parts: Iterable[pa.Table], number: int, passes: int) -> tuple[Ints, pa.Table]:
    """The rows of one pass, and where each stands in the transaction. Truncates are in every pass."""
    at, places, shares = 0, [], []
    for part in parts:
        mine = np.flatnonzero((_hashes(part["key"]) % np.uint64(passes) == number) | _ops(part, "t"))
        places.append(at + mine)
        shares.append(part.select(_SEEN).take(mine))
        at += part.num_rows
    return np.concatenate(places), pa.concat_tables(shares).combine_chunks()


def _superfluous(rows: pa.Table) -> Bools:
    """Which of these rows to leave out: they stand in log order, with every row of their keys and transactions."""
    found = np.zeros(rows.num_rows, np.bool_)
    for group in _doubtful(rows):
        changes = rows.take(group).select(["op", "after", "before", "schema_id"]).to_pylist()
        found[group[_kept(changes) :]] = True
    return found


def _doubtful(rows: pa.Table) -> list[Ints]:
    """The rows of each key that a transaction first wrote and then deleted, of tables whose deletes show the row."""
    group = _groups(rows)
    order = np.argsort(group, kind="stable")
    starts = np.flatnonzero(np.diff(group[order], prepend=-1))
    # The first change of a key decides nothing: a delete there ends what was before, and what follows comes after it.
    later = np.ones(len(order), np.bool_)
    later[starts] = False
    deleted = np.asarray(_full_deletes(rows))[order] & later
    ends = np.append(starts[1:], len(order))
    many = np.add.reduceat(deleted, starts) > 0 if len(starts) else np.zeros(0, np.bool_)
    return [order[start:end] for start, end in zip(starts[many], ends[many], strict=True)]


def _groups(rows: pa.Table) -> Ints:
    """A number for each transaction, table and key; what follows a truncate has nothing to do with what came before."""
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
    """How many changes of one key in one transaction count, from the first one on. A key rarely has more than three.

    The last insert that no delete has cancelled is the key's row; without one, a delete of the former row is its end;
    without that, the key is as it was.
    """
    live: list[tuple[int, tuple[int, str]]] = []
    ended = False
    for at, change in enumerate(changes):
        if change["before"] is not None:
            inserted = _inserted(live, (change["schema_id"], change["before"]), ended)
            if inserted is None:
                ended = True
            else:
                del live[inserted]
        if change["op"] != "d":
            live.append((at, (change["schema_id"], change["after"])))
    if live:
        return live[-1][0] + 1
    return len(changes) if ended else 0


def _inserted(live: list[tuple[int, tuple[int, str]]], gone: tuple[int, str], ended: bool) -> int | None:
    """Which of the inserts a delete cancels; None: it ends the row of before the transaction."""
    same = [place for place, (_, row) in enumerate(live) if row == gone]
    others = [place for place, (_, (schema_id, _)) in enumerate(live) if schema_id != gone[0] or ended]
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
    """A number for each key, to spread keys over passes: any would do, as long as equal keys get the same."""
    texts = keys.combine_chunks().fill_null("")
    spans = np.frombuffer(texts.buffers()[1], np.int32)[texts.offset : texts.offset + len(texts) + 1].astype(np.int64)
    data = np.frombuffer(texts.buffers()[2] or b"", np.uint8).astype(np.uint64)
    weight = (np.arange(spans[0], spans[-1]) - np.repeat(spans[:-1], np.diff(spans)) + 1).astype(np.uint64)
    sums = np.concatenate(([np.uint64(0)], np.cumsum(data[spans[0] : spans[-1]] * weight)))
    found: NDArray[np.uint64] = sums[spans[1:] - spans[0]] - sums[spans[:-1] - spans[0]]
    return found
