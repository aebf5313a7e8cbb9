"""Stores that change behind our back: what was lost is detected, held back, and refilled."""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from deltalake import DeltaTable

from cdc.config.settings import Settings
from cdc.model import TableId
from cdc.ports import Sink
from cdc.service.apply import lost_tables
from cdc.service.apply.held_back_tables import TableRequests
from cdc.service.observe.health import reasons
from cdc.service.observe.positions import Positions
from cdc.service.observe.uncovered import PipelineProgress, Scope
from cdc.service.state import status
from cdc.service.state.store_files import StoredMark, StoreFiles
from sinks import memory, registry
from sinks.context import SinkContext
from tests.fix_log import FilledLog
from tests.fix_processes import wait_until
from tests.fix_servers import LocalServer, MakeRedis, opensearch_request
from tests.scenes.losses import ITEMS, OTHERS, LossScene

Make = Callable[..., LossScene]


@pytest.fixture
def make(
    settings_of: Callable[..., Settings], filled_log: FilledLog, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Make]:
    """Makes a scene with one sink. `moving` is asked for the url at every connect, as a name server is."""
    monkeypatch.setattr(lost_tables, "LOOK_SECONDS", 0.0)

    def scene(moving: Callable[[], str] | None = None, **sink: Any) -> LossScene:
        tables = ["public.items", "public.others"]
        settings = settings_of(source={"tables": tables}, sinks=[{"retry": {"first_seconds": 0.01}, **sink}])
        context = SinkContext(settings.state)

        def opened() -> Sink:
            moved = {} if moving is None else {"url": moving()}
            return registry.open_sink(settings.sinks[0].model_copy(update=moved), context)

        return LossScene(filled_log, settings, opened)

    yield scene
    memory._STORES.clear()


# -- what every loss means, whatever the store


def test_a_lost_table_is_held_by_name_while_the_other_goes_on_and_no_position_counts(make: Make) -> None:
    scene = make(kind="memory")
    scene.both("one")
    assert scene.counts()
    del memory._STORES["memory"]["public.items"]
    scene.both("two")
    assert scene.said() == {"public.items": "is not what was written"}
    assert "millrace refill memory" in scene.losses.facts()["public.items"]["remedy"]
    assert (scene.labels(), scene.labels(OTHERS)) == ([], ["two"])
    assert scene.counts(OTHERS) and not scene.counts()
    scene.attend()
    assert scene.asked == [], "nobody asked for a refill"


