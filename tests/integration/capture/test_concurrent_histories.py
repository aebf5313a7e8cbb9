"""Histories of many sessions on a real server end equal in every store, wherever the batches are cut."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import cdc.log
from cdc.config.settings import Settings, SinkSettings
from cdc.ports import LogReader
from cdc.service.apply.driver import applier_of
from sinks import registry
from sinks.apply.applier import Applier
from sinks.context import SinkContext
from sinks.fold.arrow import ranked
from sinks.fold.folded import gather
from snapshots.verify.comparison import verify_table
from tests.fix_capture import Rig
from tests.fix_processes import wait_until
from tests.fix_servers import LocalServer
from tests.scenes.concurrent_sessions import SCHEMA, at_work
from tests.scenes.seeds import seeds

SESSIONS = 8
BATCHES = {"redis": 150, "delta": 25, "opensearch": 10}
"""How many batches each store gets the history in: a commit to a lake costs more than one to a cache."""


@pytest.fixture
def pipeline_settings(
    rig: Rig,
    settings_of: Callable[..., Settings],
    redis_url: str,
    opensearch_server: LocalServer,
    index_prefix: str,
    tmp_path: Path,
) -> Callable[[], Settings]:
    """The rig's settings with all three stores."""
    sinks = [
        {"kind": "delta", "path": str(tmp_path / "lake")},
        {"kind": "opensearch", "url": opensearch_server.url, "prefix": index_prefix, "replicas": 0},
        {"kind": "redis", "url": redis_url},
    ]
    return lambda: settings_of(source=rig.source, sinks=sinks)


