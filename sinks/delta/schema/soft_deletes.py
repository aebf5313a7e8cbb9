"""`apply_as_deletes`: the condition under which a row counts as deleted, for tables with soft deletes. Pure.

Three forms, each over one column: `column`, `column IS [NOT] NULL`, `column = value`. More would need an SQL engine
that agrees with Postgres; a generated column in the source can compute any condition.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray

_NAME = r'(?P<quoted>"(?:[^"]|"")+")|(?P<plain>[A-Za-z_][A-Za-z0-9_]*)'
_FORM = re.compile(
    rf"\s*(?:{_NAME})\s*(?:(?P<null>IS\s+NULL)|(?P<some>IS\s+NOT\s+NULL)|=\s*(?P<value>'(?:[^']|'')*'|[^\s']+))?\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class DeleteCondition:
    """True for rows that count as deleted."""

    column: str
    test: Literal["true", "null", "not null", "equals"]
    value: str = ""

    @classmethod
    def parse(cls, text: str) -> "DeleteCondition":
        """Raises ValueError for anything but the three forms."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise ValueError(
                f"apply_as_deletes: {text!r} is not understood; write `column`, `column IS NOT NULL`, "
                "`column IS NULL` or `column = value`"
            )
        quoted, plain, value = found["quoted"], found["plain"], found["value"]
        column = quoted[1:-1].replace('""', '"') if quoted else plain
        if found["null"] or found["some"]:
            return cls(column, "null" if found["null"] else "not null")
        if value is None:
            return cls(column, "true")
        return cls(column, "equals", value[1:-1].replace("''", "'") if value.startswith("'") else value)

    def matches(self, columns: Mapping[str, AnyArray]) -> npt.NDArray[np.bool_]:
        """For each row; `columns` are by the source's names. NULL is not true, as in SQL."""
        values = columns[self.column]
        found: AnyArray
        if self.test == "null":
            found = values.is_null()
        elif self.test == "not null":
            found = values.is_valid()
        elif self.test == "true":
            found = values.cast(pa.bool_())
        else:
            found = pc.equal(values, pa.scalar(self.value).cast(values.type))
        flags: npt.NDArray[np.bool_] = found.fill_null(False).to_numpy(zero_copy_only=False)
        return flags
