"""Settings of the Kafka and Debezium logs, and the client options they stand for."""

from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from cdc.config.loopback import is_loopback
from cdc.config.secret import Secret
from cdc.config.settings import LogSettings, SecretField

_REFUSED_PROPERTIES = {
    "acks": "every acknowledgement must be durable",
    "request.required.acks": "every acknowledgement must be durable",
    "enable.idempotence": "without it a retry reorders or repeats changes",
    "max.in.flight": "more than 5 requests in flight reorder changes",
    "max.in.flight.requests.per.connection": "more than 5 requests in flight reorder changes",
    "transactional.id": "it fences off a second writer",
    "isolation.level": "readers must not see uncommitted messages",
    "partitioner": "the partition of a key must never change",
    "bootstrap.servers": "it is the setting `bootstrap`",
    "sasl.password": "it is the setting `password`, which is never shown",
    "message.max.bytes": "it is the setting `max_message_bytes`",
}


class KafkaConnectionSettings(LogSettings):
    """The cluster's address and how to log in."""

    model_config = ConfigDict(hide_input_in_errors=True)  # the input contains passwords

    bootstrap: str = Field("127.0.0.1:9092", min_length=1)
    """Brokers as host:port, separated by commas."""
    prefix: str = Field("millrace", pattern=r"^[a-zA-Z0-9_-]{1,100}$")
    """First part of every topic name."""
    security: Literal["plaintext", "ssl", "sasl_plaintext", "sasl_ssl"] = "plaintext"
    """Security protocol. Without TLS (plaintext, sasl_plaintext) only brokers on this machine are allowed, unless
    `insecure` is set."""
    insecure: bool = False
    """Allow connections without TLS to brokers on other machines: changes and the password are sent unencrypted."""
    mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    user: str = ""
    password: SecretField = Secret("")
    ca: str = ""
    """File with the CA certificates that sign the brokers' certificates; empty: the system's."""
    certificate: str = ""
    """File with the client certificate, if the brokers require one."""
    key: str = ""
    """File with the private key of the client certificate."""
    key_password: SecretField = Secret("")
    """Password of the key file, if it is encrypted."""
    foreign: Literal["stop", "skip"] = "stop"
    """What a reader does with a message that is not a change: stop with an error that names its offset, or skip it
    with a warning."""
    client: dict[str, str] = Field(default_factory=dict)
    """Further librdkafka properties. Properties that would weaken a guarantee are refused."""

    @model_validator(mode="after")
    def _connection_is_consistent(self) -> "KafkaConnectionSettings":
        if bool(self.certificate) != bool(self.key):
            raise ValueError("log.certificate and log.key are needed together")
        if self.security.startswith("sasl") and not (self.user and self.password):
            raise ValueError(f"log.security {self.security} needs log.user and log.password")
        remote = [host for host in self._hosts() if not is_loopback(host)]
        if remote and not self.security.endswith("ssl") and not self.insecure:
            raise ValueError(
                f"log.security {self.security} would send everything unencrypted to {remote[0]}: "
                "use ssl or sasl_ssl, or set log.insecure if you trust the network"
            )
        return self

    def _hosts(self) -> list[str]:
        return [
            address.strip().rpartition(":")[0].strip("[]") for address in self.bootstrap.split(",") if address.strip()
        ]

    @model_validator(mode="after")
    def _client_keeps_guarantees(self) -> "KafkaConnectionSettings":
        for name in sorted(self.client):
            if name in _REFUSED_PROPERTIES:
                raise ValueError(f"log.client must not set {name}: {_REFUSED_PROPERTIES[name]}")
            if "password" in name or "secret" in name:
                raise ValueError(f"log.client must not set {name}: the values of log.client are not kept secret")
        return self

    def options(self) -> dict[str, str | int | float | bool]:
        """The options of every librdkafka client. Contains the password in plain text: never show them."""
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

    def python_options(self, timeout: float) -> dict[str, Any]:
        """The same options for kafka-python. Contains passwords in plain text too."""
        options: dict[str, Any] = {
            "bootstrap_servers": [address.strip() for address in self.bootstrap.split(",")],
            "security_protocol": self.security.upper(),
            "bootstrap_timeout_ms": int(timeout * 1000),
            "request_timeout_ms": int(timeout * 1000),
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
        """`<prefix>.millrace.<name>`: a topic of the log itself, never of a table."""
        return f"{self.prefix}.millrace.{name}"


class KafkaSettings(KafkaConnectionSettings):
    """A log in Kafka, written by this pipeline."""

    kind: Literal["kafka"] = "kafka"
    partitions: int = Field(3, ge=1, le=1000)
    """Partitions of each table's topic when it is created. Never changed later: keys would move to other partitions."""
    replication: int = Field(-1, ge=-1)
    """Replication factor of each topic when it is created; -1 is the broker's default."""
    min_insync: int = Field(0, ge=0)
    """`min.insync.replicas` of each topic when it is created: replicas that must have a change before it counts as
    appended. 0 is the broker's default. For a log that outlives the loss of a broker: replication 3, min_insync 2."""
    compact: bool = False
    """After the retention time let Kafka compact topics to the newest change of each key instead of removing it."""
    compression: Literal["none", "lz4", "zstd", "snappy", "gzip"] = "lz4"
    max_message_bytes: int = Field(1_000_000, ge=20_000, le=1_000_000_000)
    """Largest message in bytes; must not exceed the brokers' limit."""
    oversize: Literal["chunk", "dead_letter", "stop"] = "chunk"
    """What to do with a change larger than `max_message_bytes`: split it into several messages, write a dead letter
    with its key and LSN, or stop."""
    patience_seconds: float = Field(300.0, gt=0)
    """How long an append waits for a cluster that does not answer."""
    transaction_timeout_seconds: int = Field(900, ge=10)
    """After this time the broker aborts a transaction; must not exceed the broker's transaction.max.timeout.ms."""

    @model_validator(mode="after")
    def _replicas_suffice(self) -> "KafkaSettings":
        if 0 < self.replication < self.min_insync:
            raise ValueError(f"log.min_insync {self.min_insync} needs log.replication {self.min_insync} or more")
        return self
