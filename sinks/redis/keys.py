"""Names of keys in Redis: one key for the row and one for its version, both in the same cluster slot.

A row's name is `<prefix><template>`, by default `public.orders:42`; colons join the parts of a composite key. Colons,
braces and percent signs inside a part are percent-encoded, so two keys never have the same name. Neither have two
tables: dots in a schema's name are encoded (`"a.b".c` is not `a."b.c"`). If the whole row is the key, the text 'null'
is encoded and a NULL is not.

The version's name is `<prefix>~v:{<row's name>}`: Redis hashes only the text inside the first braces. If the template
has braces of its own, they decide the slot, and the version's name is `<prefix>~v:<row's name>`.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.json_text.columns import members as key_members
from cdc.json_text.members import members, unquote
from cdc.model import TableSchema

RESERVED = "~"
"""First character, after the prefix, of the names of Millrace's own keys, which are no rows."""
_SPECIAL = re.compile(r"[%:{}]")
_SPECIAL_IN_SCHEMAS = re.compile(r"[%:{}.\n]")  # not in a table's name: the first dot ends the schema's name
_SPECIAL_IN_SETS = re.compile(r"[%:{}\n]")  # a list of sets has one on each line
_TEXT_NULL = "%6Eull"
_GLOB = re.compile(r"([\\*?\[\]^])")
_BACKSLASH = r"\\\1"
_PART = r"(?:[^%:{}]|%[0-9A-F]{2})*"
"""The pattern of what `encoded` returns."""
_DIGITS = r"(?:-?[0-9]+|null)"
_INTEGERS = frozenset({"int2", "int4", "int8"})
_LONGEST_VALUE = 512
_NOT_PLAIN = r'["\\%:{}]'
"""A key with one of these must be parsed or encoded."""


def encoded(part: str, special: re.Pattern[str] = _SPECIAL) -> str:
    """A part of a name with colons, braces and percent signs encoded."""
    return special.sub(lambda match: f"%{ord(match[0]):02X}", part)


def escaped(text: str) -> str:
    """The text with its wildcards escaped, for a pattern of SCAN."""
    return _GLOB.sub(_BACKSLASH, text)


def _all_encoded(column: AnyArray, nulls: bool) -> AnyArray:
    """`Names._part` of many values."""
    texts = column.cast(pa.string())
    parts = pc.fill_null(texts, pa.scalar("null"))
    for special in "%:{}":  # the percent sign first: the codes of the others contain it
        parts = pc.replace_substring(parts, special, f"%{ord(special):02X}")
    return pc.if_else(pc.equal(texts, pa.scalar("null")).fill_null(False), _TEXT_NULL, parts) if nulls else parts


def tag_of(template: str) -> str:
    """The hash tag in a row's name, with `{key}`, `{schema}` and `{table}` not filled; empty: the whole name is hashed.

    Raises ValueError for braces that are no hash tag in a Redis Cluster.
    """
    filled = re.sub(r"\{(key|schema|table)\}", r"<\1>", template)
    tag = re.search(r"\{([^}]*)\}", filled)
    if tag is None and not re.search(r"[{}]", filled):
        return ""
    if tag is None or not tag[1] or "{" in tag[1] or re.search(r"[{}]", filled.replace(tag[0], "", 1)):
        raise ValueError("the braces in the name of a key are no hash tag: write one pair around a part of it")
    return re.sub("<(key|schema|table)>", r"{\1}", tag[1])


def _filled(part: str, schema: TableSchema) -> str:
    named = encoded(schema.table.schema, _SPECIAL_IN_SCHEMAS)
    return part.replace("{schema}", named).replace("{table}", encoded(schema.table.name))


