"""Segment names and their order: pure."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import LogCorrupt
from cdc.log.segments.segment_names import Chain, Segment, SequenceGap, after, chain, parse
from cdc.model import Lsn

_lsn = st.integers(0, 2**63 - 1).map(Lsn)


def segment(start: int, stop: int | None = None, generation: int = 0, expired: bool = False) -> Segment:
    last = start if stop is None else stop
    return Segment(start, last, generation, Lsn(start), Lsn(last), Lsn(last), 1, 1, False, expired)


@given(
    st.builds(
        lambda start, more, *rest: Segment(start, start + more, *rest),
        st.integers(1, 10**9),
        st.integers(0, 10**6),
        st.integers(0, 9999),
        _lsn,
        _lsn,
        _lsn,
        st.integers(0, 10**12),
        st.integers(0, 10**17),
        st.booleans(),
        st.booleans(),
    )
)
def test_a_name_says_everything_and_reads_back_the_same(one: Segment) -> None:
    assert parse(str(one)) == one
    assert "/" not in str(one)
    assert len(str(one)) <= 255


@pytest.mark.parametrize(
    "name", ["", "x.parquet", ".nfs0001", "part-000000.parquet", str(segment(1)) + ".tmp", str(segment(2, 1)), "\n"]
)
def test_a_foreign_name_is_no_segment(name: str) -> None:
    assert parse(name) is None


def test_names_sort_as_the_log_does() -> None:
    names = [str(segment(number)) for number in (1, 2, 9, 10, 99, 100, 10**9)]
    assert sorted(names) == names


def test_a_missing_sequence_number_is_an_error_and_never_skipped() -> None:
    with pytest.raises(SequenceGap, match="sequence numbers 2 to 3 are missing"):
        chain([segment(1), segment(4)])


def test_a_missing_beginning_is_an_error_too() -> None:
    with pytest.raises(SequenceGap, match="sequence numbers 1 to 1 are missing"):
        chain([segment(2), segment(3)])


def test_a_merged_segment_supersedes_its_parts() -> None:
    found = chain([segment(1), segment(2), segment(3), segment(1, 2, 1)])
    assert found.kept == (segment(1, 2, 1), segment(3))
    assert found.superseded == (segment(1), segment(2))


def test_the_higher_generation_of_the_same_range_counts() -> None:
    found = chain([segment(1, 4, 1), segment(1, 4, 2), segment(5)])
    assert found.kept == (segment(1, 4, 2), segment(5))


def test_overlapping_segments_are_refused() -> None:
    with pytest.raises(LogCorrupt, match="overlaps"):
        chain([segment(1, 3, 1), segment(3, 5, 1)])


def test_an_expired_beginning_keeps_the_position() -> None:
    found = chain([segment(1, 7, 1, expired=True)])
    assert (found.before, found.head, found.end) == (7, 7, 7)
    assert found.kept == ()
    assert chain([]) == Chain()


@given(st.integers(1, 50), st.integers(0, 60))
def test_after_gives_what_lies_beyond_a_sequence_number(count: int, sequence: int) -> None:
    kept = [segment(1 + 3 * index, 3 + 3 * index, 1) for index in range(count)]
    assert list(after(kept, sequence)) == [one for one in kept if one.stop > sequence]
