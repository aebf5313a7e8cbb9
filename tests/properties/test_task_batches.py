"""Batches applied by several tasks end as the source ended: whatever the number of tasks, also if tasks run twice, late
or for a batch that is long applied."""

import random
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import cdc.log
from cdc.config.settings import Settings
from cdc.errors import TableRefused
from cdc.model import Lsn, TableId, TableSchema
from cdc.ports import Share
from sinks.context import SinkContext
from sinks.registry import open_sink
from sinks.tasks.unit_of_work import Assignment, run
from tests.fix_log import FilledLog
from tests.scenes.histories import (
    INTEGERS,
    ODD_TEXTS,
    TEXT,
    History,
    Row,
    change,
    cut,
    images,
    log_table,
    state_of,
    table,
)
from tests.scenes.shaping import SHAPE
from tests.scenes.task_jobs import LocalTaskJob, task_applier

TABLES = {"items": INTEGERS, "odd_texts": ODD_TEXTS}


@pytest.fixture(params=["memory", "delta"])
def settings(request: pytest.FixtureRequest, settings_of: Callable[..., Settings], tmp_path: Path) -> Settings:
    """Tasks write to the one, and stage files for the driver's commit in the other."""
    if request.param == "memory":
        return settings_of(sinks=[{"kind": "memory", "name": f"memory-{uuid.uuid4().hex[:8]}"}])
    as_text = {f"public.{name}": ["at"] for name in TABLES}  # the histories have infinity and BC
    return settings_of(sinks=[{"kind": "delta", "path": str(tmp_path / "lake"), "as_text": as_text}])


@pytest.fixture
def log(settings: Settings) -> FilledLog:
    return FilledLog(settings, cdc.log.open_writer(settings))


def assert_stored(settings: Settings, schema: TableSchema, state: dict[str, str]) -> None:
    """The store has these rows and no other."""
    sink = open_sink(settings.sinks[0], SinkContext(settings.state))
    assert sink.stored(schema).to_pylist() == sink.expected(schema, images(state)).to_pylist()


def items(key: int, op: str, version: int, ordinal: int) -> Row:
    after = None if op in "dt" else f'{{"id":{key},"label":"{version}"}}'
    text = None if op == "t" else f'{{"id":{key}}}'
    return {**change(op, text, version, after, ordinal=ordinal), "commit_lsn": 200}


@pytest.mark.parametrize("seed", range(3))
def test_any_number_of_tasks_repeated_and_late_ones_too_end_as_the_source_did(
    seed: int, settings: Settings, log: FilledLog, tmp_path: Path
) -> None:
    rng = random.Random(seed)
    histories = [History(table(), INTEGERS, rng), History(table("odd_texts", [("id", TEXT)]), ODD_TEXTS, rng)]
    for history in histories:
        log.record(history.schema)
        history.write(100)
    rows = sorted((row for history in histories for row in history.rows), key=lambda row: row["version"])
    entries = list(cut(rows, rng))
    for entry in entries:
        log.append(entry)
    past: list[tuple[Assignment, Share]] = []

    def zombies(assignment: Assignment, shares: Sequence[Share]) -> None:
        past.extend((assignment, share) for share in shares)
        for late in rng.sample(past, min(3, len(past))):
            run(*late)

    applier = task_applier(settings, settings.sinks[0].name, log.reader, tmp_path / "letters")
    after = staged = 0
    while after < len(entries):
        until = min(len(entries), after + rng.randint(1, 4))
        job = LocalTaskJob(log.reader, after, until, rng.choice([1, 2, 3, 8]), zombies)
        applier.apply_by_tasks(job)
        after, staged = until, staged + job.staged
    assert bool(staged) == (settings.sinks[0].kind == "delta")
    for history in histories:
        assert_stored(settings, history.schema, history.state())
    assert applier.status.reached == log.reader.head()[1]
    assert applier.status.dead_letters == 0


@pytest.mark.parametrize("seed", range(3))
def test_shaped_tables_end_as_the_shaped_rows_of_the_source(
    seed: int, settings: Settings, log: FilledLog, tmp_path: Path
) -> None:
    """Tasks shape their shares; rows that lack a value of the filter are read from the source by the driver."""
    shape = {table().table: SHAPE}
    settings = settings.model_copy(update={"sinks": (settings.sinks[0].model_copy(update={"shape": shape}),)})
    rng = random.Random(seed)
    history = History(table(), INTEGERS, rng).write(100)
    log.record(history.schema)
    entries = list(cut(history.rows, rng))
    for entry in entries:
        log.append(entry)
    source = history.state()
    applier = task_applier(settings, settings.sinks[0].name, log.reader, tmp_path / "letters", source)
    after = 0
    while after < len(entries):
        until = min(len(entries), after + rng.randint(1, 4))
        applier.apply_by_tasks(LocalTaskJob(log.reader, after, until, rng.choice([1, 2, 3, 8])))
        after = until
    assert_stored(settings, history.schema, source)
    assert applier.status.dead_letters == 0
    assert applier.status.reached == log.reader.head()[1]