@dataclass(frozen=True, slots=True)
class Names:
    """The names of one table's keys."""

    prefix: str
    before: str
    after: str
    mark: str
    mark_end: str
    truncated: str
    """The key with the version of the table's newest truncate."""
    single: str
    """The beginning of a key of one column in the log (`{"id":`); empty for a composite key."""
    lookups: str
    """The beginning of the names of the table's sets."""
    one_slot: bool
    """Whether all rows and sets of the table are in one cluster slot."""
    nulls: bool
    """Whether parts of a key may be null, because the whole row is the key."""
    columns: tuple[str, ...]
    """The key's columns."""
    row_name: re.Pattern[str]
    """Matches the name of a row: the template with one encoded part per key column."""
    any_row_name: re.Pattern[str]
    """The same for any number of key columns: the table may have had another key before."""

    @classmethod
    def of(cls, schema: TableSchema, prefix: str, template: str) -> "Names":
        """Fill the template's `{schema}` and `{table}`; `row` fills `{key}`."""
        table = schema.table
        before, _, after = (_filled(part, schema) for part in template.partition("{key}"))
        tag = _filled(tag_of(prefix + template), schema)
        key = [column.name for column in schema.key]
        named = f"{encoded(table.schema, _SPECIAL_IN_SCHEMAS)}.{encoded(table.name, _SPECIAL_IN_SETS)}"
        return cls(
            prefix,
            prefix + before,
            after,
            f"{prefix}{RESERVED}v:" + ("" if tag else "{"),
            "" if tag else "}",
            f"{prefix}{RESERVED}t:{table}",
            f'{{"{key[0]}":' if len(key) == 1 and re.fullmatch(r"\w+", key[0]) else "",
            f"{prefix}{RESERVED}by:" + (f"{{{tag}}}:" if tag and "{" not in prefix else "") + named,
            bool(tag) and "{key}" not in tag,
            schema.keyed_by_row,
            tuple(key),
            re.compile(f"{re.escape(prefix + before)}{_parts(schema)}{re.escape(after)}"),
            re.compile(f"{re.escape(prefix + before)}{_PART}(?::{_PART})*{re.escape(after)}"),
        )

    def row(self, key: str) -> str:
        """The name of a row, from its key in the log."""
        if self.single and key.startswith(self.single):
            text = self._part(key[len(self.single) : -1])
        else:
            text = ":".join(map(self._part, members(key).values()))
        return f"{self.before}{text}{self.after}"

    def _part(self, raw: str) -> str:
        return _TEXT_NULL if self.nulls and raw == '"null"' else encoded(unquote(raw))

    def rows(self, keys: "AnyArray") -> list[str]:
        """The names of many rows, as a list."""
        names: list[str] = self.row_names(keys).to_pylist()
        return names

    def parts(self, rows: Sequence[str]) -> dict[str, AnyArray]:
        """The key columns of rows with these names, as texts; the inverse of `rows`."""
        inside = pc.utf8_slice_codeunits(pa.array(rows, pa.string()), len(self.before), -len(self.after) or None)
        texts: AnyArray = pc.list_flatten(pc.split_pattern(inside, ":"))
        null = pc.and_(pc.equal(texts, pa.scalar("null")), pa.scalar(self.nulls))
        for sign, code in (("null", _TEXT_NULL), (":", "%3A"), ("{", "%7B"), ("}", "%7D"), ("%", "%25")):
            texts = pc.replace_substring(texts, code, sign)
        texts = pc.if_else(null, pa.scalar(None, pa.string()), texts)
        width = len(self.columns)
        return {name: texts.take(pa.array(np.arange(at, len(texts), width))) for at, name in enumerate(self.columns)}

    def row_names(self, keys: "AnyArray") -> "AnyArray":
        """The names of many rows. Keys of one column without special characters are converted all at once."""
        whole: AnyArray = keys.combine_chunks() if isinstance(keys, pa.ChunkedArray) else keys
        texts = whole.cast(pa.string())
        if self.single and len(texts):
            inside: AnyArray = pc.utf8_slice_codeunits(texts, len(self.single), -1)
            plain = pc.and_(pc.starts_with(texts, self.single), pc.invert(pc.match_substring_regex(inside, _NOT_PLAIN)))
            if pc.all(plain).as_py():
                return pc.binary_join_element_wise(self.before, inside, self.after, "")
        parts = [_all_encoded(column.text(), self.nulls) for column in key_members(texts).values()]
        if not parts:
            return pa.array([self.row(key) for key in texts.to_pylist()], pa.string())
        return pc.binary_join_element_wise(self.before, pc.binary_join_element_wise(*parts, ":"), self.after, "")

    def version(self, row: str) -> str:
        """The name of the version key, from the row's name."""
        return f"{self.mark}{row}{self.mark_end}"

    def row_of(self, version: str) -> str:
        """The row's name, from the name of its version key."""
        return version[len(self.mark) : len(version) - len(self.mark_end)]

    def lookup(self, column: str, value: str) -> str:
        """The name of the set of rows with this text in this column."""
        text = encoded(value, _SPECIAL_IN_SETS)
        if len(value.encode()) > _LONGEST_VALUE:
            text = f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"  # an encoded value has no colon
        return f"{self.lookups}:{encoded(column, _SPECIAL_IN_SETS)}:{text}"

    def sets(self, columns: Sequence[str], image: str) -> str:
        """The sets of a row, one on each line; a null belongs to no set."""
        values = members(image)
        found = [(column, values[column]) for column in columns if values.get(column, "null") != "null"]
        return "\n".join(self.lookup(column, unquote(raw)) for column, raw in found)

    def pattern(self, versions: bool = True) -> str:
        """A pattern for SCAN that matches every version key of the table, or every row. It may match other keys too."""
        row = f"{escaped(self.before)}*{escaped(self.after)}"
        return f"{escaped(self.mark)}{row}{self.mark_end}" if versions else row

    def row_found(self, found: bytes, inner: Sequence["Names"] = ()) -> str | None:
        """The row's name, from a name that SCAN found; None for any other key and for rows of the tables in `inner`.

        The trap: an application may have keys that match the pattern, `user:42:cart` next to `user:{key}`.
        """
        try:
            name = found.decode()
        except UnicodeDecodeError:  # not written by Millrace
            return None
        pattern = self.row_name
        if name.startswith(self.mark):
            name, pattern = self.row_of(name), self.any_row_name
        elif name.startswith(self.prefix + RESERVED):
            return None
        matches = pattern.fullmatch(name) and not any(other.any_row_name.fullmatch(name) for other in inner)
        return name if matches else None

    def rows_found(self, found: Sequence[bytes], inner: Sequence["Names"] = ()) -> list[bytes]:
        """`row_found` for many names of version keys."""
        try:
            versions = pa.array(found, pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:  # some name is not UTF-8
            rows = (self.row_found(name, inner) for name in found)
            return [row.encode() for row in rows if row is not None]
        names: AnyArray = pc.utf8_slice_codeunits(versions, len(self.mark), -len(self.mark_end) or None)
        matches = pc.match_substring_regex(names, f"^(?:{self.any_row_name.pattern})$")
        for other in inner:
            matches = pc.and_not(matches, pc.match_substring_regex(names, f"^(?:{other.any_row_name.pattern})$"))
        kept: list[bytes] = names.filter(matches).cast(pa.binary()).to_pylist()
        return kept

    def covers(self, other: "Names") -> bool:
        """Whether rows of another table match this one's template: those of `user:cart:{key}` match `user:{key}`."""
        longer = (other.before, other.after) != (self.before, self.after)
        return longer and other.before.startswith(self.before) and other.after.endswith(self.after)


def _parts(schema: TableSchema) -> str:
    return ":".join(_DIGITS if column.type.name in _INTEGERS else _PART for column in schema.key or schema.columns)
