"""Texts as JSON strings, a whole column at once."""

import pyarrow as pa
import pyarrow.compute as pc

from cdc.arrays import AnyArray
from cdc.json_text.members import quote


def all_quoted(texts: AnyArray) -> AnyArray:
    """`cdc.json_text.members.quote` of many texts; a null stays null."""
    wrapped = pc.binary_join_element_wise('"', texts, '"', "")
    special: AnyArray = pc.fill_null(pc.match_substring_regex(texts, r'["\\\x00-\x1f]'), pa.scalar(False))
    if not pc.any(special).as_py():
        return wrapped
    escaped = pa.array([quote(text) for text in texts.filter(special).to_pylist()], pa.string())
    return pc.replace_with_mask(wrapped, special, escaped)
