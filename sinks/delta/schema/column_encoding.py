"""How the columns of a Delta table are encoded in its files, so that keys are found cheaply. Pure.

Every batch reads the keys of the files that it may touch. They are nearly distinct and in order: a dictionary of them
is larger than they are and three times as slow to read; as packed differences they nearly vanish.
"""

import pyarrow as pa
from deltalake import ColumnProperties, WriterProperties

_NUMBERS = ColumnProperties(dictionary_enabled=False, encoding="DELTA_BINARY_PACKED")
_DISTINCT = ColumnProperties(dictionary_enabled=False)


def encodings(columns: pa.Schema, key: tuple[str, ...], version: str) -> WriterProperties:
    """For files of these columns: key and version as packed differences; texts without a dictionary where they alone
    are the key."""
    numbers = [name for name in (*key, version) if pa.types.is_integer(columns.field(name).type)]
    texts = [name for name in key if len(key) == 1 and columns.field(name).type == pa.string()]
    own = {**dict.fromkeys(texts, _DISTINCT), **dict.fromkeys(numbers, _NUMBERS)}
    return WriterProperties(compression="SNAPPY", column_properties=own)
