"""For any order of acknowledgements: never beyond an unacknowledged entry, never back, and complete in the end."""

from hypothesis import given
from hypothesis import strategies as st

from cdc.capture.replication.acknowledge import Acknowledgements
from cdc.model import Lsn


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=40).flatmap(
        lambda steps: st.tuples(st.just(steps), st.permutations(range(len(steps))), st.integers(0, len(steps)))
    )
)
def test_confirmed_is_the_end_of_the_unbroken_run(case: tuple[list[int], list[int], int]) -> None:
    steps, order, late = case
    ends, at = [], 100
    for step in steps:
        at += step
        ends.append(Lsn(at))
    acknowledged = Acknowledgements(Lsn(100))
    tickets = [acknowledged.expect(end) for end in ends[: len(ends) - late]]
    done: set[int] = set()
    before = acknowledged.confirmed
    for index in order:
        while index >= len(tickets):
            tickets.append(acknowledged.expect(ends[len(tickets)]))
        done.add(index)
        now = acknowledged.durable(tickets[index])
        run = next((place for place in range(len(tickets)) if place not in done), len(tickets))
        assert now == (ends[run - 1] if run else 100)
        assert now >= before
        assert all(now <= ends[place] for place in range(len(tickets)) if place not in done)
        before = now
    assert acknowledged.confirmed == ends[-1]
    assert not acknowledged.outstanding
