"""Groups of rows, each reduced to one row, kept right as rows come and go.

`RunningTotals` keeps counts and sums: a change costs the same however many rows its group has. `GroupedRows` keeps the
rows themselves and computes a group anew when it changes, for what cannot be taken back (a minimum, a percentile): a
change costs as much as its group has rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray, Bools
from cdc.errors import ViewError
from cdc.expressions import engine
from views.dataflow.delta import ID, SIGN, delta_schema, net, signed
from views.state.key_hash import hashes
from views.state.runs import KEY as HASH
from views.state.table import StateTable, own_columns

GROUP = "_group"
"""The text of the group's key, a column of the input."""
RESULT = "_result"
"""The id of a row of the result: of a group's only row, its key."""
WINDOW_END = "window_end"
"""The key's column with the end of a window, of groups in windows."""
_COUNT = "_count"


@dataclass(frozen=True, slots=True)
class Call:
    """An aggregate: the name of its column, and SQL that computes it from the rows of a group."""

    name: str
    type: pa.DataType
    rows_sql: str
    totals_sql: str = ""
    """The same from the totals; empty: it cannot be computed from them."""


@dataclass(frozen=True, slots=True)
class Total:
    """A column whose values are counted (those that are not null), and summed if they are numbers."""

    column: str
    digits: int | None
    """Decimals of the sum; None: only counted."""

    @property
    def count(self) -> str:
        """The name of the count."""
        return f"n_{self.column}"

    @property
    def sum(self) -> str:
        """The name of the sum."""
        return f"s_{self.column}"


class _Groups:
    """What both have in common: the groups of a delta, and the rows of the result."""

    def __init__(self, keys: pa.Schema, calls: Sequence[Call], view: str) -> None:
        self._keys = keys
        self._calls = tuple(calls)
        self._view = view
        self.schema = pa.schema([*keys, *((call.name, call.type) for call in calls)])
        self._connection = engine.cursor()
        self._statements = engine.statements()

    def _run(self, query: str, **tables: pa.Table) -> pa.Table:
        for name, table in tables.items():
            self._connection.register(name, table)
        try:
            found: pa.Table = self._connection.sql(query).to_arrow_table()
        except duckdb.Error as error:
            raise self._failed(error) from None
        finally:
            for name in tables:
                self._connection.unregister(name)
        return found

    def _evaluated(self, select: str, rows: pa.Table, tail: str = "") -> pa.Table:
        """The same for a query that is planned once."""
        try:
            return self._statements.run(select, rows, tail)
        except duckdb.Error as error:
            raise self._failed(error) from None

    def _failed(self, error: duckdb.Error) -> ViewError:
        return ViewError(
            f"View {self._view}: an aggregate cannot be computed: {str(error).splitlines()[0][:120]}",
            "Cast its argument, for instance to numeric(18,2).",
        )

    def _result(self, before: pa.Table, after: pa.Table) -> pa.Table:
        """The net delta; both tables have RESULT and the columns of `schema`, in any order of rows."""
        parts = []
        for rows, sign in ((before, -1), (after, 1)):
            columns: dict[str, AnyArray] = {ID: rows.column(RESULT)}
            columns |= {field.name: rows.column(field.name).cast(field.type) for field in self.schema}
            parts.append(signed(pa.table(columns), np.full(rows.num_rows, sign, np.int8)))
        return net(pa.concat_tables(parts).combine_chunks())

    def _nothing(self) -> pa.Table:
        return delta_schema(self.schema).empty_table()


def ended(rows: pa.Table, closed: int) -> Bools:
    """Which rows are those of windows that ended up to a time."""
    found: Bools = rows.column(WINDOW_END).cast(pa.int64()).to_numpy() <= closed
    return found


