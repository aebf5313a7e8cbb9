"""Names of keys in Redis: one for the row, one beside it for its version, both in one cluster slot.

A row's name is `<prefix><template>`, by default `public.orders:42`; the parts of a composite key are joined by colons.
What could be misread inside a part (a colon, a brace, a percent sign) is percent-encoded, so two keys never share a
name. Nor do two tables: dots of a schema's name are encoded (`"a.b".c` is not `a."b.c"`). Where the whole row is the
key, the text 'null' is encoded, which a NULL is not.

The version's name is `<prefix>~v:{<row's name>}`: Redis hashes only what is inside the first braces. Where the template
has braces of its own, they decide the slot, and the version's name is `<prefix>~v:<row's name>`.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from redis.crc import key_slot

from cdc.arrays import AnyArray
from cdc.json_text.columns import members as key_members
from cdc.json_text.members import members, unquote
from cdc.model import TableSchema

RESERVED = "~"
"""How the names begin (after the prefix) that hold no row."""
_SPECIAL = re.compile(r"[%:{}]")
_SPECIAL_IN_SCHEMAS = re.compile(r"[%:{}.\n]")  # a table's name may have dots: the first one ends the schema's
_SPECIAL_IN_SETS = re.compile(r"[%:{}\n]")  # sets are listed by lines
_TEXT_NULL = "%6Eull"
_GLOB = re.compile(r"([\\*?\[\]^])")
_BACKSLASH = r"\\\1"
_PART = r"(?:[^%:{}]|%[0-9A-F]{2})*"
"""What `encoded` gives, as a pattern."""
_DIGITS = r"(?:-?[0-9]+|null)"
_INTEGERS = frozenset({"int2", "int4", "int8"})
_LONGEST_VALUE = 512
_NOT_PLAIN = r'["\\%:{}]'
"""Found in the text of a key that must be taken apart or encoded."""


def encoded(part: str, special: re.Pattern[str] = _SPECIAL) -> str:
    """A part of a name, unambiguous between colons and braces."""
    return special.sub(lambda match: f"%{ord(match[0]):02X}", part)


def escaped(text: str) -> str:
    """A text that a pattern for SCAN takes as it is."""
    return _GLOB.sub(_BACKSLASH, text)


def _all_encoded(column: AnyArray, nulls: bool) -> AnyArray:
    """`Names._part` of many values."""
    texts = column.cast(pa.string())
    parts = pc.fill_null(texts, pa.scalar("null"))
    for special in "%:{}":  # the percent sign first: it is in what the others become
        parts = pc.replace_substring(parts, special, f"%{ord(special):02X}")
    return pc.if_else(pc.equal(texts, pa.scalar("null")).fill_null(False), _TEXT_NULL, parts) if nulls else parts


def tag_of(template: str) -> str:
    """What a cluster hashes of a row's name, with `{key}`, `{schema}` and `{table}` open; empty: the whole name.

    Raises ValueError for braces that no cluster would take for a tag.
    """
    filled = re.sub(r"\{(key|schema|table)\}", r"<\1>", template)
    tag = re.search(r"\{([^}]*)\}", filled)
    if tag is None and not re.search(r"[{}]", filled):
        return ""
    if tag is None or not tag[1] or "{" in tag[1] or re.search(r"[{}]", filled.replace(tag[0], "", 1)):
        raise ValueError("the braces in the name of a key are no hash tag: write one pair around part of it")
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
    """Where the version of the table's newest truncate is kept."""
    single: str
    """How a key of one column begins in the log (`{"id":`); empty for a composite key."""
    lookups: str
    """How the names of the table's sets begin."""
    together: bool
    """Whether all rows and sets of the table are in one cluster slot."""
    nulls: bool
    """Whether parts of a key may be null: the whole row is the key."""
    columns: tuple[str, ...]
    """The key's columns."""
    shape: re.Pattern[str]
    """What the whole name of a row of this table looks like: the template around one encoded part per key column."""
    any_key: re.Pattern[str]
    """The same of a row under whichever key the table has had."""

    @classmethod
    def of(cls, schema: TableSchema, prefix: str, template: str) -> "Names":
        """Fill the template's `{schema}` and `{table}`; `{key}` stays open."""
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
        """The row's name, from the log's key."""
        if self.single and key.startswith(self.single):
            text = self._part(key[len(self.single) : -1])
        else:
            text = ":".join(map(self._part, members(key).values()))
        return f"{self.before}{text}{self.after}"

    def _part(self, raw: str) -> str:
        return _TEXT_NULL if self.nulls and raw == '"null"' else encoded(unquote(raw))

    def rows(self, keys: "AnyArray") -> list[str]:
        """The names of many rows."""
        names: list[str] = self.row_names(keys).to_pylist()
        return names

    def parts(self, rows: Sequence[str]) -> dict[str, AnyArray]:
        """The key's columns of rows with these names, as texts; the opposite of `rows`."""
        inside = pc.utf8_slice_codeunits(pa.array(rows, pa.string()), len(self.before), -len(self.after) or None)
        texts: AnyArray = pc.list_flatten(pc.split_pattern(inside, ":"))
        null = pc.and_(pc.equal(texts, pa.scalar("null")), pa.scalar(self.nulls))
        for sign, code in (("null", _TEXT_NULL), (":", "%3A"), ("{", "%7B"), ("}", "%7D"), ("%", "%25")):
            texts = pc.replace_substring(texts, code, sign)
        texts = pc.if_else(null, pa.scalar(None, pa.string()), texts)
        width = len(self.columns)
        return {name: texts.take(pa.array(np.arange(at, len(texts), width))) for at, name in enumerate(self.columns)}

    def row_names(self, keys: "AnyArray") -> "AnyArray":
        """The names of many rows. Plain keys of one column, which most are, are cut all at once."""
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
        """The name beside a row's name."""
        return f"{self.mark}{row}{self.mark_end}"

    def row_of(self, version: str) -> str:
        """The row's name, from the name beside it."""
        return version[len(self.mark) : len(version) - len(self.mark_end)]

    def lookup(self, column: str, value: str) -> str:
        """The set of the rows that have this text in that column."""
        text = encoded(value, _SPECIAL_IN_SETS)
        if len(value.encode()) > _LONGEST_VALUE:
            text = f"sha256:{hashlib.sha256(value.encode()).hexdigest()}"  # no encoded value has a colon
        return f"{self.lookups}:{encoded(column, _SPECIAL_IN_SETS)}:{text}"

    def sets(self, columns: Sequence[str], image: str) -> str:
        """The sets that a row belongs to, one on each line; a null belongs to none."""
        values = members(image)
        held = [(column, values[column]) for column in columns if values.get(column, "null") != "null"]
        return "\n".join(self.lookup(column, unquote(raw)) for column, raw in held)

    def slot(self, row: str) -> int:
        """The cluster slot of a row and its version."""
        return key_slot(row.encode())

    def pattern(self, versions: bool = True) -> str:
        """The pattern for SCAN that finds every version of the table, or every row; and names of others beside them."""
        row = f"{escaped(self.before)}*{escaped(self.after)}"
        return f"{escaped(self.mark)}{row}{self.mark_end}" if versions else row

    def row_found(self, found: bytes, inner: Sequence["Names"] = ()) -> str | None:
        """The row that a name found by SCAN belongs to; None for a key of another purpose, or of a table of `inner`.

        The trap: an application may have keys of its own that fit the pattern, `user:42:cart` beside `user:{key}`.
        """
        try:
            name = found.decode()
        except UnicodeDecodeError:  # ours never are
            return None
        shape = self.shape
        if name.startswith(self.mark):
            name, shape = self.row_of(name), self.any_key
        elif name.startswith(self.prefix + RESERVED):
            return None
        ours = shape.fullmatch(name) and not any(other.any_key.fullmatch(name) for other in inner)
        return name if ours else None

    def rows_found(self, found: Sequence[bytes], inner: Sequence["Names"] = ()) -> list[bytes]:
        """`row_found` of many names of versions: the rows of those that are ours."""
        try:
            versions = pa.array(found, pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:  # some name is no UTF-8
            rows = (self.row_found(name, inner) for name in found)
            return [row.encode() for row in rows if row is not None]
        names: AnyArray = pc.utf8_slice_codeunits(versions, len(self.mark), -len(self.mark_end) or None)
        ours = pc.match_substring_regex(names, f"^(?:{self.any_key.pattern})$")
        for other in inner:
            ours = pc.and_not(ours, pc.match_substring_regex(names, f"^(?:{other.any_key.pattern})$"))
        kept: list[bytes] = names.filter(ours).cast(pa.binary()).to_pylist()
        return kept

    def holds(self, other: "Names") -> bool:
        """Whether names of another table fit this one's template: those of `user:cart:{key}` are like `user:{key}`."""
        longer = (other.before, other.after) != (self.before, self.after)
        return longer and other.before.startswith(self.before) and other.after.endswith(self.after)


def _parts(schema: TableSchema) -> str:
    return ":".join(_DIGITS if column.type.name in _INTEGERS else _PART for column in schema.key or schema.columns)
