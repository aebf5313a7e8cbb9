"""Requests and jobs: what may be asked through the WAL, and that a mark brings a backfill back."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.config.settings import TableSettings
from cdc.key_range import KeyRange, Level
from cdc.model import TableId
from snapshots.backfill.jobs import Job, JobState, known, missing, own_id
from snapshots.backfill.requests import (
    ChunkMark,
    Ended,
    JobControl,
    RefusedRequest,
    Request,
    backfill_message,
    chunk_message,
    control_message,
    ended_message,
    parse_message,
)
from snapshots.initial.plan import Leaf, TablePlan, mark_name

KEY = b"k" * 32
ITEM = TableId("public", "items")
texts = st.text(max_size=8)
requests = st.builds(
    Request,
    st.just(ITEM),
    texts,
    st.none() | st.tuples(texts, texts),
    st.lists(st.lists(texts, min_size=1, max_size=2).map(tuple), max_size=3).map(tuple),
    st.booleans(),
    st.sampled_from([(), (KeyRange((Level(("id",), ("number",), ("1",), ("9",)),)).text(),)]),
)


@given(requests)
def test_a_signed_request_is_understood_as_it_was_meant(request: Request) -> None:
    assert parse_message(backfill_message(request, KEY).encode(), KEY) == request


@given(requests)
def test_a_request_needs_our_signature(request: Request) -> None:
    assert isinstance(parse_message(backfill_message(request, b"another").encode(), KEY), RefusedRequest)
    assert isinstance(parse_message(json.dumps({"backfill": request.facts()}).encode(), KEY), RefusedRequest)


@pytest.mark.parametrize("verb", ["pause", "resume", "cancel"])
def test_steering_needs_our_signature(verb: str) -> None:
    assert isinstance(parse_message(json.dumps({verb: "all"}).encode(), KEY), RefusedRequest)
    assert isinstance(parse_message(control_message(verb, "all", b"another").encode(), KEY), RefusedRequest)
    said = json.loads(control_message("pause", "1F", KEY))
    assert isinstance(
        parse_message(json.dumps({verb: "all", "signature": said["signature"]}).encode(), KEY), RefusedRequest
    )


def test_a_condition_put_into_a_signed_request_is_refused() -> None:
    said = json.loads(backfill_message(Request(ITEM, keys=(("1",),)), KEY))
    said["backfill"]["where"] = "true"
    assert isinstance(parse_message(json.dumps(said).encode(), KEY), RefusedRequest)


@given(
    st.binary(max_size=40)
    | st.recursive(st.none() | texts, lambda inner: st.dictionaries(texts, inner)).map(json.dumps).map(str.encode)
)
def test_no_message_does_harm(content: bytes) -> None:
    parse_message(content, KEY)


def test_every_message_of_ours_is_understood() -> None:
    assert parse_message(chunk_message(True, "t").encode(), KEY) == ChunkMark(True, "t")
    assert parse_message(chunk_message(False, "t").encode(), KEY) == ChunkMark(False, "t")
    assert parse_message(control_message("pause", "all", KEY).encode(), KEY) == JobControl("pause", "all")
    assert parse_message(ended_message("1", "t", "why").encode(), KEY) == Ended("1", "t", "why")


@given(
    requests,
    st.sampled_from([JobState.RUNNING, JobState.PAUSED, JobState.FAILED]),
    st.none() | st.lists(texts, max_size=2).map(tuple),
    st.integers(0),
    st.booleans(),
)
def test_a_job_is_the_same_after_being_marked_and_read(
    request: Request, state: JobState, place: tuple[str, ...] | None, rows: int, fresh: bool
) -> None:
    job = Job("1F", request, state, place, rows, "why", fresh)
    assert known(dict([job.mark(), ("snapshot", "{}")])) == {"1F": job}


def test_of_a_backfill_that_is_over_only_the_outcome_is_kept() -> None:
    job = Job("1F", Request(ITEM, "a = 1", keys=(("1",),) * 1000), JobState.DONE, ("7",), 12)
    assert known(dict([job.mark()])) == {"1F": Job("1F", Request(ITEM), JobState.DONE, None, 12, part=True)}


@pytest.mark.parametrize(
    ("verb", "before", "after"),
    [
        ("pause", JobState.RUNNING, JobState.PAUSED),
        ("resume", JobState.PAUSED, JobState.RUNNING),
        ("resume", JobState.FAILED, JobState.RUNNING),
        ("cancel", JobState.PAUSED, JobState.CANCELLED),
        ("pause", JobState.DONE, JobState.DONE),
        ("resume", JobState.CANCELLED, JobState.CANCELLED),
        ("cancel", JobState.DONE, JobState.DONE),
    ],
)
def test_steering_changes_only_what_can_be_changed(verb: str, before: JobState, after: JobState) -> None:
    assert Job("1", Request(ITEM), before).after_control(verb).state is after


def plan(done: bool) -> dict[str, str]:
    made = TablePlan(ITEM, (Leaf(ITEM, 1, 10),), 1024)
    return {mark_name(ITEM): (made.advanced(5, 0) if done else made).mark()}


@pytest.mark.parametrize(
    ("mode", "marks", "expected"),
    [
        ("initial", plan(done=True), None),
        ("initial", plan(done=False), False),
        ("initial", {}, True),
        ("incremental", {}, True),
        ("never", {}, None),
        ("never", plan(done=False), None),
    ],
    ids=["read", "cut short", "added", "incremental", "never", "given up"],
)
def test_tables_that_lack_their_first_snapshot_are_found(
    mode: str, marks: dict[str, str], expected: bool | None
) -> None:
    jobs = missing([TableSettings.model_validate({"name": ITEM, "snapshot": mode})], marks)
    assert [job.new_table for job in jobs] == ([] if expected is None else [expected])


def test_a_backfill_that_the_log_knows_is_not_begun_again() -> None:
    job = Job(own_id(ITEM), Request(ITEM), JobState.DONE)
    assert missing([TableSettings(name=ITEM, snapshot="incremental")], dict([job.mark()])) == []
