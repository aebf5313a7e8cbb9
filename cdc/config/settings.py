"""A pipeline's settings: frozen, typed, closed to unknown keys.

Kinds of log and sink are not named here: each extends LogSettings or SinkSettings in its own file.
`cdc.config.pipeline_file` reads them from YAML and the environment.
"""

import re
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from cdc.config.secret import Secret
from cdc.model import TableId

SecretField = Annotated[
    Secret,
    BeforeValidator(lambda value: value if isinstance(value, Secret) else Secret(str(value))),
    PlainSerializer(lambda value: "***" if value else ""),
]


_SECRET_NAME = re.compile(r"secret|password|token|access\.?key|credential", re.IGNORECASE)
"""Names that Spark itself takes for secrets (spark.redaction.regex), and a little more."""


def _table(value: object) -> object:
    return TableId.parse(value) if isinstance(value, str) else value


TableField = Annotated[TableId, BeforeValidator(_table), PlainSerializer(str)]


class Section(BaseModel):
    """A section of the file: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)


class PartitionSettings(Section):
    """What happens to rows that come or go with a partition, of which Postgres sends nothing."""

    removed: Literal["keep", "delete"] = "keep"
    """Rows of a partition that is dropped, detached or truncated: they stay in the stores, with a notice, or are
    deleted there by the partition's bounds."""
    attached: Literal["backfill", "notice"] = "backfill"
    """Rows of a partition that is attached: they are read by a backfill, or a notice says that they are missing."""


class TableSettings(Section):
    """One captured table."""

    name: TableField
    """schema.name of the table."""
    columns: tuple[str, ...] = ()
    """Columns to capture; empty means all. The key columns must be among them."""
    mask: dict[str, Literal["drop", "hash", "mask"]] = Field(default_factory=dict)
    """Columns hidden before the log: left out, replaced by a keyed hash, or by ***."""
    where: str = ""
    """Row filter of the publication, an SQL condition over this table's columns (PostgreSQL 15 and newer)."""
    snapshot: Literal["initial", "never", "incremental"] = "initial"
    """How existing rows are read: one consistent snapshot, not at all, or in chunks beside the stream."""
    partitions: PartitionSettings | None = None
    """For this table, if it is partitioned; without it, the source's `partitions`."""


