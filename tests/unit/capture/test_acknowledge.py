"""Confirming only the unbroken durable run."""

import pytest

from cdc.capture.replication.acknowledge import Acknowledgements
from cdc.model import Lsn


def test_the_newest_acknowledgement_says_nothing_about_those_before_it() -> None:
    acknowledged = Acknowledgements(Lsn(10))
    first, second = acknowledged.expect(Lsn(20)), acknowledged.expect(Lsn(30))
    assert acknowledged.durable(second) == 10
    assert acknowledged.durable(first) == 30


def test_saying_it_twice_changes_nothing() -> None:
    acknowledged = Acknowledgements()
    first, second = acknowledged.expect(Lsn(20)), acknowledged.expect(Lsn(30))
    acknowledged.durable(first)
    assert acknowledged.durable(first) == 20
    assert acknowledged.outstanding == 1
    assert acknowledged.durable(second) == 30


def test_an_entry_cannot_end_before_the_one_ahead_of_it() -> None:
    acknowledged = Acknowledgements(Lsn(10))
    with pytest.raises(ValueError, match="cannot follow"):
        acknowledged.expect(Lsn(9))


def test_a_ticket_that_was_never_given_is_refused() -> None:
    acknowledged = Acknowledgements()
    ticket = acknowledged.expect(Lsn(1))
    acknowledged.durable(ticket)
    with pytest.raises(ValueError, match="never issued"):
        acknowledged.durable(type(ticket)(ticket + 1))