def test_the_marks_of_new_tables_are_written_once_however_many_there_are(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[set[str]] = []
    write = StoreFiles.write_marks

    def counted(files: StoreFiles, marks: Mapping[TableId, StoredMark]) -> None:
        written.append(set(map(str, marks)))
        write(files, marks)

    monkeypatch.setattr(StoreFiles, "write_marks", counted)
    scene = make(kind="memory")
    assert written == [{"public.items", "public.others"}]
    scene.start()
    assert len(written) == 1


def test_health_names_the_lost_tables_in_one_sentence_with_the_remedy(make: Make) -> None:
    scene = make(kind="memory")
    scene.both("one")
    memory._STORES["memory"].clear()
    scene.attend()
    now = datetime.now(UTC)
    sink = {"state": "running", "losses": scene.losses.facts()}
    apply = {"state": "running", "at": now.isoformat(), "sinks": {"memory": sink}}
    (reason,) = reasons({"state": "streaming", "at": now.isoformat()}, apply, ("memory",), now)
    assert reason.message == "public.items, public.others: is not what was written."
    assert "millrace refill memory" in reason.remedy
    positions = Positions(scene.settings, scene.log.reader).by_sink()
    lacking = PipelineProgress({}, apply, positions).excepted(Scope(("memory",)))
    assert [(item.kind, item.table) for item in lacking] == [("lost", "public.items"), ("lost", "public.others")]


def test_what_is_lost_of_a_table_that_was_skipped_is_nobodys_concern(make: Make) -> None:
    scene = make(kind="memory")
    scene.both("one")
    del memory._STORES["memory"]["public.items"]
    scene.attend()
    scene.losses.follow(TableRequests(skipped=frozenset({ITEMS.table})))
    scene.attend()
    assert scene.said() == {}


def test_a_table_that_is_as_it_was_goes_on_with_what_it_missed(make: Make) -> None:
    scene = make(kind="memory")
    scene.both("one")
    taken = memory._STORES["memory"].pop("public.items")
    scene.both("two")
    memory._STORES["memory"]["public.items"] = taken
    scene.attend()
    assert (scene.said(), scene.labels(), scene.counts()) == ({}, ["two"], True)


def test_changes_that_went_into_the_wrong_place_before_it_was_noticed_are_applied_again(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = make(kind="memory")
    scene.both("one")
    scene.attend()
    monkeypatch.setattr(lost_tables, "LOOK_SECONDS", 3600.0)
    scene.applier.check_losses()
    taken = memory._STORES["memory"].pop("public.items")
    scene.both("two")  # into an empty table
    monkeypatch.setattr(lost_tables, "LOOK_SECONDS", 0.0)
    scene.losses.connected()
    scene.attend()
    assert scene.said()
    memory._STORES["memory"]["public.items"] = taken
    scene.attend()
    assert scene.labels() == ["two"]


def test_on_request_a_lost_table_is_filled_again_and_counts(make: Make) -> None:
    scene = make(kind="memory")
    scene.both("one", "two", "three")
    scene.delete(1)
    del memory._STORES["memory"]["public.items"]
    scene.attend()
    scene.files.request_refill([ITEMS.table])
    scene.attend()
    assert "backfill" in scene.said()["public.items"] and not scene.counts()
    scene.both("newer")
    scene.refilled()
    assert scene.equal() and scene.counts()
    scene.start()
    assert not scene.said()


def test_a_loss_and_its_refill_outlive_the_process_at_every_step(make: Make) -> None:
    scene = make(kind="memory", on_loss="refill")
    scene.both("one", "two")
    scene.attend()
    del memory._STORES["memory"]["public.items"]
    scene.start()
    assert scene.said() and not scene.counts()
    scene.start()
    scene.both("three")
    scene.attend()
    scene.start()
    assert scene.said() and not scene.counts()
    scene.refilled()
    assert scene.equal() and scene.counts()


def test_a_loss_during_a_refill_begins_it_again(make: Make) -> None:
    scene = make(kind="memory", on_loss="refill")
    scene.both("one", "two")
    scene.attend()
    for _ in range(2):
        del memory._STORES["memory"]["public.items"]
        scene.attend()
        scene.attend()
    assert len(scene.asked) == 2
    scene.asked.pop()
    scene.refilled()
    assert scene.equal() and scene.counts()


def test_a_lost_table_of_a_view_is_filled_again_by_the_view(make: Make) -> None:
    scene = make(kind="memory", on_loss="refill")
    scene.requests = TableRequests(views=frozenset({ITEMS.table}))
    scene.start()
    scene.both("one", "two", "three")
    scene.delete(1)
    del memory._STORES["memory"]["public.items"]
    scene.attend()
    assert "the view hands them over again" in scene.said()["public.items"] and not scene.counts()
    scene.start()
    scene.attend()
    scene.emit_again(ITEMS.table)
    scene.refilled()
    assert scene.asked == []
    assert scene.equal() and scene.counts()


def test_a_skipped_table_of_a_view_is_filled_again_by_the_view_also_with_rows_of_before(make: Make) -> None:
    """They keep their versions, which are older than the moment of the skip."""
    scene = make(kind="memory")
    view = TableRequests(views=frozenset({ITEMS.table}))
    scene.both("one", "two", "three")
    scene.requests = replace(view, skipped=frozenset({ITEMS.table}))
    scene.attend()
    scene.delete(1)
    scene.requests = view
    scene.attend()
    scene.emit_again(ITEMS.table)
    scene.attend()
    assert scene.asked == []
    assert scene.labels() == ["one", "three"]


def test_a_cancelled_refill_is_said_and_nothing_counts(make: Make) -> None:
    scene = make(kind="memory", on_loss="refill")
    scene.both("one")
    del memory._STORES["memory"]["public.items"]
    scene.attend()
    scene.attend()
    identity = scene.files.losses()[ITEMS.table].backfill
    status.publish(scene.settings.state, "capture", {"backfills": [{"id": identity, "state": "cancelled"}]})
    scene.attend()
    assert "was cancelled" in scene.said()["public.items"] and not scene.counts()
    scene.files.request_refill([ITEMS.table])
    scene.refilled()
    assert scene.equal()


# -- OpenSearch


@pytest.fixture
def search(make: Make, opensearch_server: LocalServer, index_prefix: str) -> LossScene:
    own = {"url": opensearch_server.url, "prefix": index_prefix, "replicas": 0}
    scene = make(kind="opensearch", on_loss="refill", **own)
    scene.both("one", "two", "three")
    scene.delete(1)
    scene.attend()
    return scene


Act = Callable[..., dict[str, Any]]


@pytest.fixture
def act(opensearch_server: LocalServer, index_prefix: str) -> Act:
    """A request; `{}` stands for the alias of the items."""

    def ask(method: str, path: str, body: object = None) -> dict[str, Any]:
        return opensearch_request(opensearch_server, method, path.format(f"{index_prefix}public.items"), body)

    return ask


def test_a_deleted_index_is_noticed_and_refilled(search: LossScene, act: Act) -> None:
    act("DELETE", "/{}-000001")
    search.both("newer")
    assert search.said() == {"public.items": "its index was deleted, or its alias"}
    assert not search.counts()
    assert search.labels(OTHERS)[0] == "newer"
    assert act("GET", "/{}-000001") == {}, "an empty index would hide that rows are missing"
    search.refilled()
    assert search.equal() and search.counts()


def test_an_alias_that_leads_elsewhere_is_noticed_and_what_it_leads_to_is_left_alone(
    search: LossScene, act: Act, index_prefix: str
) -> None:
    alias = f"{index_prefix}public.items"
    act("PUT", "/{}-elsewhere", {"aliases": {alias: {}}})
    act("POST", "/_aliases", {"actions": [{"remove": {"index": f"{alias}-000001", "alias": alias}}]})
    search.both("newer")
    assert f"points to {alias}-elsewhere" in search.said()["public.items"]
    search.refilled()
    assert search.equal() and search.counts()
    for index, documents in (("elsewhere", 0), ("000001", 3)):
        act("POST", f"/{{}}-{index}/_refresh")
        assert act("GET", f"/{{}}-{index}/_count")["count"] == documents


def test_a_closed_index_waits_alone_and_goes_on_when_it_is_opened(search: LossScene, act: Act) -> None:
    act("POST", "/{}-000001/_close")
    search.both("newer")
    assert "is closed" in search.said()["public.items"] and not search.counts()
    assert search.labels(OTHERS)[0] == "newer"
    search.attend()
    assert search.asked == [], "its rows are all there"
    act("POST", "/{}-000001/_open?wait_for_active_shards=1")

    def opened() -> bool:
        search.attend()
        return not search.said()

    wait_until(opened, 30)
    assert search.equal() and search.counts()


def test_an_index_that_counts_fewer_writes_than_it_took_is_an_older_copy(search: LossScene, index_prefix: str) -> None:
    sink: Any = search.open_sink()
    sink.prepare(ITEMS)
    mark = sink.mark_table(ITEMS)
    assert sink.compare_marks({ITEMS.table: mark}, 0) == {ITEMS.table: mark}
    older = sink.compare_marks({ITEMS.table: {**mark, "written": mark["written"] + 1}}, 0)[ITEMS.table]
    assert "older copy" in older.message


# -- Redis


def test_a_flushed_redis_is_noticed_at_once_and_refilled(make: Make, redis_url: str) -> None:
    scene = make(lambda: redis_url, kind="redis", on_loss="refill")
    scene.both("one", "two", "three")
    scene.delete(1)
    redis.Redis.from_url(redis_url).flushdb()
    scene.both("newer")
    assert set(scene.said()) == {"public.items", "public.others"}
    assert "flushed" in scene.said()["public.items"] and not scene.counts()
    scene.refilled()
    assert scene.equal() and scene.counts()


def test_a_failover_to_a_replica_without_acknowledged_writes_is_made_good_from_the_log(
    make: Make, private_redis: MakeRedis
) -> None:
    primary, replica = private_redis(), private_redis()
    client = redis.Redis.from_url(replica.url)
    client.replicaof(primary.host, primary.port)
    wait_until(lambda: client.info("replication")["master_link_status"] == "up", 30)
    servers = [primary.url]
    scene = make(lambda: servers[0], kind="redis")
    scene.both("one", "two", "three")
    wait_until(lambda: client.get("public.others:2"), 30)
    redis.Redis.from_url(primary.url).wait(1, 10_000)
    client.replicaof("NO", "ONE")
    scene.both("newer")  # acknowledged by the primary alone
    scene.delete(2)
    servers[0] = replica.url
    primary.kill()
    scene.both("newest", "newest")
    assert "older copy" in scene.said()["public.items"] and not scene.counts()
    scene.refilled()
    assert scene.asked == [] and scene.equal() and scene.counts()


def test_an_empty_redis_in_the_place_of_the_one_that_was_written_waits_for_a_person(
    make: Make, private_redis: MakeRedis, redis_url: str
) -> None:
    first = private_redis()
    servers = [first.url]
    scene = make(lambda: servers[0], kind="redis")
    scene.both("one")
    servers[0] = redis_url
    first.kill()
    scene.both("two")
    scene.attend()
    assert "empty server" in scene.said()["public.items"] and not scene.counts()
    assert redis.Redis.from_url(redis_url).keys("*") == []
    scene.files.request_refill([ITEMS.table, OTHERS.table])
    scene.refilled()
    assert scene.equal() and scene.counts()


def test_an_invalidating_cache_that_was_flushed_lacks_nothing(make: Make, redis_url: str) -> None:
    scene = make(lambda: redis_url, kind="redis", mode="invalidate")
    scene.both("one")
    redis.Redis.from_url(redis_url).flushdb()
    scene.attend()
    scene.both("two")
    assert not scene.said() and scene.counts()


# -- Delta


@pytest.fixture
def lakes(make: Make, tmp_path: Path) -> LossScene:
    scene = make(kind="delta", path=str(tmp_path / "lake"), on_loss="refill")
    scene.both("one", "two", "three")
    scene.delete(1)
    scene.both("four")
    scene.attend()
    return scene


def _removed(folder: Path) -> None:
    shutil.rmtree(folder)


def _restored(folder: Path) -> None:
    DeltaTable(folder).restore(1)


def _made_again(folder: Path) -> None:
    schema = DeltaTable(folder).schema()
    shutil.rmtree(folder)
    DeltaTable.create(folder, schema)


def _older_copy(folder: Path) -> None:
    newest = sorted((folder / "_delta_log").glob("*.json"))[-1]
    newest.unlink()


def _vacuumed(folder: Path) -> None:
    for path in folder.glob("*.parquet"):
        path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_removed, "is gone"),
        (_restored, "RESTORE"),
        (_made_again, "another Delta table"),
        (_older_copy, "older copy"),
        (_vacuumed, r"file\(s\) of its Delta table are gone"),
    ],
)
def test_a_delta_table_that_was_set_back_is_noticed_and_refilled(
    lakes: LossScene, tmp_path: Path, damage: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinks.delta.sink._THOROUGH_SECONDS", 0.0)
    lakes.start()
    damage(tmp_path / "lake" / "public.items")
    lakes.both("newer")
    assert set(lakes.said()) == {"public.items"} and re.search(message, lakes.said()["public.items"])
    assert not lakes.counts()
    assert lakes.labels(OTHERS)[0] == "newer"
    lakes.refilled()
    assert lakes.equal() and lakes.counts()
