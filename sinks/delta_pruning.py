"""Which files of a Delta table can hold the keys of a batch: literal bounds that the file statistics answer. Pure.

A merge reads and rewrites what its predicate cannot rule out. The join alone rules nothing out, and the bounds that
`deltalake` derives by itself are one range from the least to the greatest key: ten keys spread over the table would
read all of it. A few ranges around the keys that are there read only their files.
"""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

RANGES = 32
"""Each range is a term of the predicate, checked for each file: more of them cost planning time and prune little."""


def bounds(name: str, values: "pa.ChunkedArray[pa.Scalar[pa.DataType]]") -> str:
    """A condition on this column that is true for all of these values; empty where none can be written."""
    type_ = values.type
    if not len(values) or values.null_count:
        return ""
    if pa.types.is_integer(type_):
        return _ranges(name, *_clusters(np.unique(values.to_numpy())))
    if type_ == pa.string():
        unique = np.array(sorted(pc.unique(values).to_pylist()), object)
        return _ranges(name, *_equal_parts(unique))
    return ""


def _clusters(unique: "np.ndarray") -> tuple[list[str], list[str]]:
    """Cut where the gaps are widest."""
    gaps = np.diff(unique)
    cuts = np.sort(np.argsort(gaps, kind="stable")[-(RANGES - 1) :]) + 1 if len(gaps) else np.array([], np.int64)
    starts, ends = unique[np.insert(cuts, 0, 0)], unique[np.append(cuts, len(unique)) - 1]
    return [str(value) for value in starts.tolist()], [str(value) for value in ends.tolist()]


def _equal_parts(unique: "np.ndarray") -> tuple[list[str], list[str]]:
    """Texts have no distance: as many keys in each range."""
    parts = [part for part in np.array_split(unique, RANGES) if len(part)]
    return [_literal(part[0]) for part in parts], [_literal(part[-1]) for part in parts]


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _ranges(name: str, starts: list[str], ends: list[str]) -> str:
    """Written with >= and <=, which the statistics answer; a single value as an equality."""
    terms = [
        f"{name} = {start}" if start == end else f"({name} >= {start} AND {name} <= {end})"
        for start, end in zip(starts, ends, strict=True)
    ]
    return " OR ".join(terms)
