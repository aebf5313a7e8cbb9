"""Changes of one table from the log as a delta of its rows. Pure but for the table's state.

A row's columns are JSON texts, byte by byte as captured. Columns that the server did not send (unchanged TOAST) are
filled from the row before, which is in the batch or in the state.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools, Ints
from cdc.json_text.columns import members
from cdc.key_range import KeyRange
from cdc.model import TableId
from views.dataflow.delta import ID, codes, delta_schema, net, signed, union
from views.state.key_hash import hashes
from views.state.table import StateTable

_WHOLE_TABLE = ("t", "p")


@dataclass(frozen=True, slots=True)
class Chains:
    """The rows of each key one after the other: the stored row first, then the changes in log order."""

    ids: AnyArray
    alive: Bools
    change: Ints
    """The number of the change; negative for a stored row."""
    first: Bools
    """The first row of a key."""
    last: Bools
    columns: pa.Table


class InputTable:
    """The rows of one captured table, reduced to the columns that views need."""

    def __init__(self, table: TableId, columns: Sequence[str], state: StateTable | None = None) -> None:
        self.table = table
        self.columns = tuple(columns)
        self.state = state or StateTable(pa.schema([(ID, pa.string()), *((name, pa.string()) for name in columns)]))
        self._schema = delta_schema(pa.schema([(name, pa.string()) for name in columns]))

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables whose rows it reads."""
        return (str(self.table),)

    @property
    def states(self) -> dict[str, StateTable]:
        """The state."""
        return {"": self.state}

    def step(self, rows: pa.Table) -> pa.Table:
        """The net delta of these changes, which are of this table and in log order; the state has them afterwards."""
        changes = rows.filter(pc.not_equal(rows.column("op"), pa.scalar("m"))).combine_chunks()
        return net(union([self._schema.empty_table(), *self._parts(changes)]))

    def _parts(self, rows: pa.Table) -> Iterator[pa.Table]:
        """Truncates and removed ranges concern every row before them, so changes are taken in runs between them."""
        whole = np.flatnonzero(pc.is_in(rows.column("op"), value_set=pa.array(_WHOLE_TABLE)).to_numpy())
        start = 0
        for place in whole.tolist():
            yield self._changed(rows.slice(start, place - start))
            yield self._removed(rows.slice(place, 1).to_pylist()[0])
            start = place + 1
        yield self._changed(rows.slice(start))

    def _removed(self, change: dict[str, Any]) -> pa.Table:
        """The rows that a truncate or a removed range takes."""
        rows = self._taken(change)
        return self._delta(rows, np.full(rows.num_rows, -1, np.int8))

    def _taken(self, change: dict[str, Any]) -> pa.Table:
        """The same rows, taken out of the state."""
        found = list(self.state.scan())
        rows = pa.concat_tables(found) if found else self.state.lookup(np.zeros(0, np.uint64))
        if change["op"] == "p":
            rows = rows.filter(pa.array(KeyRange.parse(change["key"]).contains_keys(rows.column(ID))))
            gone = np.zeros(rows.num_rows, np.bool_)
            self.state.put(rows.column(ID), rows.column(ID), gone, rows)
        else:
            self.state.clear()
        return rows

    def _changed(self, rows: pa.Table) -> pa.Table:
        if not rows.num_rows:
            return self._schema.empty_table()
        chains = self._filled(rows)
        self._keep(chains, chains.columns)
        places, sign, _ = legs(chains)
        return self._delta(chains.columns.add_column(0, ID, chains.ids).take(places), sign)

    def _keep(self, chains: Chains, columns: pa.Table) -> None:
        """Put the last row of each key into the state."""
        final = np.flatnonzero(chains.last)
        ids = chains.ids.take(pa.array(final))
        self.state.put(ids, ids, chains.alive[final], columns.take(final).add_column(0, ID, ids))

    def _delta(self, rows: pa.Table, sign: npt.NDArray[np.int8]) -> pa.Table:
        return signed(rows.select([ID, *self.columns]), sign)

    def _filled(self, rows: pa.Table) -> Chains:
        """The chains of all keys, with every column filled."""
        known = self.state.lookup(hashes(rows.column("key")))
        count, stored_count = rows.num_rows, known.num_rows
        ids: AnyArray = pa.concat_arrays([known.column(ID).combine_chunks(), rows.column("key").combine_chunks()])
        group = codes(ids)
        touched = np.isin(group[:stored_count], group[stored_count:])  # not a row whose hash is merely the same
        order = np.argsort(group, kind="stable")
        order = order[np.concatenate([touched, np.ones(count, np.bool_)])[order]]
        first = np.diff(group[order], prepend=-1) != 0
        gone = pc.equal(rows.column("op"), pa.scalar("d")).to_numpy(zero_copy_only=False)
        columns, complete = self._columns(rows, known, gone, order, first)
        alive = np.concatenate([np.ones(stored_count, np.bool_), ~gone])[order] & complete
        ids = ids.take(pa.array(order))
        return Chains(ids, alive, order - stored_count, first, np.append(first[1:], True), columns)

    def _columns(
        self, rows: pa.Table, known: pa.Table, gone: Bools, order: Ints, first: Bools
    ) -> tuple[pa.Table, Bools]:
        """The columns of all rows of the chains, and which rows have all of them."""
        images: AnyArray = pc.if_else(
            pa.array(gone), pa.scalar(None, pa.string()), rows.column("after").combine_chunks()
        )
        raw, unsent = members(images), _unsent(rows)
        links = _Links.of(rows, gone, order - known.num_rows, first)
        found, complete = [], np.ones(len(order), np.bool_)
        for name in self.columns:
            new: AnyArray = raw[name].json().cast(pa.string()) if name in raw else pa.nulls(rows.num_rows, pa.string())
            values: AnyArray = pa.concat_arrays([known.column(name).combine_chunks(), new]).take(pa.array(order))
            if name in unsent:
                missing = np.concatenate([np.zeros(known.num_rows, np.bool_), unsent[name]])[order]
                places, unknown = links.sources(missing)
                values, complete = values.take(pa.array(places)), complete & ~unknown
            found.append(values)
        more = [field for field in self.state.columns if field.name not in (ID, *self.columns)]
        for field in more:  # what only stored rows have
            none: AnyArray = pa.nulls(rows.num_rows, field.type).fill_null(0)
            found.append(pa.concat_arrays([known.column(field.name).combine_chunks(), none]).take(pa.array(order)))
        return pa.table(found, [*self.columns, *(field.name for field in more)]), complete