class RunningTotals(_Groups):
    """Counts, sums and averages."""

    def __init__(self, keys: pa.Schema, calls: Sequence[Call], totals: Sequence[Total], view: str) -> None:
        super().__init__(keys, calls, view)
        self._totals = tuple(totals)
        sums = [(each.sum, pa.decimal128(38, each.digits)) for each in totals if each.digits is not None]
        counts = [(name, pa.int64()) for name in (_COUNT, *(total.count for total in totals))]
        self.totals = StateTable(pa.schema([(GROUP, pa.string()), *keys, *counts, *sums]))

    @property
    def tables(self) -> dict[str, StateTable]:
        """The state."""
        return {"totals": self.totals}

    def step(self, delta: pa.Table) -> pa.Table:
        """The net delta of the groups."""
        if not delta.num_rows:
            return self._nothing()
        names = pc.unique(delta.column(GROUP).combine_chunks())
        stored = own_columns(self.totals.lookup(hashes(names)))
        stored = stored.filter(pc.is_in(stored.column(GROUP), value_set=names))
        after = self._summed(pa.concat_tables([self._changed(delta), stored]).combine_chunks())
        group = after.column(GROUP)
        live = pc.greater(after.column(_COUNT), pa.scalar(0))
        self.totals.put(group, group, live.to_numpy(), after)
        return self._result(self._shown(stored), self._shown(after.filter(live)))

    def forget(self, closed: int) -> None:
        """Remove the groups of windows that ended up to this time."""
        self.totals.forget(lambda rows: ended(rows, closed))

    def _changed(self, delta: pa.Table) -> pa.Table:
        """What each row of the delta adds to the totals of its group."""
        keys = [f'"{name}"' for name in self._keys.names]
        counts = [f'case when "{total.column}" is null then 0 else _sign end::bigint' for total in self._totals]
        sums = [_signed_sum(total) for total in self._totals if total.digits is not None]
        return self._selected([GROUP, *keys, "_sign::bigint", *counts, *sums], delta)

    def _summed(self, changes: pa.Table) -> pa.Table:
        """The totals of each group."""
        keys = [f'any_value("{name}")' for name in self._keys.names]
        counts = [f'sum("{name}")::bigint' for name in (_COUNT, *(total.count for total in self._totals))]
        sums = [
            f'coalesce(sum("{total.sum}"), 0)::decimal(38,{total.digits})'
            for total in self._totals
            if total.digits is not None
        ]
        return self._selected([GROUP, *keys, *counts, *sums], changes, f" group by {GROUP}")

    def _selected(self, values: Sequence[str], rows: pa.Table, tail: str = "") -> pa.Table:
        """Values in the columns of the totals."""
        columns = zip(values, self.totals.columns.names, strict=True)
        found = self._evaluated(", ".join(f'{value} as "{name}"' for value, name in columns), rows, tail)
        return found.cast(self.totals.columns)

    def _shown(self, totals: pa.Table) -> pa.Table:
        own = "".join(f', "{name}"' for name in self._keys.names)
        values = "".join(f', {call.totals_sql} as "{call.name}"' for call in self._calls)
        return self._evaluated(f"{GROUP}, {GROUP} as {RESULT}{own}{values}", totals)


def _signed_sum(total: Total) -> str:
    value = f'cast("{total.column}" as decimal(38,{total.digits}))'
    return f"case when _sign > 0 then {value} else -{value} end"


class GroupedRows(_Groups):
    """Any aggregate."""

    def __init__(self, keys: pa.Schema, calls: Sequence[Call], arguments: pa.Schema, view: str) -> None:
        super().__init__(keys, calls, view)
        self.rows = StateTable(pa.schema([(ID, pa.string()), (GROUP, pa.string()), *keys, *arguments]))

    @property
    def tables(self) -> dict[str, StateTable]:
        """The state."""
        return {"rows": self.rows}

    def step(self, delta: pa.Table) -> pa.Table:
        """The net delta of the groups."""
        if not delta.num_rows:
            return self._nothing()
        names = pc.unique(delta.column(GROUP).combine_chunks())
        wanted = hashes(names)
        before = self._reduced(self.rows.lookup(wanted), names)
        self.rows.put(delta.column(GROUP), delta.column(ID), delta.column(SIGN).to_numpy() > 0, delta)
        return self._result(before, self._reduced(self.rows.lookup(wanted), names))

    def _reduced(self, rows: pa.Table, names: AnyArray) -> pa.Table:
        known = rows.filter(pc.is_in(rows.column(GROUP), value_set=names)).drop_columns([HASH])
        keys = "".join(f', any_value("{name}") as "{name}"' for name in self._keys.names)
        values = "".join(f', {call.rows_sql} as "{call.name}"' for call in self._calls)
        return self._run(self.reduce_query(keys, values), given=known)

    def forget(self, closed: int) -> None:
        """Remove the rows of windows that ended up to this time."""
        self.rows.forget(lambda rows: ended(rows, closed))

    def reduce_query(self, keys: str, values: str) -> str:
        """The rows of the result, from `given`: RESULT identifies a row; `keys` and `values` select its columns."""
        return f"select {GROUP}, {GROUP} as {RESULT}{keys}{values} from given group by {GROUP}"  # noqa: S608
