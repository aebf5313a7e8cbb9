"""Names of keys in Redis: one for the row, one beside it for its version, both in one cluster slot.

A row's name is `<prefix><template>`, by default `public.orders:42`; the parts of a composite key are joined by colons.
What could be misread inside a part (a colon, a brace, a percent sign) is percent-encoded, so two keys never share a
name. The version's name is `<prefix>~v:{<row's name>}`: Redis hashes only what is inside the first braces.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from redis.crc import key_slot

from cdc.model import TableSchema
from sinks.raw_json import members, unquote

_SPECIAL = re.compile(r"[%:{}]")
_GLOB = re.compile(r"([\\*?\[\]^])")
_MARK = "~v:"
_TRUNCATED = "~t:"


def encoded(part: str) -> str:
    """A part of a name, unambiguous between colons and braces."""
    return _SPECIAL.sub(lambda match: f"%{ord(match[0]):02X}", part)


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one table's keys."""

    before: str
    after: str
    mark: str
    truncated: str
    """Where the version of the table's newest truncate is kept."""
    single: str
    """How a key of one column begins in the log (`{"id":`); empty for a composite key."""

    @classmethod
    def of(cls, schema: TableSchema, prefix: str, template: str) -> "Names":
        """Fill the template's `{schema}` and `{table}`; `{key}` stays open."""
        filled = template.replace("{schema}", encoded(schema.table.schema)).replace(
            "{table}", encoded(schema.table.name)
        )
        before, _, after = filled.partition("{key}")
        key = [column.name for column in schema.key]
        single = f'{{"{key[0]}":' if len(key) == 1 and re.fullmatch(r"\w+", key[0]) else ""
        return cls(prefix + before, after, f"{prefix}{_MARK}{{", f"{prefix}{_TRUNCATED}{schema.table}", single)

    def row(self, key: str) -> str:
        """The row's name, from the log's key."""
        if self.single and key.startswith(self.single):
            text = encoded(unquote(key[len(self.single) : -1]))
        else:
            text = ":".join(encoded(unquote(value)) for value in members(key).values())
        return f"{self.before}{text}{self.after}"

    def version(self, row: str) -> str:
        """The name beside a row's name."""
        return f"{self.mark}{row}}}"

    def row_of(self, version: str) -> str:
        """The row's name, from the name beside it."""
        return version[len(self.mark) : -1]

    def slot(self, row: str) -> int:
        """The cluster slot of a row and its version."""
        return key_slot(row.encode())

    def patterns(self) -> Sequence[str]:
        """Patterns for SCAN that find every row and every version of the table."""
        row = f"{_GLOB.sub(_BACKSLASH, self.before)}*{_GLOB.sub(_BACKSLASH, self.after)}"
        return row, f"{_GLOB.sub(_BACKSLASH, self.mark)}{row}}}"

    def is_row(self, name: str) -> bool:
        """Whether a name found by SCAN is a row's and not a version's."""
        return not name.startswith(self.mark)


_BACKSLASH = r"\\\1"
