"""Gives rows other ids. Keeps no state."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from views.dataflow.delta import ID, SIGN, codes, net
from views.dataflow.output import two_rows


@dataclass(frozen=True, slots=True)
class Rekeyed:
    """Rows are identified by a column from here on, which is then no column of the rows any more."""

    column: str
    view: str

    def step(self, delta: pa.Table) -> pa.Table:
        """The net delta, the old row of each id first.

        Raises ViewError if two changed rows have the same id; `Output` compares with the rows that have not changed.
        """
        found = net(delta)
        found = found.set_column(found.column_names.index(ID), ID, found.column(self.column))
        found = found.drop_columns([self.column])
        sign = found.column(SIGN).to_numpy()
        group = codes(found.column(ID))
        for one in (-1, 1):
            if np.bincount(group[sign == one], minlength=1).max() > 1:
                raise two_rows(self.view)
        return net(found.take(np.argsort(sign, kind="stable")))
