"""Whether streaming on from the log's end skips nothing: every way in which it would is an error with a remedy."""

from dataclasses import replace

import pytest

from cdc.capture.source.slot import ServerIdentity, SlotFacts, SourceIdentity, check
from cdc.errors import LogCorrupt, PositionMismatch, SlotLost, SourceRefused
from cdc.model import Lsn

STORED = SourceIdentity("millrace", "7001", 1, Lsn(100), Lsn(90))
SERVER = ServerIdentity("7001", 1, Lsn(1000))
SLOT = SlotFacts("millrace", "pgoutput", "shop", 0, Lsn(150), Lsn(200), "reserved", 0)


def test_a_slot_at_or_behind_the_log_is_well() -> None:
    check(STORED, SLOT, SERVER, Lsn(200))
    check(STORED, SLOT, SERVER, Lsn(900))


def test_a_slot_ahead_of_the_log_means_changes_that_nobody_has() -> None:
    with pytest.raises(PositionMismatch, match=r"recreated or moved by hand.*resync"):
        check(STORED, SLOT, SERVER, Lsn(199))


def test_a_missing_slot_names_the_position_from_which_changes_may_be_lost() -> None:
    with pytest.raises(SlotLost, match=r"0/C8.*resync"):
        check(STORED, None, SERVER, Lsn(200))


def test_an_invalidated_slot_is_told_from_a_lost_connection() -> None:
    with pytest.raises(SlotLost, match="invalidated"):
        check(STORED, replace(SLOT, wal_status="lost"), SERVER, Lsn(200))


def test_another_system_is_never_streamed_from() -> None:
    with pytest.raises(PositionMismatch, match="system 7002"):
        check(STORED, SLOT, replace(SERVER, system_id="7002"), Lsn(200))


def test_a_server_whose_wal_ends_before_the_log_was_restored_from_a_backup() -> None:
    with pytest.raises(PositionMismatch, match="restored from a backup"):
        check(STORED, SLOT, replace(SERVER, flushed=Lsn(199)), Lsn(200))


def test_another_timeline_is_refused_unless_the_slot_was_made_for_failover() -> None:
    with pytest.raises(PositionMismatch, match="timeline 2"):
        check(STORED, SLOT, replace(SERVER, timeline=2), Lsn(200))
    check(STORED, replace(SLOT, failover=True), replace(SERVER, timeline=2, forks={1: Lsn(200)}), Lsn(200))


def test_a_failover_slot_is_not_followed_where_the_log_has_what_the_new_timeline_lacks() -> None:
    slot, server = replace(SLOT, failover=True), replace(SERVER, timeline=3, forks={1: Lsn(250), 2: Lsn(400)})
    check(STORED, slot, server, Lsn(250))
    with pytest.raises(PositionMismatch, match=r"reaches 0/FB on timeline 1.*left that timeline at 0/FA.*resync"):
        check(STORED, slot, server, Lsn(251))
    check(replace(STORED, timeline=2), slot, server, Lsn(400))
    with pytest.raises(PositionMismatch, match="does not descend from timeline 4"):
        check(replace(STORED, timeline=4), slot, server, Lsn(200))


def test_a_slot_of_another_plugin_is_refused() -> None:
    with pytest.raises(SourceRefused, match="test_decoding"):
        check(STORED, replace(SLOT, plugin="test_decoding"), SERVER, Lsn(200))


def test_the_mark_survives_the_log() -> None:
    assert SourceIdentity.of_mark(STORED.mark()) == STORED


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"slot": 1, "more": 2}'])
def test_a_mark_that_is_none_is_corrupt(text: str) -> None:
    with pytest.raises(LogCorrupt):
        SourceIdentity.of_mark(text)