def captured(columns: Mapping[TableId, Sequence[str]]) -> list[InputTable]:
    """The captured tables that a view reads, by their columns."""
    return [InputTable(table, names) for table, names in columns.items()]


def legs(chains: Chains) -> tuple[Ints, npt.NDArray[np.int8], Ints]:
    """Every change as the row before it and the row after it, in the order of each key: the places of these rows, their
    signs, and the number of the change."""
    changed = np.flatnonzero(chains.change >= 0)
    before = changed - 1
    had = ~chains.first[changed] & chains.alive[np.maximum(before, 0)]
    has = chains.alive[changed]
    kept = np.stack([had, has], axis=1).ravel()
    places = np.stack([np.maximum(before, 0), changed], axis=1).ravel()[kept]
    sign = np.tile(np.array([-1, 1], np.int8), len(changed))[kept]
    return places, sign, np.repeat(chains.change[changed], 2)[kept]


@dataclass(frozen=True, slots=True)
class _Links:
    """Where the rows of the chains have their earlier values."""

    start: Ints
    """The first row of the row's key."""
    gone: Bools
    former: Ints
    """The row under its former key, of a row whose key was changed: a delete is directly before it in its transaction.
    -1 if there is none."""

    def sources(self, missing: Bools) -> tuple[Ints, Bools]:
        """For each row, the row that has its value: itself, or the nearest one before it; and for which none has.

        A backfill may still have to read such a row. It then repeats the change with every column, so the row is not
        there until then.
        """
        places = np.maximum.accumulate(np.where(missing, 0, np.arange(len(missing))))
        unknown: Bools = np.zeros(len(missing), np.bool_)
        unfilled = np.flatnonzero((places < self.start) | (missing & (self.gone | missing)[places]))
        former = self._former_of(unfilled)
        places[unfilled] = np.where(former < 0, unfilled, former)
        unknown[unfilled] = former < 0
        while (places[places] != places).any():  # the former row may lack it too: its key was changed as well
            places = places[places]
        return places, unknown[places]

    def _former_of(self, places: Ints) -> Ints:
        """The row under the former key, of the row or of an earlier one of its key; -1 if there is none."""
        linked = np.maximum.accumulate(np.where(self.former >= 0, np.arange(len(self.former)), 0))[places]
        return np.where(linked >= self.start[places], self.former[linked], -1)

    @classmethod
    def of(cls, rows: pa.Table, gone: Bools, change: Ints, first: Bools) -> "_Links":
        """`change` has the number of each row's change, negative for a stored row."""
        size, mine = len(change), change >= 0
        start = np.maximum.accumulate(np.where(first, np.arange(size), 0))
        place_of = np.zeros(rows.num_rows, np.int64)
        place_of[change[mine]] = np.flatnonzero(mine)
        commits, ordinals = (rows.column(name).to_numpy() for name in ("commit_lsn", "ordinal"))
        moved = np.zeros(rows.num_rows, np.bool_)
        moved[1:] = gone[:-1] & (commits[1:] == commits[:-1]) & (ordinals[1:] == ordinals[:-1] + 1)
        # The row under its new key comes as an insert. An update after the delete of another row is that row's own.
        moved &= pc.equal(rows.column("op"), pa.scalar("c")).to_numpy(zero_copy_only=False)
        before = place_of[np.maximum(np.arange(rows.num_rows) - 1, 0)]
        former, ended = np.full(size, -1, np.int64), np.zeros(size, np.bool_)
        former[mine] = np.where(moved & ~first[before], before - 1, -1)[change[mine]]
        ended[mine] = gone[change[mine]]
        return cls(start, ended, former)


def _unsent(rows: pa.Table) -> dict[str, Bools]:
    """For each column that any change lacks: which changes lack it."""
    lists = rows.column("unchanged").combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(lists), pa.scalar(0)).to_numpy()
    if not lengths.any():
        return {}
    names: AnyArray = pc.list_flatten(lists)
    owners = np.repeat(np.arange(len(lengths)), lengths)
    found: dict[str, Bools] = {}
    for name in pc.unique(names).to_pylist():
        mask: Bools = np.zeros(len(lengths), np.bool_)
        mask[owners[pc.equal(names, name).to_numpy(zero_copy_only=False)]] = True
        found[name] = mask
    return found
