"""A keyed table of a view's state.

Rows are looked up by their key in time that depends on the rows found, not on the rows stored. Written runs are read
through the page cache (mmap), so the table may be larger than memory.
"""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pyarrow as pa

from cdc.arrays import AnyArray, Bools
from views.state.key_hash import Hashes, hashes
from views.state.runs import KEY, LIVE, ROW, Run, found, merged, pieces, run_schema, sorted_run

_FANOUT = 4
"""A run is merged into its older neighbour once that is less than so many times larger. 2 halves the runs that a lookup
searches, and writes each row about twice as often."""
_LARGEST_RUN = 1 << 30
"""Bytes. An Arrow array of texts ends at 2 GiB."""
_SCANNED = 65_536
_FORGOTTEN = 20_000
"""Entries that are not worth a pass over the table."""


class StateTable:
    """Rows with these columns. Several rows may have one key; `row` tells them apart."""

    def __init__(self, columns: pa.Schema, runs: Sequence[Run] = ()) -> None:
        self.columns = columns
        self._empty = run_schema(columns).empty_table()
        self._runs = list(runs)
        self._needed = 0
        """Entries after the last `forget`."""

    @property
    def runs(self) -> Sequence[Run]:
        """The runs, oldest first."""
        return tuple(self._runs)

    @property
    def bytes(self) -> int:
        """Bytes of all runs."""
        return sum(run.rows.nbytes for run in self._runs)

    @property
    def entries(self) -> int:
        """Number of entries; more than rows while removed and replaced ones are not merged away."""
        return sum(len(run) for run in self._runs)

    def lookup(self, keys: Hashes) -> pa.Table:
        """The live rows of these keys (`hashes`), with the columns of a run. The trap: two texts may share a hash, so
        compare the text itself where it matters."""
        rows: pa.Table = found(self._runs, np.unique(keys), self._empty)
        return rows

    def put(self, keys: AnyArray, rows: AnyArray, live: Bools, columns: pa.Table) -> None:
        """Add or remove (`live` false) rows. Later entries of the same row win."""
        if not len(live):
            return
        own: list[AnyArray] = [pa.array(hashes(keys)), pa.array(hashes(rows, 1)), pa.array(live)]
        own += columns.select(self.columns.names).columns
        added = pa.Table.from_arrays(own, schema=run_schema(self.columns))
        self._runs.append(sorted_run(added))
        self._merge()

    def clear(self) -> None:
        """Remove every row."""
        self._runs = []

    def scan(self) -> Iterator[pa.Table]:
        """All live rows in the order of their keys, in pieces; as they were when the first piece was asked for."""
        yield from pieces(tuple(self._runs), _SCANNED)

    def forget(self, outdated: Callable[[pa.Table], Bools]) -> None:
        """Remove the rows that are outdated, now and then: when the table has doubled since the last time."""
        if self.entries <= 2 * self._needed + _FORGOTTEN:
            return
        whole = merged(self._runs, keep_removed=False)
        self._runs = [Run.of(whole.rows.filter(pa.array(~outdated(whole.rows))).combine_chunks())]
        self._needed = self.entries

    def stored(self, runs: Sequence[Run]) -> None:
        """Replace the runs by equal ones that are stored in files."""
        self._runs = list(runs)

    def _merge(self) -> None:
        """Keep the sizes of the runs falling: a lookup then searches few of them."""
        runs, first = self._runs, len(self._runs) - 1
        size, bytes_ = len(runs[first]), runs[first].rows.nbytes
        while first > 0 and len(runs[first - 1]) < _FANOUT * size:
            bytes_ += runs[first - 1].rows.nbytes
            if bytes_ > _LARGEST_RUN:
                break
            first -= 1
            size += len(runs[first])
        if first < len(runs) - 1:
            runs[first:] = [merged(runs[first:], keep_removed=first > 0)]


def own_columns(rows: pa.Table) -> pa.Table:
    """Rows of a lookup without the columns of the run."""
    return rows.drop_columns([KEY, ROW, LIVE])
