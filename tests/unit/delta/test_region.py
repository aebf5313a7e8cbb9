"""Regions: every key is inside, whatever the files are; and no more of the table than needed."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from sinks.delta.write.region import MAX_BOXES, Files, Region, region

NUMBERS = st.integers(-1000, 1000)
BOUNDS = st.tuples(NUMBERS, NUMBERS).map(sorted)


def known(*bounds: Sequence[Sequence[Any]], size: int = 100) -> Files:
    """Files of equal size; for each column, the (low, high) of each file."""
    count = len(bounds[0])
    return Files(
        np.full(count, size),
        np.full(count, 10),
        tuple([low for low, _ in column] for column in bounds),
        tuple([high for _, high in column] for column in bounds),
    )


def inside(found: Region, key: Sequence[Any]) -> bool:
    return any(all(low <= value <= high for value, (low, high) in zip(key, box, strict=True)) for box in found.boxes)


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=200), st.lists(BOUNDS, max_size=40), st.booleans())
def test_every_key_is_inside(keys: list[int], bounds: list[list[int]], small: bool) -> None:
    found = region(["id"], pa.table({"id": keys}), known(bounds), 1000 if small else 0)
    assert found is not None
    assert all(inside(found, (key,)) for key in keys)
    assert 1 <= len(found.boxes) <= MAX_BOXES


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=200), st.lists(BOUNDS, max_size=40))
def test_keys_are_called_new_only_if_no_file_can_hold_one(keys: list[int], bounds: list[list[int]]) -> None:
    found = region(["id"], pa.table({"id": keys}), known(bounds), 0)
    assert found is not None
    assert found.new == (not any(low <= key <= high for key in keys for low, high in bounds))


@settings(deadline=None)
@given(
    st.lists(st.tuples(NUMBERS, st.text(max_size=3)), min_size=1, max_size=50),
    st.lists(st.tuples(BOUNDS, st.tuples(st.text(max_size=3), st.text(max_size=3)).map(sorted)), max_size=20),
)
def test_keys_of_two_columns_are_inside_too(keys: list[tuple[int, str]], bounds: list[Any]) -> None:
    table = pa.table({"a": [key[0] for key in keys], "b": [key[1] for key in keys]})
    found = region(["a", "b"], table, known([one[0] for one in bounds], [one[1] for one in bounds]), 0)
    assert found is not None
    assert all(inside(found, key) for key in keys)
    assert not found.new, "bounds of texts may be cut short by the writer: they prove nothing"


@settings(deadline=None)
@given(st.lists(NUMBERS, min_size=1, max_size=200), st.lists(BOUNDS, max_size=40), st.booleans())
def test_no_file_is_cut_in_two(keys: list[int], bounds: list[list[int]], small: bool) -> None:
    found = region(["id"], pa.table({"id": keys}), known(bounds), 1000 if small else 0)
    assert found is not None
    sides = [box[0] for box in found.boxes]
    for low, high in bounds:
        met = [(start, end) for start, end in sides if low <= end and high >= start]  # type: ignore[operator]
        assert not met or any(start <= low and high <= end for start, end in met)  # type: ignore[operator]


def test_one_key_touches_one_file_of_many() -> None:
    files = known([(start, start + 9) for start in range(0, 10_000, 10)])
    found = region(["id"], pa.table({"id": [5005]}), files, 0)
    assert found is not None
    assert (found.files, found.boxes) == (1, (((5000, 5009),),))


def test_files_side_by_side_are_one_box() -> None:
    files = known([(start, start + 9) for start in range(0, 1000, 10)])
    found = region(["id"], pa.table({"id": [number for number in range(1000) if number // 10 != 50]}), files, 0)
    assert found is not None
    assert found.boxes == (((0, 499),), ((510, 999),))
    assert found.files == 99


def test_the_second_column_rules_out_files_that_the_first_cannot() -> None:
    files = known([(1, 1)] * 100, [(start, start + 9) for start in range(0, 1000, 10)])
    found = region(["tenant", "id"], pa.table({"tenant": [1, 1], "id": [5, 995]}), files, 0)
    assert found is not None
    assert found.files == 2


def test_a_new_key_goes_to_the_small_file_beside_it_and_not_to_a_large_one() -> None:
    files = known([(0, 9), (20, 29)])
    beside = region(["id"], pa.table({"id": [30, 31]}), files, 1000)
    alone = region(["id"], pa.table({"id": [30, 31]}), files, 0)
    assert beside is not None and alone is not None
    assert (beside.files, beside.boxes) == (1, (((20, 31),),))
    assert (alone.files, alone.boxes, alone.new) == (0, (((30, 31),),), True)


def test_a_file_without_bounds_gives_no_region() -> None:
    assert region(["id"], pa.table({"id": [1]}), known([(0, 9), (None, None)]), 0) is None


def test_names_and_texts_cannot_leave_their_quotes() -> None:
    found = Region(('a"b',), ((("it's", "x' OR '1'='1"),),), 0, 0, 0, new=False)
    assert found.condition("target.") == """(target."a""b" >= 'it''s' AND target."a""b" <= 'x'' OR ''1''=''1')"""
