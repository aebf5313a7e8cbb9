"""Plans cover every page once, survive being written down, and know what is left."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.model import TableId
from snapshots.initial.plan import (
    LEAST_PAGES,
    MOST_CHUNKS,
    Leaf,
    TablePlan,
    largest_first,
    mark_name,
    plan_table,
    planned,
)

ORDERS = TableId("public", "orders")


def leaf(pages: int, name: str = "orders", whole: bool = False) -> Leaf:
    return Leaf(TableId("public", name), 16384, pages, whole)


@given(pages=st.integers(0, 2**22), workers=st.integers(1, 32))
def test_chunks_cover_every_page_once_and_the_last_is_open(pages: int, workers: int) -> None:
    chunks = plan_table(ORDERS, [leaf(pages)], workers).chunks
    assert chunks[0].first == 0
    assert chunks[-1].end is None
    assert all(chunk.end == following.first for chunk, following in itertools.pairwise(chunks))
    assert len(chunks) <= MOST_CHUNKS + 1


def test_a_small_table_is_one_chunk() -> None:
    assert len(plan_table(ORDERS, [leaf(LEAST_PAGES)], 4).chunks) == 1


def test_a_big_table_keeps_every_worker_busy() -> None:
    assert len(plan_table(ORDERS, [leaf(40_000)], 4).chunks) == 32


def test_a_partitioned_table_is_one_plan_over_its_leaves() -> None:
    plan = plan_table(ORDERS, [leaf(10, "orders_1"), leaf(10, "orders_2")], 2)
    assert [chunk.leaf.name.name for chunk in plan.chunks] == ["orders_1", "orders_2"]
    assert [chunk.number for chunk in plan.chunks] == [0, 1]


def test_a_leaf_that_cannot_be_cut_is_read_whole() -> None:
    assert [chunk.end for chunk in plan_table(ORDERS, [leaf(100_000, whole=True)], 4).chunks] == [None]


@given(done=st.sets(st.integers(0, 15)), rows=st.integers(0, 2**40))
def test_a_plan_is_the_same_after_being_marked_and_read(done: set[int], rows: int) -> None:
    plan = TablePlan(ORDERS, (leaf(40_000),), 2500, frozenset(done), rows)
    assert TablePlan.parse(ORDERS, plan.mark()) == plan
    assert {chunk.number for chunk in plan.remaining} == set(range(16)) - done


@pytest.mark.parametrize("done", [None, 3])
def test_every_advance_changes_the_mark(done: int | None) -> None:
    plan = plan_table(ORDERS, [leaf(40_000)], 2)
    assert plan.advanced(0 if done else 1, done).mark() != plan.mark()


def test_plans_are_found_by_their_marks_and_only_those() -> None:
    plan = plan_table(ORDERS, [leaf(5)], 2)
    other = TableId("public", "other")
    assert planned({mark_name(ORDERS): plan.mark(), "slot": "x"}, [ORDERS, other]) == {ORDERS: plan}


def test_the_largest_table_is_read_first_and_done_chunks_not_again() -> None:
    small = plan_table(TableId("public", "small"), [leaf(3, "small")], 1)
    large = TablePlan(ORDERS, (leaf(40_000),), 20_000).advanced(10, done=0)
    assert [(table.name, chunk.number) for table, chunk in largest_first([small, large])] == [
        ("orders", 1),
        ("small", 0),
    ]
