"""The Kafka log on a real broker: what others see in the topics, and what the contract suite cannot ask."""

import gc
import json
import random
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions  # type: ignore[attr-defined]

from cdc.config.settings import Settings
from cdc.errors import LogCorrupt, LogError, LogFenced, LogLost
from cdc.log.kafka.client import Cluster, check_brokers
from cdc.log.kafka.position import KafkaPosition
from cdc.log.kafka.read.ranges import RangeReader, ranges_between, read_share, share_of
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.registry import open_reader, open_writer
from cdc.model import Column, Entry, Lsn, PgType, TableId, TableSchema
from tests.fix_processes import wait_until
from tests.fix_servers import LocalServer
from tests.scenes.kafka_rows import batch, change, entry, messages, writer

pytestmark = pytest.mark.kafka


@pytest.fixture
def settings(kafka_server: LocalServer, topic_prefix: str) -> KafkaSettings:
    return KafkaSettings(bootstrap=kafka_server.url, prefix=topic_prefix)


def everything(reader: KafkaReader) -> list[dict[str, object]]:
    return [row for part in reader.read(reader.start()) for row in part.rows.to_pylist()]


def test_a_delete_is_followed_by_a_tombstone_of_the_same_key(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    log.append(entry(10, change(1, 10, "c"), change(2, 10, "c")))
    log.append(entry(20, change(1, 20, "d")))
    found = messages(settings.bootstrap, f"{settings.prefix}.public.orders", 3, least=4)
    of_one = [value for _, _, key, value in found if key == b'{"id":1}']
    assert [None if value is None else json.loads(value)["op"] for value in of_one] == ["c", "d", None]


def test_changes_of_a_key_stay_in_one_partition_and_in_order(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    for lsn in range(10, 60, 10):
        log.append(batch(lsn, 40))
    positions: dict[bytes | None, list[tuple[int, int]]] = {}
    for partition, _, key, value in messages(settings.bootstrap, f"{settings.prefix}.public.orders", 3, 200):
        positions.setdefault(key, []).append((partition, json.loads(value or b"")["source"]["lsn"]))
    assert len(positions) == 40
    assert {partition for rows in positions.values() for partition, _ in rows} == {0, 1, 2}
    for rows in positions.values():
        assert len({partition for partition, _ in rows}) == 1
        assert [lsn for _, lsn in rows] == [10, 20, 30, 40, 50]


def test_who_runs_ahead_gives_exactly_what_is_asked_for(
    settings: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.log.kafka.read.ranges._PREFETCH_FROM", 10)
    monkeypatch.setattr("cdc.log.kafka.read.feed._CHUNK", 7)
    log = writer(settings.model_copy(update={"max_message_bytes": 20_000}), tmp_path)
    for lsn in range(10, 90, 10):
        large = change(77, lsn, note="x" * 50_000)  # spread over several messages
        log.append(entry(lsn, *(change(number, lsn, "d" if number % 5 else "u") for number in range(30)), large))
    reader = KafkaReader(settings)
    positions = [KafkaPosition(), *reader.positions()]
    eager = RangeReader(reader._cluster, prefetch=True)
    for after, until in [
        *pairwise(positions),
        (positions[2], positions[5]),
        (positions[5], positions[6]),
        (positions[1], positions[2]),
    ]:
        found = eager.read(ranges_between(after, until))
        versions = {version for part in found for version in part.rows.column("version").to_pylist()}
        assert versions == {position.end for position in positions if after.marker < position.marker <= until.marker}
        assert sum(part.rows.num_rows for part in found) == 31 * len(versions)
        wait_until(lambda: eager._prefetcher is None or not eager._prefetcher.is_alive(), 60)
    eager.close()
    reader.close()


def test_readers_between_which_partitions_move_give_exactly_what_is_asked_for_and_still_prefetch(
    settings: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cdc.log.kafka.read.ranges._PREFETCH_FROM", 1)
    monkeypatch.setattr("cdc.log.kafka.read.feed._CHUNK", 7)
    log = writer(settings, tmp_path)
    for lsn in range(10, 210, 10):
        log.append(entry(lsn, *(change(number, lsn) for number in range(lsn % 30, 30))))
    reader = KafkaReader(settings)
    eager = [RangeReader(reader._cluster, prefetch=True) for _ in range(2)]
    prefetched = [0, 0]
    chance = random.Random(5)
    owner = {partition: partition % 2 for partition in range(settings.partitions)}
    for after, until in pairwise([KafkaPosition(), *reader.positions()]):
        if chance.random() < 0.3:
            moved = chance.choice(sorted(owner))
            owner[moved] = 1 - owner[moved]
        ranges = ranges_between(after, until)
        found = [
            part
            for number, each in enumerate(eager)
            for part in each.read([item for item in ranges if owner[item.partition] == number])
        ]
        versions = [version for part in found for version in part.rows.column("version").to_pylist()]
        assert versions == [until.end] * (30 - until.end % 30)
        for number, each in enumerate(eager):
            thread = each._prefetcher
            prefetched[number] += thread is not None
            if thread is not None:
                wait_until(lambda: not thread.is_alive(), 60)  # noqa: B023
    assert min(prefetched) > 5, "a partition that moves must not switch prefetching off"
    for each in eager:
        each.close()
    reader.close()


def test_a_new_writer_takes_over_and_the_old_one_is_told_to_stop(settings: KafkaSettings, tmp_path: Path) -> None:
    old = writer(settings, tmp_path)
    old.append(batch(10, 3))
    new = writer(settings, tmp_path)
    assert new.progress().end == 10
    with pytest.raises(LogFenced):
        old.append(batch(20, 3))
    new.append(batch(20, 2))
    assert len(everything(KafkaReader(settings))) == 5


def test_a_writer_that_died_in_the_middle_left_nothing_to_see(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    log.append(batch(10, 3))
    # What a crash between the rows and the commit leaves: an open transaction with rows in it.
    log._transactions.producer.begin_transaction()
    log._transactions.producer.produce(f"{settings.prefix}.public.orders", b"{}", b"half", 0)
    log._transactions.producer.flush()
    again = writer(settings, tmp_path)
    assert again.progress().end == 10
    again.append(batch(20, 1))
    reader = KafkaReader(settings)
    assert reader.head()[1] == 20
    assert [row["version"] for row in everything(reader)] == [10, 10, 10, 20]


def test_a_log_that_nobody_closed_holds_no_connection(settings: KafkaSettings, tmp_path: Path) -> None:
    before = open_files()
    for lsn in range(10, 60, 10):
        writer(settings, tmp_path).append(batch(lsn, 1))
        KafkaReader(settings).head()
    wait_until(lambda: gc.collect() >= 0 and open_files() <= before, 30, "their connections closed")


def open_files() -> int:
    """Sockets, pipes and files of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def test_slices_hold_whole_transactions_in_log_order(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    for lsn in range(10, 40, 10):
        rows = [change(number, lsn, table=f"public.t{number % 3}") for number in range(9)]
        log.append(entry(lsn, *rows))
    reader = KafkaReader(settings)
    first = reader.seek(Lsn(10))
    parts = list(reader.read(first))
    rows = [row for part in parts for row in part.rows.to_pylist()]
    assert [(row["commit_lsn"], row["ordinal"]) for row in rows] == [(lsn, n) for lsn in (20, 30) for n in range(9)]
    assert parts[-1].end == 30
    assert list(reader.read(parts[-1].offset)) == []


def test_a_large_transaction_appears_at_once(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    spool = log.spool()
    for part in range(3):
        spool.write(batch(30, 1000, f"public.t{part}").rows)
    log.append(batch(20, 1))  # smaller ones commit meanwhile
    reader = KafkaReader(settings)
    assert len(everything(reader)) == 1
    spool.publish(Lsn(30))
    assert reader.head()[1] == 30
    assert len(everything(reader)) == 3001
    assert list((tmp_path / "kafka").iterdir()) == []


def test_a_forgotten_spool_is_swept_by_the_next_writer(settings: KafkaSettings, tmp_path: Path) -> None:
    writer(settings, tmp_path).spool().write(batch(30, 10).rows)
    assert len(list((tmp_path / "kafka").iterdir())) == 1
    writer(settings, tmp_path)
    assert list((tmp_path / "kafka").iterdir()) == []


def test_tables_that_would_share_a_topic_are_refused(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    log.append(batch(10, 1, "public.a b"))
    with pytest.raises(LogError, match="would share topic"):
        log.append(batch(20, 1, "public.a_b"))
    assert log.progress().end == 10
    log.append(batch(20, 1, "public.other"))


def test_a_changed_number_of_partitions_is_refused(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    log.append(batch(10, 5))
    reader = KafkaReader(settings)
    before = reader.start()
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    topic = f"{settings.prefix}.public.orders"
    for future in admin.create_partitions([NewPartitions(topic, 6)]).values():
        future.result()
    with pytest.raises(LogCorrupt, match=r"had 3 partition\(s\) and has 6"):
        list(reader.read(before))
    with pytest.raises(LogCorrupt, match="Start with a new prefix"):
        writer(settings, tmp_path)


LARGE = "x" * 200_000


def large_entry() -> Entry:
    return entry(10, change(1, 10), change(2, 10, note=LARGE), change(3, 10, "d"))


def test_a_change_larger_than_a_message_is_spread_over_several(settings: KafkaSettings, tmp_path: Path) -> None:
    small = settings.model_copy(update={"max_message_bytes": 50_000})
    rows = large_entry()
    writer(small, tmp_path).append(rows)
    assert everything(KafkaReader(small)) == rows.rows.to_pylist()
    found = messages(small.bootstrap, f"{small.prefix}.public.orders", 3)
    assert max(len(value or b"") for _, _, _, value in found) < 50_000
    assert all(value is None or json.loads(value) for _, _, _, value in found)


@pytest.mark.parametrize("messages", [1, 3, 1000])
def test_a_share_read_in_pieces_has_each_change_once_also_those_of_several_messages(
    settings: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: int
) -> None:
    monkeypatch.setattr("cdc.log.kafka.read.ranges._SHARE_MESSAGES", messages)
    small = settings.model_copy(update={"max_message_bytes": 50_000})
    log = writer(small, tmp_path)
    notes = {key: LARGE if key % 4 == 0 else "" for key in range(12)}
    log.append(entry(10, *(change(key, 10, note=note) for key, note in notes.items())))
    log.append(entry(20, *(change(key, 20, "d") for key in notes)))
    reader = KafkaReader(small)
    share = share_of(ranges_between(KafkaPosition(0), reader.newest()))
    found = list(read_share(reader._ranges, share))
    keys = sorted((row["key"], row["version"]) for piece in found for row in piece.to_pylist())
    assert keys == sorted((f'{{"id":{key}}}', version) for key in notes for version in (10, 20))
    reader.close()


def test_nothing_is_lost_on_topics_made_a_moment_ago(settings: KafkaSettings, tmp_path: Path) -> None:
    """KAFKA-15591: about every eighth of such topics had lost the first of several batches that were under way."""
    small = settings.model_copy(update={"max_message_bytes": 50_000})
    log = writer(small, tmp_path)
    made = []
    for number in range(40):
        lsn, table = 10 * (number + 1), f"public.t{number}"
        made.append(entry(lsn, change(1, lsn, table=table), change(2, lsn, table=table, note=LARGE)))
        log.append(made[-1])
    assert everything(KafkaReader(small)) == [row for each in made for row in each.rows.to_pylist()]


def test_messages_that_do_not_lie_where_they_should_are_sent_again(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    log.append(batch(10, 9))
    for ends in log._offsets._next_offsets.values():
        for partition in ends:
            ends[partition] += 1  # what it looks like when a broker has lost one message of each partition
    log.append(batch(20, 9, "public.other"))
    log.append(batch(30, 9))
    assert [row["version"] for row in everything(KafkaReader(settings))] == [10] * 9 + [20] * 9 + [30] * 9


def test_a_change_larger_than_a_message_can_become_a_dead_letter(settings: KafkaSettings, tmp_path: Path) -> None:
    small = settings.model_copy(update={"max_message_bytes": 50_000, "oversize": "dead_letter"})
    writer(small, tmp_path).append(large_entry())
    reader = KafkaReader(small)
    assert [row["key"] for row in everything(reader)] == ['{"id":1}', '{"id":3}']
    assert reader.head()[1] == 10
    ((_, _, key, letter),) = messages(small.bootstrap, f"{small.prefix}.millrace.oversize")
    assert key == b'{"id":2}'
    said = json.loads(letter or b"")
    assert (said["table"], said["lsn"], said["key"]) == ("public.orders", 10, '{"id":2}')
    assert LARGE not in (letter or b"").decode()


@pytest.mark.parametrize("oversize", ["chunk", "dead_letter"])
def test_sixty_megabytes_pass_a_limit_of_one(settings: KafkaSettings, tmp_path: Path, oversize: str) -> None:
    limited = settings.model_copy(update={"oversize": oversize})
    log = writer(limited, tmp_path)
    huge = "0123456789" * 6_000_000
    log.append(entry(10, change(1, 10), change(2, 10, note=huge), change(3, 10)))
    log.append(batch(20, 3))
    found = {(row["version"], row["key"]): row["after"] for row in everything(KafkaReader(limited))}
    assert len(found) == (6 if oversize == "chunk" else 5)
    assert ((10, '{"id":2}') in found) == (oversize == "chunk")
    if oversize == "chunk":
        assert json.loads(str(found[10, '{"id":2}']))["note"] == huge


def test_a_message_may_be_larger_than_what_usually_waits(settings: KafkaSettings, tmp_path: Path) -> None:
    roomy = settings.model_copy(update={"max_message_bytes": 50_000_000, "patience_seconds": 60.0})
    rows = entry(10, change(1, 10, note="0123456789" * 2_000_000))
    writer(roomy, tmp_path).append(rows)
    assert everything(KafkaReader(roomy)) == rows.rows.to_pylist()


def test_a_change_larger_than_a_message_can_stop_the_log(settings: KafkaSettings, tmp_path: Path) -> None:
    small = settings.model_copy(update={"max_message_bytes": 50_000, "oversize": "stop"})
    log = writer(small, tmp_path)
    with pytest.raises(LogError, match=r"public\.orders at 0/A takes") as caught:
        log.append(large_entry())
    assert LARGE[:20] not in str(caught.value)
    assert log.progress().end == 0
    log.append(batch(20, 1))


@pytest.mark.parametrize("value", [b"", b"\x80\x04garbage", b'{"before":null,"after":{"id":1}}', b"x" * 900_000])
def test_foreign_bytes_are_named_or_skipped_never_taken_for_rows(
    settings: KafkaSettings, tmp_path: Path, value: bytes
) -> None:
    one = settings.model_copy(update={"partitions": 1})
    log = writer(one, tmp_path)
    log.append(batch(10, 2))
    other = Producer({"bootstrap.servers": one.bootstrap, "message.max.bytes": 2_000_000})
    other.produce(f"{one.prefix}.public.orders", value, b"k", 0)
    other.flush()
    log.append(batch(20, 2))
    with pytest.raises(LogCorrupt, match=rf"offset 3 of {one.prefix}\.public\.orders-0") as caught:
        everything(KafkaReader(one))
    assert "garbage" not in str(caught.value)
    skipping = KafkaReader(one.model_copy(update={"foreign": "skip"}))
    assert [row["version"] for row in everything(skipping)] == [10, 10, 20, 20]


@pytest.mark.parametrize("name", ["acks", "enable.idempotence", "max.in.flight", "isolation.level", "sasl.password"])
def test_settings_that_would_weaken_a_promise_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        KafkaSettings(client={name: "1"})


def test_the_registry_survives_the_writer(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    schema = TableSchema(TableId("public", "orders"), (Column("id", PgType(20, "int8"), key=True),), oid=5)
    wider = TableSchema(schema.table, (*schema.columns, Column("n", PgType(23, "int4"))), oid=5)
    assert [log.schemas.record(each).id for each in (schema, schema, wider)] == [1, 1, 2]
    again = writer(settings, tmp_path)
    assert again.schemas.record(wider).id == 2
    reader = KafkaReader(settings)
    assert [each.id for each in reader.schemas.newest()] == [2]
    assert reader.schemas.get(schema.table, 1).columns == schema.columns
    with pytest.raises(LogCorrupt):
        reader.schemas.get(schema.table, 3)


def test_consumers_never_go_back_and_can_be_forgotten(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    for lsn in (10, 20, 30):
        log.append(batch(lsn, 1))
    reader = KafkaReader(settings)
    reader.commit("lake", Lsn(20))
    reader.commit("lake", Lsn(10))
    reader.commit("cache", Lsn(30))
    other = KafkaReader(settings)
    assert [(each.name, each.reached) for each in other.consumers()] == [("cache", 30), ("lake", 20)]
    lake = other.consumers()[1]
    assert [part.end for part in other.read(lake.offset)] == [30]
    other.forget("lake")
    assert [each.name for each in KafkaReader(settings).consumers()] == ["cache"]


def test_it_opens_from_a_pipelines_settings(settings: KafkaSettings, state_dir: Path) -> None:
    pipeline = Settings(state=state_dir, log=settings)
    log = open_writer(pipeline)
    log.append(batch(10, 2))
    assert open_reader(pipeline).head()[1] == 10
    log.close()


def test_readers_never_see_a_marker_before_all_of_its_rows(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    log.append(batch(10, 30))
    reader = KafkaReader(settings)
    stop = threading.Event()
    seen: list[tuple[int, int]] = []

    def follow() -> None:
        after = reader.seek(Lsn(10))
        while not stop.is_set() or reader.head()[0] != after:
            for part in reader.read(after):
                seen.append((part.end, part.rows.num_rows))
                after = part.offset

    follower = threading.Thread(target=follow)
    follower.start()
    for lsn in range(20, 420, 10):
        log.append(batch(lsn, 30))
    stop.set()
    follower.join(60)
    assert not follower.is_alive()
    done, expected = 10, 0
    for end, rows in seen:
        expected = (end - done) // 10 * 30
        assert rows == expected, (end, rows, expected)
        done = end
    assert done == 410


def test_a_cluster_that_is_not_there_is_named_and_one_that_is_there_is_greeted(settings: KafkaSettings) -> None:
    nowhere = KafkaSettings(bootstrap="127.0.0.1:1", client={"socket.connection.setup.timeout.ms": "1000"})
    with pytest.raises(LogLost):
        Cluster(nowhere, timeout=2).admin.names()
    with pytest.raises(LogLost, match=r"127\.0\.0\.1:1\) answered within 0\.5 s"):
        check_brokers(nowhere, 0.5)
    check_brokers(settings, 60)


def test_a_log_that_is_too_large_loses_its_oldest_read_entries(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    for lsn in range(10, 210, 10):
        log.append(batch(lsn, 60))
    size = log._cluster.admin.size([f"{settings.prefix}.public.orders"])
    half = settings.model_copy(update={"retention_gb": size / 2 / 2**30, "retention_hours": 1e6})
    reader = KafkaReader(half)
    reader.commit("lake", Lsn(50))
    again = writer(half, tmp_path)
    again.maintain()
    assert min(lsns_of(half)) == 60, "what lake has not read must stay"
    reader.commit("lake", Lsn(200))
    writer(half, tmp_path).maintain()
    assert min(lsns_of(half)) == 60, "what was removed is still on disk, and is not counted again"
    reader.forget("lake")


def lsns_of(settings: KafkaSettings) -> set[int]:
    return {int(str(row["version"])) for row in everything(KafkaReader(settings))}


def test_a_read_log_shrinks_to_its_size(settings: KafkaSettings, tmp_path: Path) -> None:
    log = writer(settings, tmp_path)
    for lsn in range(10, 210, 10):
        log.append(batch(lsn, 60))
    size = log._cluster.admin.size([f"{settings.prefix}.public.orders"])
    half = settings.model_copy(update={"retention_gb": size / 2 / 2**30, "retention_hours": 1e6})
    writer(half, tmp_path).maintain()
    assert min(lsns_of(half)) in (100, 110, 120)


def test_maintenance_removes_what_is_old_and_read_and_nothing_else(settings: KafkaSettings, tmp_path: Path) -> None:
    short = settings.model_copy(update={"retention_hours": 0.001})  # the rows of these tests are from January
    log = writer(short, tmp_path)
    for lsn in (10, 20, 30):
        log.append(batch(lsn, 20))
    reader = KafkaReader(short)
    reader.commit("lake", Lsn(30))
    reader.commit("cache", Lsn(20))
    assert [(lag.consumer, lag.bytes, lag.entries) for lag in reader.lags()] == [("cache", 10, 1), ("lake", 0, 0)]
    log.maintain()
    assert {row["version"] for row in everything(KafkaReader(short))} == {30}
    behind = next(each for each in reader.consumers() if each.name == "cache")
    assert [part.rows.num_rows for part in reader.read(behind.offset)] == [20]
    with pytest.raises(LogCorrupt, match="Retention removed offsets"):
        list(reader.read(reader.seek(Lsn(10))))
    unread = writer(settings, tmp_path)
    unread.maintain()
    assert {row["version"] for row in everything(KafkaReader(settings))} == {30}
