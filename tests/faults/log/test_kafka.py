"""The Kafka log while brokers, networks and writers die. The end is always the same: every change once, in order."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    NewPartitions,
    ResourcePatternType,
    ResourceType,
)

from cdc.errors import LogCorrupt, LogError
from cdc.log.kafka.read.reader import KafkaReader
from cdc.log.kafka.settings import KafkaSettings
from cdc.log.kafka.write.writer import KafkaWriter
from tests.fix_proxy import MakeProxy
from tests.fix_servers import LocalServer, MakeKafka
from tests.scenes.kafka_rows import batch, messages, writer

pytestmark = pytest.mark.kafka
ROWS = 40


def appended_once(settings: KafkaSettings, lsns: range) -> None:
    """The log holds exactly these transactions, in order, and per key too."""
    reader = KafkaReader(settings)
    rows = [row for part in reader.read(reader.start()) for row in part.rows.to_pylist()]
    assert [(row["commit_lsn"], row["ordinal"]) for row in rows] == [(lsn, n) for lsn in lsns for n in range(ROWS)]
    assert reader.head()[1] == lsns[-1]


class Appending:
    """A writer at work in a thread of its own."""

    def __init__(self, log: KafkaWriter, lsns: range) -> None:
        self.done = 0
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(log, lsns))
        self._thread.start()

    def _run(self, log: KafkaWriter, lsns: range) -> None:
        try:
            for lsn in lsns:
                log.append(batch(lsn, ROWS))
                self.done = lsn
        except Exception as error:
            self.failure = error

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, f"stuck at {self.done}"
            time.sleep(0.01)

    def finish(self, seconds: float = 120) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"stuck at {self.done}"
        assert self.failure is None, self.failure


def test_a_killed_broker_costs_no_change_and_repeats_none(
    private_kafka: MakeKafka, topic_prefix: str, tmp_path: Path
) -> None:
    server = private_kafka()
    settings = KafkaSettings(bootstrap=server.url, prefix=topic_prefix)
    work = Appending(writer(settings, tmp_path), range(10, 60))
    work.wait_for(lambda: work.done >= 20)
    server.kill()
    stood = work.done
    server.start()
    work.wait_for(lambda: work.done >= stood + 5)
    server.pause()
    time.sleep(3)  # long enough for requests to be waiting; nothing can be waited for while nothing answers
    server.unpause()
    work.finish()
    appended_once(settings, range(10, 60))


@pytest.mark.parametrize("seconds", [5, pytest.param(60, marks=pytest.mark.soak)])
def test_a_broker_that_stands_still_costs_no_change(
    kafka_server: LocalServer, topic_prefix: str, tmp_path: Path, seconds: float
) -> None:
    settings = KafkaSettings(bootstrap=kafka_server.url, prefix=topic_prefix)
    work = Appending(writer(settings, tmp_path), range(10, 60))
    work.wait_for(lambda: work.done >= 15)
    kafka_server.pause()
    try:
        time.sleep(seconds)  # it is the length of the standstill that is under test
        stood = work.done
    finally:
        kafka_server.unpause()
    work.wait_for(lambda: work.done > stood)
    work.finish()
    appended_once(settings, range(10, 60))


def test_partitions_added_while_writing_move_no_key_and_are_told(
    kafka_server: LocalServer, topic_prefix: str, tmp_path: Path
) -> None:
    settings = KafkaSettings(bootstrap=kafka_server.url, prefix=topic_prefix)
    work = Appending(writer(settings, tmp_path), range(10, 40))
    work.wait_for(lambda: work.done >= 15)
    topic = f"{topic_prefix}.public.orders"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    for future in admin.create_partitions([NewPartitions(topic, 6)]).values():
        future.result()
    work.finish()
    places: dict[bytes | None, set[int]] = {}
    for partition, _, key, _ in messages(settings.bootstrap, topic, 6, least=30 * ROWS):
        places.setdefault(key, set()).add(partition)
    assert len(places) == ROWS
    assert all(len(found) == 1 and max(found) < 3 for found in places.values())
    reader = KafkaReader(settings)
    with pytest.raises(LogCorrupt, match=r"had 3 partition\(s\) and has 6"):
        list(reader.read(reader.start()))


def test_resets_in_the_middle_of_requests_neither_repeat_nor_reorder(
    private_kafka: MakeKafka, proxy: MakeProxy, topic_prefix: str, tmp_path: Path
) -> None:
    front = proxy(1)
    server = private_kafka(advertised=front.port)
    front.target = server.port
    settings = KafkaSettings(bootstrap=f"127.0.0.1:{front.port}", prefix=topic_prefix)
    work = Appending(writer(settings, tmp_path), range(10, 70))
    for cut in range(6):
        reached = work.done
        work.wait_for(lambda reached=reached: work.done >= reached + 3)  # type: ignore[misc]
        front.cut_after(2000 + 3000 * cut, "up" if cut % 2 else "down")
    work.finish()
    appended_once(settings, range(10, 70))


def test_what_was_not_acknowledged_is_not_confirmed(
    private_kafka: MakeKafka, proxy: MakeProxy, topic_prefix: str, tmp_path: Path
) -> None:
    front = proxy(1)
    server = private_kafka(advertised=front.port)
    front.target = server.port
    settings = KafkaSettings(bootstrap=f"127.0.0.1:{front.port}", prefix=topic_prefix)
    log = writer(settings, tmp_path)
    log.append(batch(10, ROWS))
    front.one_way("up")  # the broker stores everything, and its acknowledgements never come
    sent = front.forwarded["up"]
    work = Appending(log, range(20, 21))
    work.wait_for(lambda: front.forwarded["up"] > sent)
    assert log.progress().end == 10
    direct = settings.model_copy(update={"bootstrap": server.url})
    front.pass_on()
    front.reset()
    work.finish()
    assert log.progress().end == 20
    appended_once(direct, range(10, 21, 10))


def test_a_topic_deleted_under_the_writer_stops_it_with_a_reason(
    kafka_server: LocalServer, topic_prefix: str, tmp_path: Path
) -> None:
    settings = KafkaSettings(
        bootstrap=kafka_server.url,
        prefix=topic_prefix,
        client={"topic.metadata.propagation.max.ms": "1000", "topic.metadata.refresh.interval.ms": "1000"},
    )
    log = writer(settings, tmp_path)
    log.append(batch(10, ROWS))
    topic = f"{topic_prefix}.public.orders"
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    for future in admin.delete_topics([topic]).values():
        future.result()
    with pytest.raises(LogCorrupt, match="is missing"):
        log.append(batch(20, ROWS))
    assert log.progress().end == 10
    with pytest.raises(LogCorrupt, match=f"Topic {topic} is missing"):
        writer(settings, tmp_path)


def test_a_right_that_is_taken_away_stops_the_writer_and_can_be_given_back(
    private_kafka: MakeKafka, topic_prefix: str, tmp_path: Path
) -> None:
    server = private_kafka(
        {
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "allow.everyone.if.no.acl.found": "true",
        }
    )
    settings = KafkaSettings(bootstrap=server.url, prefix=topic_prefix)
    log = writer(settings, tmp_path)
    log.append(batch(10, ROWS))
    admin = AdminClient({"bootstrap.servers": settings.bootstrap})
    kind = (ResourceType.TOPIC, f"{topic_prefix}.public.orders", ResourcePatternType.LITERAL, "User:ANONYMOUS", "*")
    denied = AclBinding(*kind, AclOperation.WRITE, AclPermissionType.DENY)
    for future in admin.create_acls([denied]).values():
        future.result()
    with pytest.raises(LogError, match="Kafka refused access") as caught:
        log.append(batch(20, ROWS))
    assert "ACLs" in caught.value.remedy
    assert not caught.value.transient
    filters = AclBindingFilter(*kind, AclOperation.ANY, AclPermissionType.ANY)
    for gone in admin.delete_acls([filters]).values():
        gone.result()
    again = writer(settings, tmp_path)
    assert again.progress().end == 10
    again.append(batch(20, ROWS))
    appended_once(settings, range(10, 21, 10))
