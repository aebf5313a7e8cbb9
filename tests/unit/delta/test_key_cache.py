"""Keys kept in memory: found where they lie, in bounded room."""

import numpy as np
import pyarrow as pa
import pytest

from sinks.delta.deletion_vectors.key_cache import KeyCache, SortedKeys


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(np.arange(1_000, 3_000), id="dense"),
        pytest.param(np.sort(np.random.default_rng(3).integers(-50, 50, 500)), id="many equal"),
        pytest.param(np.array([-(2**63), -1, 0, 7, 2**63 - 1]), id="all of bigint"),
        pytest.param(np.arange(0, 2**33, 2**23), id="wide"),
        pytest.param(np.array([4], np.int16), id="a single smallint"),
    ],
)
def test_keys_are_found_in_every_row_that_has_them_and_nowhere_else(stored: "np.typing.NDArray[np.int64]") -> None:
    keys = SortedKeys.of(pa.array(stored))
    assert keys is not None
    asked = np.unique(np.concatenate([stored[::3].astype(np.int64), [-(2**63), -2, 0, 5, 2**63 - 1]]))
    rows = keys.rows_with(asked)
    assert rows.tolist() == np.flatnonzero(np.isin(stored, asked)).tolist()
    assert keys.keys_of(rows).tolist() == stored[rows].tolist()


@pytest.mark.parametrize("stored", [pa.array([2, 1]), pa.array([1, None]), pa.array(["a"]), pa.array([], pa.int64())])
def test_what_is_no_number_or_not_in_order_is_left_to_the_file(stored: "pa.Array[pa.Scalar[pa.DataType]]") -> None:
    assert SortedKeys.of(stored) is None


def test_the_room_is_bounded_and_that_of_files_that_are_gone_is_used_again() -> None:
    keys = SortedKeys.of(pa.array(np.arange(100)))
    assert keys is not None
    cache = KeyCache(capacity=2 * keys.distances.nbytes)
    for path in ("a", "b", "c"):
        cache.keep(path, keys)
    assert [path for path in "abc" if cache.get(path)] == ["a", "b"]
    cache.keep_only({"b", "c"})
    cache.keep("c", keys)
    assert [path for path in "abc" if cache.get(path)] == ["b", "c"]
