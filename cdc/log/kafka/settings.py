"""Settings of the logs that live in Kafka, and what they mean to a client."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from cdc.config.loopback import is_loopback
from cdc.config.secret import Secret
from cdc.config.settings import LogSettings, SecretField

_OURS = {
    "acks": "every acknowledgement must be durable",
    "request.required.acks": "every acknowledgement must be durable",
    "enable.idempotence": "without it a retry reorders or repeats changes",
    "max.in.flight": "more than 5 requests in flight reorder changes",
    "max.in.flight.requests.per.connection": "more than 5 requests in flight reorder changes",
    "transactional.id": "it is what keeps a second writer out",
    "isolation.level": "readers must not see what was not committed",
    "partitioner": "the partition of a key must never change",
    "bootstrap.servers": "it is the setting `bootstrap`",
    "sasl.password": "it is the setting `password`, which is never shown",
    "message.max.bytes": "it is the setting `max_message_bytes`",
}


class KafkaConnectionSettings(LogSettings):
    """Where the cluster is and how to log in."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the input holds passwords

    bootstrap: str = Field("127.0.0.1:9092", min_length=1)
    """Brokers as host:port, separated by commas."""
    prefix: str = Field("millrace", pattern=r"^[a-zA-Z0-9_-]{1,100}$")
    """First part of every topic's name."""
    security: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    """Without TLS (plaintext, sasl_plaintext) only brokers on this machine are spoken to, unless `insecure` is set."""
    insecure: bool = False
    """Send changes, and the password, in the clear to brokers elsewhere."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    user: str = ""
    password: SecretField = Secret("")
    ca: str = ""
    """File with the certificates that sign the brokers' ones; empty: the system's."""
    certificate: str = ""
    """File with our own certificate, where brokers ask for one."""
    key: str = ""
    """File with its key."""
    key_password: SecretField = Secret("")
    """Of the key file, if it is encrypted."""
    foreign: Literal["stop", "skip"] = "stop"
    """What a reader does with a message that is not a change: stop and name its place, or skip it and say so."""
    client: dict[str, str] = Field(default_factory=dict)
    """Further librdkafka properties. Those that would weaken a promise are refused."""

    @model_validator(mode="after")
    def _is_told_apart(self) -> "KafkaConnectionSettings":
        if bool(self.certificate) != bool(self.key):
            raise ValueError("log.certificate and log.key are needed together")
        if self.security.startswith("sasl") and not (self.user and self.password):
            raise ValueError(f"log.security {self.security} needs log.user and log.password")
        far = [host for host in self._hosts() if not is_loopback(host)]
        if far and not self.security.endswith("ssl") and not self.insecure:
            raise ValueError(
                f"log.security {self.security} would send everything in the clear to {far[0]}: "
                "use ssl or sasl_ssl, or set log.insecure if the network is to be trusted"
            )
        return self

    def _hosts(self) -> list[str]:
        return [place.strip().rpartition(":")[0].strip("[]") for place in self.bootstrap.split(",") if place.strip()]

    @model_validator(mode="after")
    def _promises_hold(self) -> "KafkaConnectionSettings":
        for name in sorted(self.client):
            if name in _OURS:
                raise ValueError(f"log.client must not set {name}: {_OURS[name]}")
            if "password" in name or "secret" in name:
                raise ValueError(f"log.client must not set {name}: its values are shown with the settings")
        return self

    def options(self) -> dict[str, str | int | float | bool]:
        """What every client is given. Holds the password in the clear: for librdkafka only, never to be shown."""
        options: dict[str, str | int | float | bool] = {
            "bootstrap.servers": self.bootstrap,
            "security.protocol": self.security,
            "allow.auto.create.topics": False,
            "topic.metadata.refresh.interval.ms": 30_000,
            "reconnect.backoff.max.ms": 1_000,
            **self.client,
        }
        if self.security.startswith("sasl"):
            options |= {
                "sasl.mechanisms": self.mechanism,
                "sasl.username": self.user,
                "sasl.password": self.password.reveal(),
            }
        if self.ca:
            options["ssl.ca.location"] = self.ca
        if self.certificate:
            options |= {"ssl.certificate.location": self.certificate, "ssl.key.location": self.key}
        if self.key_password:
            options["ssl.key.password"] = self.key_password.reveal()
        return options

    def python_options(self, patience: float) -> dict[str, Any]:
        """The same for kafka-python. Holds passwords in the clear too."""
        options: dict[str, Any] = {
            "bootstrap_servers": [place.strip() for place in self.bootstrap.split(",")],
            "security_protocol": self.security.upper(),
            "bootstrap_timeout_ms": int(patience * 1000),
            "request_timeout_ms": int(patience * 1000),
            "reconnect_backoff_max_ms": 1_000,
        }
        if self.security.startswith("sasl"):
            options |= {
                "sasl_mechanism": self.mechanism,
                "sasl_plain_username": self.user,
                "sasl_plain_password": self.password.reveal(),
            }
        if self.security.endswith("ssl"):
            options |= {
                "ssl_cafile": self.ca or None,
                "ssl_certfile": self.certificate or None,
                "ssl_keyfile": self.key or None,
                "ssl_password": self.key_password.reveal() or None,
            }
        return options

    def system_topic(self, name: str) -> str:
        """`<prefix>.millrace.<name>`: ours, never a table's."""
        return f"{self.prefix}.millrace.{name}"


class KafkaSettings(KafkaConnectionSettings):
    """A log in Kafka, written by this pipeline."""

    kind: Literal["kafka"] = "kafka"
    partitions: int = Field(3, ge=1, le=1000)
    """Of each table's topic when it is made. Never changed later: a key would move to another partition."""
    replication: int = Field(-1, ge=-1)
    """Copies of each topic; -1 is the broker's default."""
    compact: bool = False
    """Let Kafka keep only the newest change of each key once the retention time is over, instead of dropping it."""
    compression: Literal["none", "lz4", "zstd", "snappy", "gzip"] = "lz4"
    max_message_bytes: int = Field(1_000_000, ge=20_000, le=1_000_000_000)
    """Largest message; must not be above the brokers' limit."""
    oversize: Literal["chunk", "dead_letter", "stop"] = "chunk"
    """A change larger than that: spread over several messages, set aside by key and LSN, or stop."""
    patience_seconds: float = Field(300.0, gt=0)
    """How long an append waits for a cluster that does not answer."""
    transaction_timeout_seconds: int = Field(900, ge=10)
    """After this the broker aborts a transaction; not above its transaction.max.timeout.ms."""
