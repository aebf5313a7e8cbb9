"""Whether a Kafka cluster is there at all: asked before anything else, for people and for parts that begin."""

from cdc.errors import LogLost
from cdc.log.kafka_client import admitted
from cdc.log.kafka_settings import KafkaConnectionSettings


def greet(settings: KafkaConnectionSettings, seconds: float) -> None:
    """Raise LogError if no broker lets us in within that time: its refusal, or LogLost if none answers at all."""
    if not admitted(settings, seconds):
        raise LogLost(
            f"Kafka does not answer: no broker of log.bootstrap ({settings.bootstrap}) did within {seconds:g} s.",
            "Start the brokers, or correct log.bootstrap and log.security; the pipeline then goes on by itself.",
        )