@pytest.mark.parametrize("shares", [1, 2, 8])
def test_rows_written_before_a_truncate_of_their_own_transaction_and_version_are_removed(
    shares: int, settings: Settings, log: FilledLog, tmp_path: Path
) -> None:
    """All changes of a transaction that was overtaken by another commit have one version."""
    log.record(table())
    log.append([items(key, "c", 50, key) for key in range(20)])
    before = [items(key, "c", 100, key) for key in range(20, 40)]
    after = [items(key, "c", 100, 100 + key) for key in range(30, 50)]
    log.append([*before, items(0, "t", 100, 90), *after])
    applier = task_applier(settings, settings.sinks[0].name, log.reader, tmp_path / "letters")
    applier.apply_by_tasks(LocalTaskJob(log.reader, 0, 2, shares))
    assert_stored(settings, table(), state_of(after))
    again = items(20, "c", 300, 0)
    log.append([again])
    applier.apply_by_tasks(LocalTaskJob(log.reader, 2, 3, shares))
    assert_stored(settings, table(), state_of([*after, again]))


@pytest.mark.parametrize("shares", [1, 3])
def test_changes_of_a_key_at_both_ends_of_a_large_transaction_with_one_version_are_applied_in_their_order(
    shares: int, settings: Settings, log: FilledLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece of a share that ended between them would have the store ignore the second."""
    monkeypatch.setattr("sinks.tasks.unit_of_work._PIECE_BYTES", 2_000)
    monkeypatch.setattr("cdc.log.segments.spool._PART_BYTES", 1)  # many tables in one transaction
    log.record(table())
    rows = [items(key, "c", 100, key) for key in range(60)]
    rows += [items(key, "d" if key % 3 == 0 else "u", 100, 60 + key) for key in range(40)]
    for row in rows[60:]:
        row["after"] = row["after"] and row["after"].replace('"100"', '"later"')
    spool = log.writer.spool()
    for row in rows:
        spool.write(log_table([row]))
    spool.publish(Lsn(201))
    applier = task_applier(settings, settings.sinks[0].name, log.reader, tmp_path / "letters")
    applier.apply_by_tasks(LocalTaskJob(log.reader, 0, 1, shares))
    assert_stored(settings, table(), {key: after for key, after in state_of(rows).items() if after})


def test_a_partial_row_whose_stored_row_is_missing_becomes_a_dead_letter_and_its_next_change_ends_it(
    settings: Settings, log: FilledLog, tmp_path: Path
) -> None:
    log.record(table())
    partial: dict[str, Any] = change("u", '{"id":1}', 10, '{"id":1,"label":"x"}', ["big"])
    log.append([partial, change("c", '{"id":2}', 11, '{"id":2,"label":"y"}')])
    applier = task_applier(settings, settings.sinks[0].name, log.reader, tmp_path / "letters")
    applier.apply_by_tasks(LocalTaskJob(log.reader, 0, 1, 2))
    assert_stored(settings, table(), {'{"id":2}': '{"id":2,"label":"y"}'})
    assert applier.status.dead_letters == 1
    log.append([change("u", '{"id":1}', 20, '{"id":1,"label":"z","big":"b"}')])
    job = LocalTaskJob(log.reader, 1, 2, 2)
    applier.apply_by_tasks(job)
    assert job.runs[0].dead_letters == {"public.items": ['{"id":1}']}
    state = {'{"id":1}': '{"id":1,"label":"z","big":"b"}', '{"id":2}': '{"id":2,"label":"y"}'}
    assert_stored(settings, table(), state)
    assert applier.status.dead_letters == 0


def test_tables_that_are_held_back_or_not_the_sinks_are_left_alone(
    settings: Settings, log: FilledLog, tmp_path: Path
) -> None:
    log.record(table())
    log.record(table("odd_texts", [("id", TEXT)]))
    log.append(
        [
            change("c", '{"id":1}', 10, '{"id":1}'),
            change("c", '{"id":"a"}', 11, '{"id":"a"}', table="public.odd_texts"),
        ]
    )
    applier = task_applier(settings, settings.sinks[0].name, log.reader, tmp_path / "letters")
    applier.held_back = frozenset({table().table})
    applier.apply_by_tasks(LocalTaskJob(log.reader, 0, 1, 3))
    assert_stored(settings, table(), {})
    assert_stored(settings, table("odd_texts", [("id", TEXT)]), {'{"id":"a"}': '{"id":"a"}'})


def test_a_table_whose_staged_commit_is_refused_waits_and_the_others_are_committed(
    settings_of: Callable[..., Settings], filled_log: FilledLog, tmp_path: Path
) -> None:
    settings = settings_of(sinks=[{"kind": "delta", "name": "lake", "path": str(tmp_path / "lake")}])
    filled_log.record(table())
    filled_log.record(table("odd_texts", [("id", TEXT)]))
    other = change("c", '{"id":"a"}', 11, '{"id":"a"}', table="public.odd_texts")
    filled_log.append([change("c", '{"id":1}', 10, '{"id":1}'), other])

    def damage(_assignment: Assignment, _shares: Sequence[Share]) -> None:
        """After the tasks: a commit of another program that nobody can read."""
        log = tmp_path / "lake" / "public.items" / "_delta_log"
        (log / f"{len(list(log.glob('*.json'))):020}.json").write_text("nonsense")

    applier = task_applier(settings, "lake", filled_log.reader, tmp_path / "letters")

    def hold_back(refused: TableId, _error: TableRefused) -> None:
        applier.held_back |= {refused}

    applier.refuse = hold_back
    job = LocalTaskJob(filled_log.reader, 0, 1, 1, damage)
    applier.apply_by_tasks(job)
    assert (job.staged, len(job.runs)) == (2, 1)
    assert applier.held_back == {table().table}
    assert_stored(settings, table("odd_texts", [("id", TEXT)]), state_of([other]))
    assert applier.status.reached == filled_log.reader.head()[1]
