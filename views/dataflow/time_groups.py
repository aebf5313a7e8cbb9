"""Groups whose windows depend on their rows: sessions, and a window that slides with each event.

A group is computed anew when one of its rows changes: sessions that merge or split are rows of the result that go and
come, so the former ones are retracted.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from cdc.arrays import Bools
from views.dataflow.aggregate import GROUP, RESULT, Call, GroupedRows
from views.dataflow.delta import ID
from views.dataflow.events import TIME
from views.dataflow.windows import END, START, TIMESTAMP

_BOUNDS = [pa.field(START, TIMESTAMP), pa.field(END, TIMESTAMP)]


class TimeGroups(GroupedRows):
    """The rows of a group with their times; START and END are computed with the aggregates."""

    def __init__(self, keys: pa.Schema, calls: Sequence[Call], arguments: pa.Schema, view: str, size: int) -> None:
        super().__init__(keys, calls, pa.schema([*arguments, (TIME, pa.int64())]), view)
        self.schema = pa.schema([*keys, *_BOUNDS, *((call.name, call.type) for call in calls)])
        self.size = size


class Sessions(TimeGroups):
    """One row per session: events of a group of which none is `size` or more after the one before."""

    def forget(self, closed: int) -> None:
        """Remove the rows of sessions that ended up to this time. A session that goes on keeps its first rows."""
        self.rows.forget(lambda rows: self._ended(rows, closed))

    def _ended(self, rows: pa.Table, closed: int) -> Bools:
        given = rows.select([ID, GROUP, TIME]).append_column("place", pa.array(np.arange(rows.num_rows)))
        last = f"max({TIME}) over (partition by {GROUP}, session) as last"
        last = f"select place, {last} from ({self._numbered()})"  # noqa: S608  SQL of this module
        found = self._run(f"select last from ({last}) order by place", given=given)  # noqa: S608
        ended: Bools = found.column("last").to_numpy() + self.size <= closed
        return ended

    def reduce_query(self, keys: str, values: str) -> str:
        """See `GroupedRows`."""
        bounds = f"make_timestamptz(min({TIME})) as {START}, make_timestamptz(max({TIME}) + {self.size}) as {END}"
        columns = f"{GROUP}, {GROUP} || ',' || min({TIME}) as {RESULT}{keys}, {bounds}{values}"
        return f"select {columns} from ({self._numbered()}) group by {GROUP}, session"  # noqa: S608

    def _numbered(self) -> str:
        """SQL: the rows of `given` with the number of their session."""
        order = f"(partition by {GROUP} order by {TIME}, {ID})"
        begins = f"case when {TIME} - lag({TIME}) over {order} < {self.size} then 0 else 1 end"
        first = f"select *, {begins} as begins from given"  # noqa: S608  SQL of this module, as below
        return f"select *, sum(begins) over {order} as session from ({first})"  # noqa: S608


class Sliding(TimeGroups):
    """One row per event: the aggregates of the events of its group in the time `size` up to it, itself included.

    The key of an event is among `keys`, and is that of the event, not of those before it.
    """

    def forget(self, closed: int) -> None:
        """Remove the rows that no window beyond this time has."""
        self.rows.forget(lambda rows: rows.column(TIME).to_numpy() + self.size <= closed)

    def reduce_query(self, keys: str, values: str) -> str:
        """See `GroupedRows`."""
        own = ", ".join(f'b."{name}"' for name in self._keys.names)
        others = ", ".join(f'a."{name}"' for name in self.rows.columns.names if name not in (*self._keys.names, GROUP))
        near = f"a.{GROUP} = b.{GROUP} and a.{TIME} <= b.{TIME} and a.{TIME} > b.{TIME} - {self.size}"
        columns = f"b.{GROUP}, {own}, {others}, b.{ID} as event, b.{TIME} as until"
        pairs = f"select {columns} from given a join given b on {near}"  # noqa: S608  SQL of this module, as below
        end = "any_value(until)"
        bounds = f"make_timestamptz({end} - {self.size}) as {START}, make_timestamptz({end}) as {END}"
        result = f"any_value({GROUP}) as {GROUP}, event as {RESULT}{keys}, {bounds}{values}"
        return f"select {result} from ({pairs}) group by event"  # noqa: S608
