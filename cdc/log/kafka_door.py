"""Whether a Kafka cluster is there at all: asked before anything else, for people and for parts that begin."""

import time
from contextlib import closing, suppress

from confluent_kafka import KafkaError, KafkaException

from cdc.errors import LogLost
from cdc.log.kafka_client import Cluster, in_our_words
from cdc.log.kafka_settings import KafkaConnectionSettings


def greet(settings: KafkaConnectionSettings, seconds: float) -> None:
    """Raise LogError if no broker lets us in within that time: its refusal, or LogLost if none answers at all."""
    errors: list[KafkaError] = []
    deadline = time.monotonic() + seconds
    with closing(Cluster(settings).producer(error_cb=errors.append)) as client:
        while time.monotonic() < deadline:
            with suppress(KafkaException):
                client.list_topics(timeout=min(1.0, seconds))
                return
            client.poll(0)
            for refusal in (said for error in errors if not (said := in_our_words(error, "logging in")).transient):
                raise refusal
    raise LogLost(
        f"Kafka does not answer: no broker of log.bootstrap ({settings.bootstrap}) did within {seconds:g} s.",
        "Start the brokers, or correct log.bootstrap and log.security; the pipeline then goes on by itself.",
    )
