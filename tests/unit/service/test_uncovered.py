"""What a position does not cover is said with it, and a table that waits keeps it from being reached."""

from typing import Any

import pytest

from cdc.model import Lsn
from cdc.service.observe.health import reasons
from cdc.service.observe.uncovered import Excepted, PipelineProgress, Scope
from cdc.service.state.sink_positions import SinkPosition
from tests.unit.service.test_supervision import NOW

WANTED = Lsn(500)
ORDERS, USERS = "public.orders", "public.users"
SAID = {"message": "a column has another type", "remedy": "change it back"}


def progress(
    held: dict[str, Lsn] | None = None, *, capture: Any = None, sink: Any = None, letters: Any = None
) -> PipelineProgress:
    positions = {
        "lake": SinkPosition(Lsn(500), held or {}, frozenset({ORDERS, USERS})),
        "cache": SinkPosition(Lsn(500)),
    }
    return PipelineProgress(
        capture or {}, {"sinks": {"lake": sink or {}}}, positions, Lsn(500), Lsn(600), letters or {}
    )


def scope(*tables: str, except_waiting: bool = False, sinks: tuple[str, ...] = ("lake", "cache")) -> Scope:
    return Scope(sinks, frozenset(tables), except_waiting)


def kinds(found: list[Excepted]) -> list[tuple[str, str, str]]:
    return [(item.kind, item.sink, item.table) for item in found]


def test_a_waiting_table_keeps_its_sink_from_reaching_anything_until_it_is_left_out_or_not_asked_for() -> None:
    waits = progress({ORDERS: Lsn(400)}, sink={"tables_waiting": {ORDERS: SAID}})
    assert waits.behind(WANTED, scope()) == ["lake"]
    assert waits.behind(WANTED, scope(ORDERS)) == ["lake"]
    assert waits.behind(WANTED, scope(USERS)) == []
    assert waits.behind(WANTED, scope(except_waiting=True)) == []
    assert waits.behind(Lsn(400), scope()) == [], "what came before is there"
    (said,) = waits.excepted(scope())
    assert (said.kind, said.sink, said.table) == ("waiting", "lake", ORDERS)
    assert "another type" in said.message
    assert said.remedy == "change it back"
    assert waits.excepted(scope(USERS)) == []


def test_a_held_table_is_named_also_while_nobody_says_why() -> None:
    assert kinds(progress({ORDERS: Lsn(400)}).excepted(scope())) == [("waiting", "lake", ORDERS)]


def test_a_table_that_capture_does_not_follow_concerns_every_sink_that_is_given_it() -> None:
    waits = progress(capture={"tables_waiting": {"public.third": SAID}})
    assert waits.behind(WANTED, scope()) == ["cache"], "the lake is not given it"
    waits = progress(capture={"tables_waiting": {ORDERS: SAID}})
    assert waits.behind(WANTED, scope()) == ["lake", "cache"]
    assert waits.behind(WANTED, scope(USERS)) == waits.behind(WANTED, scope(except_waiting=True)) == []
    assert kinds(waits.excepted(scope())) == [("waiting", "", ORDERS)]


def test_dead_letters_and_skipped_tables_are_said_and_not_waited_for() -> None:
    lacks = progress(sink={"tables_skipped": [USERS]}, letters={"lake": {ORDERS: 3, USERS: 1}})
    assert lacks.behind(WANTED, scope()) == []
    found = lacks.excepted(scope())
    assert kinds(found) == [
        ("skipped", "lake", USERS),
        ("dead letters", "lake", ORDERS),
        ("dead letters", "lake", USERS),
    ]
    assert [(item.message, item.count) for item in found[1:]] == [
        ("3 dead letters of public.orders", 3),
        ("1 dead letter of public.users", 1),
    ]
    assert lacks.excepted(scope(sinks=("cache",))) == []


def job(identity: str, state: str, table: str = ORDERS, whole: bool = True) -> dict[str, object]:
    return {"id": identity, "table": table, "state": state, "whole": whole, "reason": "the disk was full"}


@pytest.mark.parametrize(
    ("jobs", "said"),
    [
        ([job("table:public.orders", "running")], True),
        ([job("table:public.orders", "cancelled")], True),
        ([job("table:public.orders", "failed")], True),
        ([job("1A", "failed", whole=False)], True),
        ([job("1A", "running"), job("1B", "cancelled"), job("1C", "done")], False),
        ([job("table:public.orders", "cancelled"), job("1A", "done")], False),
        ([job("table:public.orders", "cancelled"), job("1A", "done", whole=False)], True),
        ([job("table:public.orders", "cancelled"), job("1A", "done", USERS)], True),
    ],
)
def test_rows_that_were_not_read_are_said(jobs: list[dict[str, object]], said: bool) -> None:
    found = progress(capture={"backfills": jobs}).excepted(scope())
    assert kinds(found) == ([("backfill", "", ORDERS)] if said else [])


def test_an_unfinished_first_snapshot_a_gap_a_loss_and_a_refill_are_said() -> None:
    sink = {"gap": {"tables": [ORDERS], **SAID}, "losses": {ORDERS: SAID}, "tables_refilling": {USERS: SAID}}
    found = progress(capture={"history_exact_from": ""}, sink=sink).excepted(scope())
    assert kinds(found) == [
        ("first snapshot", "", ""),
        ("refilling", "lake", USERS),
        ("lost", "lake", ORDERS),
        ("gap", "lake", ORDERS),
    ]


def test_health_names_table_sink_reason_and_remedy() -> None:
    at = {"at": NOW.isoformat()}
    capture = {
        **at,
        "state": "streaming",
        "tables_waiting": {USERS: {"message": "renamed", "remedy": "rename it back"}},
        "backfills": [job("table:public.orders", "failed")],
    }
    sink = {"state": "running", "tables_waiting": {ORDERS: SAID}, "tables_refilling": {USERS: SAID}}
    found = reasons(capture, {**at, "state": "running", "sinks": {"lake": sink}}, ("lake",), NOW)
    assert [(reason.part, reason.message, reason.remedy) for reason in found] == [
        ("capture", "table public.users waits: renamed.", "rename it back"),
        (
            "capture",
            "has not read all rows of public.orders: the disk was full.",
            "Resume it: millrace backfill --resume table:public.orders",
        ),
        ("sink lake", "table public.orders waits: a column has another type.", "change it back"),
        ("sink lake", "a column has another type.", "change it back"),
    ]
