"""The log on three brokers while one of them dies: appending goes on, and nothing is lost or repeated."""

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]

from cdc.log.kafka.client import Cluster, watermarks
from cdc.log.kafka.settings import KafkaSettings
from tests.faults.log.test_kafka import Appending, appended_once
from tests.fix_cluster import KafkaCluster
from tests.fix_servers import LocalServer
from tests.scenes.kafka_rows import writer

pytestmark = pytest.mark.kafka


def leader(cluster: KafkaCluster, topic: str) -> LocalServer:
    """The broker that leads a topic's first partition."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    found = admin.list_topics(topic, timeout=30).topics[topic].partitions[0]
    assert len(found.replicas) == 3
    return cluster.brokers[found.leader - 1]


def test_a_killed_leader_stops_no_append_and_loses_no_change(
    kafka_cluster: KafkaCluster, topic_prefix: str, tmp_path: Path
) -> None:
    settings = KafkaSettings(bootstrap=kafka_cluster.bootstrap, prefix=topic_prefix, replication=3, min_insync=2)
    work = Appending(writer(settings, tmp_path), range(10, 60))
    work.wait_for(lambda: work.done >= 20)
    killed = leader(kafka_cluster, settings.system_topic("position"))
    killed.kill()
    stood = work.done
    work.wait_for(lambda: work.done >= min(stood + 10, 59), 120)
    killed.start()
    work.finish()
    appended_once(settings, range(10, 60))


def test_topics_have_the_configured_replicas(kafka_cluster: KafkaCluster, topic_prefix: str, tmp_path: Path) -> None:
    settings = KafkaSettings(bootstrap=kafka_cluster.bootstrap, prefix=topic_prefix, replication=3, min_insync=3)
    writer(settings, tmp_path).close()
    topic = ConfigResource(ConfigResource.Type.TOPIC, settings.system_topic("position"))
    admin = AdminClient({"bootstrap.servers": kafka_cluster.bootstrap})
    found = admin.describe_configs([topic])[topic].result(30)
    assert found["min.insync.replicas"].value == "3"


def test_a_topic_that_was_just_created_is_read_before_every_broker_knows_it(
    kafka_cluster: KafkaCluster, topic_prefix: str
) -> None:
    settings = KafkaSettings(bootstrap=kafka_cluster.bootstrap, prefix=topic_prefix, replication=3)
    cluster = Cluster(settings)
    for number in range(20):
        name = f"{topic_prefix}.new-{number}"
        cluster.admin.create(name, 1, 3, {})
        consumer = cluster.consumer()  # it asks whichever broker it reaches first
        assert watermarks(consumer, name, 0) == (0, 0)
        consumer.close()