def _captured(rig: Rig, seed: int, transactions: int) -> int:
    """Bring a history into the log, from a snapshot in the middle of it on, by readers that come and go."""
    rng = random.Random(seed)
    rig.capture_tables(*SCHEMA, snapshot="initial")
    if seed % 2:  # streamed while they are open
        database = rig.database.name
        rig.database.execute(f"alter role postgres in database {database} set logical_decoding_work_mem = '64kB'")
    with at_work(rig.database, seed, SESSIONS, transactions // SESSIONS) as work:
        wait_until(lambda: work.committed > transactions // 20, 60, "the first transactions")
        rig.begin()
        work.allow_truncates()
        while not work.ended:
            wanted = work.committed + rng.randint(transactions // 8, transactions // 2)
            with rig.following():
                wait_until(lambda: work.ended or work.committed >= wanted, 120, "more transactions")  # noqa: B023
        work.finish(60)
    with rig.following() as following:
        following.reaches(rig.now())
    assert work.refused, "sessions that never meet prove nothing"
    return work.committed


def _rows(log: LogReader) -> pa.Table:
    return pa.concat_tables([part.rows for part in log.read(log.start())])


def _cut(rows: pa.Table, count: int, rng: random.Random) -> Iterator[pa.Table]:
    """About so many batches of whole transactions."""
    ends = (np.flatnonzero(np.diff(rows["commit_lsn"].to_numpy())) + 1).tolist()
    start = 0
    for end in [*sorted(rng.sample(ends, min(count, len(ends)))), rows.num_rows]:
        yield rows.slice(start, end - start)
        start = end


def _apply(applier: Applier, log: LogReader, rows: pa.Table, seed: int) -> None:
    """All batches in their order; one of those before is repeated now and then."""
    rng = random.Random(f"{seed}-{applier.name}")
    folded = [gather(ranked(part), log.schemas) for part in _cut(rows, BATCHES[applier.name], rng)]
    for number, batch in enumerate(folded):
        applier.apply(batch)
        if rng.random() < 0.1:
            applier.apply(folded[rng.randrange(number + 1)])
    assert applier.status.dead_letters == 0


def _differences(settings: Settings, sink: SinkSettings) -> list[dict[str, object]]:
    with closing(registry.open_sink(sink, SinkContext(settings.state))) as store:
        found = [verify_table(settings.source, table, store) for table in settings.source.tables]
    return [each.facts() for each in found if not each.equal]


def _told(rows: pa.Table, differences: list[dict[str, object]]) -> str:
    """What the log says of the first key that differs."""
    table = str(differences[0]["table"])
    examples = json.loads(json.dumps(differences[0]["examples"]))
    key = next(keys[0] for keys in examples.values() if keys)
    kept = ["op", "key", "version", "commit_lsn", "ordinal", "xid", "unchanged"]
    of_table = [row for row in rows.to_pylist() if row["table"] == table and row["key"] in (key, None)]
    return "\n".join(str({name: row[name] for name in kept}) for row in of_table[-20:])


def _assert_every_store_ends_equal(rig: Rig, settings: Settings, seed: int) -> None:
    log = cdc.log.open_reader(settings)
    rows, context, stop = _rows(log), SinkContext(settings.state), threading.Event()
    _assert_versions_follow_the_log(rows)
    assert _ties(rows), "no transaction was overtaken by another"
    appliers = [applier_of(settings, sink, log, context, stop) for sink in settings.sinks]
    with ThreadPoolExecutor(len(appliers)) as pool:
        for done in [pool.submit(_apply, applier, log, rows, seed) for applier in appliers]:
            done.result()
    for applier in appliers:
        applier.finish(30)
    found = [each for sink in settings.sinks for each in _differences(settings, sink)]
    if found:
        again = f"pytest -m '' 'tests/integration/capture/test_concurrent_histories.py::…[{seed}]'"
        raise AssertionError(
            f"seed {seed} (rerun: {again}; the log of this run: {rig.state}): {found}\n{_told(rows, found)}"
        )


def _assert_versions_follow_the_log(rows: pa.Table) -> None:
    """Of every key, each transaction's changes have greater versions than those of all before: the end alone would
    show only the last change of each key."""
    newest: dict[tuple[str, str], tuple[int, int]] = {}
    truncated: dict[str, int] = {}
    streamed = [row for row in rows.drop_columns(["after", "before"]).to_pylist() if row["xid"]]
    for row in streamed:
        table, own = row["table"], (row["version"], row["commit_lsn"])
        version, commit = newest.get((table, row["key"]), (0, 0))
        assert version < own[0] or (version == own[0] and commit == own[1]), row
        assert truncated.get(table, 0) <= own[0], row
        newest[table, row["key"]] = own
        if row["op"] == "t":
            assert all(held <= own for (of, _), held in newest.items() if of == table), row
            truncated[table] = own[0]


def _ties(rows: pa.Table) -> int:
    """Changes with the version of the change before them: their transaction was overtaken by another's commit."""
    same = [np.diff(rows[name].to_numpy()) == 0 for name in ("version", "commit_lsn")]
    return int((same[0] & same[1] & (rows["xid"].to_numpy()[1:] > 0)).sum())


QUICK = 2


@pytest.mark.parametrize("seed", seeds(QUICK, 40))
def test_a_history_of_many_sessions_ends_equal_in_every_store(
    rig: Rig, pipeline_settings: Callable[[], Settings], seed: int
) -> None:
    """INSERT, COPY, upserts, MERGE, key changes, DELETE, TRUNCATE, savepoints, deferrable keys, waits, deadlocks."""
    wanted = 3000 if seed < QUICK else 12_000
    assert _captured(rig, seed, wanted) > wanted / 3
    rig.assert_once_in_order()
    _assert_every_store_ends_equal(rig, pipeline_settings(), seed)


def test_a_row_whose_copy_waited_while_another_session_deleted_its_key_is_not_lost(rig: Rig) -> None:
    """COPY writes all its rows before it looks for other rows with their keys."""
    rig.capture_tables("create table t (id int primary key, v text)", "insert into t values (1, 'a'), (2, 'b')")
    _overtaken(rig, "delete from t where id = 1", "copy t from stdin", "1\tnew\n2\tnew\n", "delete from t where id = 2")


def test_an_insert_that_waited_at_another_unique_index_is_not_lost(rig: Rig) -> None:
    """The row is written, the index of `e` is looked at, and then that of the key, by which rows are told apart."""
    rig.capture_tables(
        "create table t (id int not null, e text)",
        "create unique index on t (e)",
        "alter table t add primary key (id)",
        "insert into t values (1, 'a'), (2, 'b')",
    )
    _overtaken(rig, "delete from t where id = 1", "insert into t values (2, 'a')", "", "delete from t where id = 2")


def _overtaken(rig: Rig, first: str, waiting: str, sent: str, meanwhile: str) -> None:
    """One session makes another wait, and a third overtakes that one: the second session's rows are there, and stay."""
    rig.begin()
    with rig.following() as following, rig.database.connect(autocommit=False) as holder:
        holder.execute(first.encode())
        writer = threading.Thread(target=_run, args=(rig, waiting, sent), daemon=True)
        writer.start()
        wait_until(lambda: rig.ask(WAITS, waiting), 30, "the writer to wait")
        rig.database.execute(meanwhile)
        holder.commit()
        writer.join(30)
        following.reaches(rig.now())
    assert rig.ask("select count(*) from t where id = 2") == 1
    rig.assert_equal()
    changes = [row for row in rig.rows("public.t") if row["key"] == '{"id":2}']
    assert [row["op"] for row in changes] == ["d", "c"]
    assert changes[0]["version"] < changes[1]["version"]


WAITS = "select exists (select from pg_stat_activity where wait_event_type = 'Lock' and query = %s)"


def _run(rig: Rig, statement: str, sent: str) -> None:
    with rig.database.connect() as connection:
        if not sent:
            connection.execute(statement.encode())
            return
        with connection.cursor().copy(statement.encode()) as copy:
            copy.write(sent)