class SourceSettings(Section):
    """The Postgres database that is followed."""

    host: str = "127.0.0.1"
    port: int = Field(5432, ge=1, le=65535)
    database: str = "postgres"
    user: str = "millrace"
    """A role with LOGIN and REPLICATION, and SELECT on the tables."""
    password: SecretField = Secret("")
    sslmode: Literal["", "disable", "prefer", "require", "verify-ca", "verify-full"] = ""
    """Empty: verify-full for any host but loopback."""
    sslrootcert: str = ""
    """File with the certificate authority of the server."""
    slot: str = Field("millrace", pattern=r"^[a-z0-9_]{1,63}$")
    """The replication slot; one for each pipeline, made at the first start."""
    publication: str = Field("millrace", min_length=1, max_length=63)
    """The publication; made at the first start if the role may, else doctor says how."""
    tables: tuple[TableSettings, ...] = ()
    heartbeat_seconds: float = Field(10.0, gt=0)
    """How often an idle slot is moved forward, so that it never holds back WAL."""
    schema_policy: Literal["evolve", "lenient", "ignore", "exception"] = "evolve"
    """What a changed table does: follow it, follow what loses nothing and wait at the rest, keep the old columns, or
    stop capture."""
    mask_key: SecretField = Secret("")
    """Key of the `hash` masks."""
    wal_room_gb: float = Field(0.0, ge=0)
    """WAL that the source's disk can hold for the slot, for the estimate of when it is full; 0: not known.
    Where the source sets max_slot_wal_keep_size, that counts too."""
    snapshot_workers: int = Field(2, ge=1, le=32)
    """Connections that read the first snapshot side by side."""
    partitions: PartitionSettings = PartitionSettings()
    """For every partitioned table that does not say otherwise."""

    @model_validator(mode="before")
    @classmethod
    def _short_tables(cls, data: object) -> object:
        if isinstance(data, dict) and isinstance(data.get("tables"), (list, tuple)):
            tables = [{"name": item} if isinstance(item, str) else item for item in data["tables"]]
            data = {**data, "tables": tables}
        return data

    @model_validator(mode="after")
    def _tables_are_distinct(self) -> "SourceSettings":
        names = [table.name for table in self.tables]
        doubled = sorted({str(name) for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"table listed twice: {', '.join(doubled)}")
        return self


class LogSettings(Section):
    """The durable log; each kind of log extends this."""

    kind: str = "segments"
    retention_hours: float = Field(168.0, gt=0)
    """Entries that every registered consumer has read are removed after this long."""
    retention_gb: float = Field(100.0, gt=0)
    """…or when the log is larger than this."""


class RetrySettings(Section):
    """What a sink does while its store is down, slow or full."""

    attempts: int = Field(0, ge=0)
    """Failures in a row after which a batch is given up; 0: never."""
    first_seconds: float = Field(0.5, gt=0)
    """Pause after the first failure; it doubles with each further one."""
    longest_seconds: float = Field(30.0, gt=0)
    """The longest pause."""
    then: Literal["stop", "park"] = "stop"
    """When a batch is given up: stop this sink until somebody resumes it, or park the batch's changes as dead letters
    and go on. A truncate cannot be parked: it is waited for."""


class SinkSettings(Section):
    """A store; each kind of sink extends this."""

    kind: str
    name: str = Field("", pattern=r"^[a-z0-9_-]{0,40}$")
    """Unique in the pipeline; defaults to the kind."""
    tables: tuple[TableField, ...] = ()
    """Tables for this sink; empty means all."""
    trigger_seconds: float = Field(0.0, ge=0)
    """Least time between two batches; 0 starts the next batch at once."""
    max_batch_changes: int = Field(50_000, ge=1)
    """About how many changes one batch takes; bounds memory."""
    retry: RetrySettings = Field(default_factory=RetrySettings)
    on_loss: Literal["stop", "refill"] = "stop"
    """When the store lost what it held of a table (an index deleted, a cache flushed, a table restored to an older
    version): hold the table until somebody says `millrace refill`, or make it anew and read its rows again at once."""
    query: Literal["shared", "own"] = "shared"
    """Sinks that keep pace share one query, and one that falls behind gets its own until it has caught up; `own`
    (or a trigger_seconds) gives it its own always."""

    @model_validator(mode="after")
    def _name_defaults_to_kind(self) -> "SinkSettings":
        if not self.name:
            object.__setattr__(self, "name", self.kind)
        return self


class HttpSettings(Section):
    """The health endpoint and the page."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8080, ge=0, le=65535)
    token: SecretField = Secret("")
    """Needed for any address but loopback."""


class SparkSettings(Section):
    """The Spark driver that folds the log into the stores."""

    master: str = "local[2]"
    """Spark's master: threads in this process, or a cluster."""
    memory: str = "1g"
    """Heap of the driver."""
    conf: dict[str, str] = Field(default_factory=dict)
    """Further Spark settings, over Millrace's own."""
    secrets: dict[str, SecretField] = Field(default_factory=dict)
    """Spark settings that nobody may see, for instance the keys of an object store: they are in no process list."""

    @model_validator(mode="after")
    def _secrets_are_no_conf(self) -> "SparkSettings":
        seen = [name for name in self.conf if _SECRET_NAME.search(name)]
        if seen:
            raise ValueError(f"{seen[0]} looks like a secret; put it under spark.secrets, where it is not shown")
        foreign = [name for name in self.secrets if not name.startswith("spark.")]
        if foreign:
            raise ValueError(f"{foreign[0]} is no Spark setting: their names begin with spark.")
        return self


class BudgetSettings(Section):
    """What the pipeline may take of its machine."""

    free_mb: float = Field(200.0, ge=0)
    """Free space under the state folder below which reading stops until there is more; the slot keeps the WAL."""
    state_gb: float = Field(0.0, ge=0)
    """Most that the state folder may hold before reading stops; 0: no limit. Sinks that are down or paused fill it."""
    capture_memory_mb: float = Field(2048.0, ge=0)
    """Resident memory above which capture is started again; 0: no limit."""
    apply_memory_mb: float = Field(0.0, ge=0)
    """The same for apply, with Spark's JVM and workers; 0: no limit. Leave 1.5 GB above spark.memory."""


class Settings(Section):
    """A whole pipeline."""

    state: Path = Path(".millrace/state")
    """Folder for the log, checkpoints and status; made with mode 0700."""
    source: SourceSettings = Field(default_factory=SourceSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    sinks: tuple[SinkSettings, ...] = ()
    http: HttpSettings = Field(default_factory=HttpSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    budgets: BudgetSettings = Field(default_factory=BudgetSettings)

    def tables_of(self, sink: SinkSettings) -> tuple[TableId, ...]:
        """The tables that a sink is given: those it names, else all."""
        return tuple(sink.tables) or tuple(table.name for table in self.source.tables)

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Settings":
        names = [sink.name for sink in self.sinks]
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ValueError(f"two sinks are called {doubled[0]!r}; give each its own name")
        return self


def shown(value: object) -> object:
    """Settings as plain data for people and JSON, every secret as stars.

    Not pydantic's own dump: asked for a sink's whole settings, it serialises a secret by its content.
    """
    if isinstance(value, Secret):
        return "***" if value else ""
    if isinstance(value, Section):
        return {name: shown(item) for name, item in value}
    if isinstance(value, dict):
        return {str(key): shown(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [shown(item) for item in value]
    return value if isinstance(value, (int, float, str, type(None))) else str(value)
