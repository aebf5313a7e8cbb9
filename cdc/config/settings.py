"""The settings of a pipeline: frozen, typed, without unknown keys.

Each kind of log or sink extends LogSettings or SinkSettings in its own module. `cdc.config.pipeline_file` reads
settings from YAML and the environment.
"""

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

from cdc.config.secret import Secret
from cdc.errors import ConfigError
from cdc.model import TableId

SecretField = Annotated[
    Secret,
    BeforeValidator(lambda value: value if isinstance(value, Secret) else Secret(str(value))),
    PlainSerializer(lambda value: "***" if value else ""),
]


_SECRET_NAME = re.compile(r"secret|password|token|access\.?key|credential", re.IGNORECASE)
"""Names that Spark itself treats as secrets (spark.redaction.regex), and some more."""


VIEW_SCHEMA = "view"
"""The schema of the tables of views; no captured table may be in it."""


def _table(value: object) -> object:
    return TableId.parse(value) if isinstance(value, str) else value


TableField = Annotated[TableId, BeforeValidator(_table), PlainSerializer(str)]


class Section(BaseModel):
    """A section of the pipeline file. Unknown keys are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True)


class PartitionSettings(Section):
    """What happens when a partition is attached or removed: Postgres sends no changes for its rows."""

    removed: Literal["keep", "delete"] = "keep"
    """Rows of a partition that is dropped, detached or truncated: keep them in the sinks and show a notice, or delete
    them by the partition's bounds."""
    attached: Literal["backfill", "notice"] = "backfill"
    """Rows of a partition that is attached: read them with a backfill, or only show a notice that they are missing."""


class TableSettings(Section):
    """One captured table."""

    name: TableField
    """The table as schema.name."""
    columns: tuple[str, ...] = ()
    """Columns to capture; empty means all. The key columns must be among them."""
    mask: dict[str, Literal["drop", "hash", "mask"]] = Field(default_factory=dict)
    """Columns to mask before the log: drop the column, or replace its values by a keyed hash or by ***."""
    where: str = ""
    """Row filter of the publication, an SQL condition over this table's columns (PostgreSQL 15 and newer)."""
    snapshot: Literal["initial", "never", "incremental"] = "initial"
    """How existing rows are read: in one consistent snapshot, not at all, or in chunks while changes are streamed."""
    partitions: PartitionSettings | None = None
    """Overrides the source's `partitions` for this partitioned table."""


class SourceSettings(Section):
    """The Postgres database to capture."""

    host: str = "127.0.0.1"
    port: int = Field(5432, ge=1, le=65535)
    database: str = "postgres"
    user: str = "millrace"
    """A role with LOGIN and REPLICATION, and SELECT on the tables."""
    password: SecretField = Secret("")
    sslmode: Literal["", "disable", "prefer", "require", "verify-ca", "verify-full"] = ""
    """TLS mode. Empty: verify-full for any host but loopback."""
    sslrootcert: str = ""
    """File with the CA certificate of the server."""
    slot: str = Field("millrace", pattern=r"^[a-z0-9_]{1,63}$")
    """The replication slot, one per pipeline; created at the first start."""
    failover: bool = True
    """Whether the slot is a failover slot, which the server's standbys keep up to date (PostgreSQL 17 and newer; older
    servers have none). It costs nothing where there is no standby."""
    publication: str = Field("millrace", min_length=1, max_length=63)
    """The publication; created at the first start if the role may, otherwise `millrace doctor` shows the SQL."""
    tables: tuple[TableSettings, ...] = ()
    heartbeat_seconds: float = Field(10.0, gt=0)
    """How often an idle slot is advanced, so that it does not retain WAL."""
    schema_policy: Literal["evolve", "lenient", "ignore", "exception"] = "evolve"
    """What to do when a table's schema changes: apply every change; apply changes that lose no data and pause the table
    at others; keep the old columns; or stop capture."""
    mask_key: SecretField = Secret("")
    """Key of the `hash` masks."""
    wal_room_gb: float = Field(0.0, ge=0)
    """Disk space on the source for WAL that the slot retains, to estimate when it is full; 0: unknown. The source's
    max_slot_wal_keep_size is used too."""
    snapshot_workers: int = Field(2, ge=1, le=32)
    """Number of parallel connections that read the first snapshot."""
    partitions: PartitionSettings = PartitionSettings()
    """Default for all partitioned tables."""

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
    """The durable log. Each kind of log extends this."""

    kind: str = "segments"
    retention_hours: float = Field(168.0, gt=0)
    """Age in hours after which entries are removed, once every registered consumer has read them."""
    retention_gb: float = Field(100.0, gt=0)
    """Size of the log in GB above which the oldest entries that every registered consumer has read are removed."""


class RetrySettings(Section):
    """What a sink does while its store is down, slow or full."""

    attempts: int = Field(0, ge=0)
    """Consecutive failures after which a sink gives up on a batch; 0: never."""
    first_seconds: float = Field(0.5, gt=0)
    """Wait after the first failure; it doubles with each further failure."""
    longest_seconds: float = Field(30.0, gt=0)
    """Longest wait between two attempts."""
    then: Literal["stop", "park"] = "stop"
    """What to do with a batch after `attempts` failures: stop this sink until `millrace resume`, or write the batch's
    changes as dead letters and continue. A truncate is never a dead letter: the sink keeps retrying it."""


class TableShape(Section):
    """How a sink's copy of a table differs from the table. Columns are named as in the source; see docs/shaping.md."""

    where: str = ""
    """Only rows that meet this SQL condition are stored."""
    rename: dict[str, str] = Field(default_factory=dict)
    """New names of columns; key columns may be renamed too."""
    drop: tuple[str, ...] = ()
    """Columns that are not stored. Expressions may still read them."""
    cast: dict[str, str] = Field(default_factory=dict)
    """Columns to store as another type, by the type's name in Postgres: `amount: double precision`."""
    compute: dict[str, str] = Field(default_factory=dict)
    """New columns, each an SQL expression over the row's columns: `total: price * quantity`."""
    mask: dict[str, Literal["drop", "hash", "mask"]] = Field(default_factory=dict)
    """Columns to mask in this sink: drop the column, or replace its values by a keyed hash (`mask_key`) or by ***."""
    target: str = Field("", pattern=r"^([A-Za-z0-9][A-Za-z0-9._:/{}-]{0,150})?$")
    """Name in the store: of the OpenSearch index, of the Delta table's folder, of Redis keys up to the row's key."""

    def expressions(self) -> Iterator[tuple[str, str]]:
        """Every expression and its place: `where`, `cast.<column>`, `compute.<column>`."""
        if self.where:
            yield "where", self.where
        for column, type_ in self.cast.items():
            yield f"cast.{column}", '"' + column.replace('"', '""') + f'"::{type_}'
        for column, expression in self.compute.items():
            yield f"compute.{column}", expression

    @model_validator(mode="after")
    def _parses(self) -> "TableShape":
        """Only a sink with a shape pays for the import of the parser."""
        from cdc.expressions.expression import parse

        for place, text in self.expressions():
            try:
                parse(text, place)
            except ConfigError as error:
                raise ValueError(str(error).rstrip(".")) from None
        dropped = {*self.drop, *(column for column, rule in self.mask.items() if rule == "drop")}
        for column in (*self.rename, *self.cast, *(name for name, rule in self.mask.items() if rule != "drop")):
            if column in dropped:
                raise ValueError(f"column {column} is dropped, so it cannot be renamed, cast or masked")
        for column in self.mask:
            if column in self.cast:
                raise ValueError(f"column {column} is masked, so it cannot be cast; compute a new column of it instead")
        return self


class SinkSettings(Section):
    """A sink. Each kind of sink extends this."""

    shares_targets: ClassVar[bool] = False
    """Whether several tables may have one target."""

    kind: str
    name: str = Field("", pattern=r"^[a-z0-9_-]{0,40}$")
    """Unique in the pipeline; defaults to the kind."""
    tables: tuple[TableField, ...] = ()
    """Tables and views (`view.<name>`) for this sink; empty means all."""
    trigger_seconds: float = Field(0.0, ge=0)
    """Minimum time between two batches; 0 starts the next batch at once."""
    max_batch_changes: int = Field(0, ge=0)
    """Approximate maximum of changes in one batch; limits memory. 0: 50,000; on a cluster more while the sink is
    behind, as many as its tasks apply in 8 seconds."""
    retry: RetrySettings = Field(default_factory=RetrySettings)
    on_loss: Literal["stop", "refill"] = "stop"
    """When the store has lost data of a table (an index deleted, a cache flushed, a table restored to an older
    version): stop the table until `millrace refill`, or recreate it and read its rows again at once."""
    shape: dict[TableField, TableShape] = Field(default_factory=dict)
    """By table, how the copy in this sink differs: `public.orders: {where: "status <> 'draft'", drop: [note]}`."""
    mask_key: SecretField = Secret("")
    """Key of the `hash` masks in `shape`."""
    query: Literal["shared", "own"] = "shared"
    """`shared`: sinks that keep up share one Spark query; one that falls behind gets its own query until it has caught
    up. `own` (or a trigger_seconds): this sink always has its own query."""

    def target(self, table: TableId) -> str:
        """The name in the store that `shape` gives to a table; empty: the sink's own name for it."""
        return self.shape[table].target if table in self.shape else ""

    def sharing(self, table: TableId) -> tuple[TableId, ...]:
        """The tables with the same target as this one, itself included; none unless there are several."""
        target = self.target(table)
        found = tuple(sorted(one for one, shape in self.shape.items() if target and shape.target == target))
        return found if len(found) > 1 else ()

    @model_validator(mode="after")
    def _shapes_fit(self) -> "SinkSettings":
        for table, shape in self.shape.items():
            if "hash" in shape.mask.values() and not self.mask_key:
                raise ValueError(f"shape.{table}: a column is hashed without a key; set mask_key of this sink")
            if self.tables and table not in self.tables:
                raise ValueError(f"shape.{table}: the sink does not have this table; add it to its tables")
            if self.sharing(table) and not self.shares_targets:
                names = ", ".join(map(str, self.sharing(table)))
                raise ValueError(f"shape: {names} have one target, {shape.target}; give each its own")
        return self

    @model_validator(mode="after")
    def _name_defaults_to_kind(self) -> "SinkSettings":
        if not self.name:
            object.__setattr__(self, "name", self.kind)
        return self


class ViewSettings(Section):
    """A view: a table derived from captured tables. Each kind of view extends this."""

    kind: str
    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,40}$")
    """Unique in the pipeline. The view's changes are in the log as those of table `view.<name>`."""

    @property
    def table(self) -> TableId:
        """The table of the view's changes."""
        return TableId(VIEW_SCHEMA, self.name)


class HttpSettings(Section):
    """The HTTP server: health endpoints, metrics and the web page."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8080, ge=0, le=65535)
    token: SecretField = Secret("")
    """Bearer token; required for any address but loopback."""


class SparkSettings(Section):
    """The Spark driver that applies the log to the sinks."""

    master: str = "local[2]"
    """Where tasks run: local threads (`local[2]`), or a cluster (`spark://host:7077`, `k8s://https://host:6443`,
    `yarn`), with the driver in this process: see docs/cluster.md. With local threads the driver's process applies the
    changes; on a cluster, tasks on the executors do."""
    memory: str = "1g"
    """Heap size of the driver."""
    conf: dict[str, str] = Field(default_factory=dict)
    """Further Spark settings; they override Millrace's own."""
    secrets: dict[str, SecretField] = Field(default_factory=dict)
    """Spark settings that must stay secret, for instance the keys of an object store. They appear in no process
    list."""

    @property
    def on_cluster(self) -> bool:
        """Whether executors are processes of their own (also those of Spark's `local-cluster`, for tests)."""
        return re.fullmatch(r"local(\[.*\])?", self.master) is None

    @model_validator(mode="after")
    def _master_is_no_connect_server(self) -> "SparkSettings":
        if self.master.startswith("sc://"):
            raise ValueError(
                "spark.master: Spark Connect is refused: its sessions have no SparkContext, by which Millrace ships its"
                " code, and foreachBatch runs in another process, which has none of the sinks and positions of this"
                " one; name the cluster itself: spark://, k8s:// or yarn"
            )
        return self

    @model_validator(mode="after")
    def _secrets_are_no_conf(self) -> "SparkSettings":
        seen = [name for name in self.conf if _SECRET_NAME.search(name)]
        if seen:
            raise ValueError(f"{seen[0]} looks like a secret; put it under spark.secrets, where it is not shown")
        foreign = [name for name in self.secrets if not name.startswith("spark.")]
        if foreign:
            raise ValueError(f"{foreign[0]} is not a Spark setting: their names begin with spark.")
        return self


class BudgetSettings(Section):
    """Limits for the pipeline's use of disk and memory."""

    free_mb: float = Field(200.0, ge=0)
    """Free disk space under the state folder below which capture stops reading until there is more; meanwhile the slot
    retains the WAL."""
    state_gb: float = Field(0.0, ge=0)
    """Size of the state folder above which capture stops reading; 0: no limit. It grows while sinks are down or
    paused."""
    capture_memory_mb: float = Field(2048.0, ge=0)
    """Resident memory above which the capture process is restarted; 0: no limit."""
    views_memory_mb: float = Field(0.0, ge=0)
    """Resident memory above which the views process is restarted; 0: no limit."""
    apply_memory_mb: float = Field(0.0, ge=0)
    """Resident memory above which the apply process is restarted, with Spark's JVM and workers; 0: no limit. Set it at
    least 1.5 GB above spark.memory."""


class Settings(Section):
    """A whole pipeline."""

    state: Path = Path(".millrace/state")
    """Folder for the log, checkpoints and status; created with mode 0700."""
    source: SourceSettings = Field(default_factory=SourceSettings)
    log: LogSettings = Field(default_factory=LogSettings)
    sinks: tuple[SinkSettings, ...] = ()
    views: tuple[ViewSettings, ...] = ()
    """Tables derived from captured tables: each with a kind and a name."""
    http: HttpSettings = Field(default_factory=HttpSettings)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    budgets: BudgetSettings = Field(default_factory=BudgetSettings)

    def tables_of(self, sink: SinkSettings) -> tuple[TableId, ...]:
        """The tables of a sink, views included: those it names, else all."""
        return tuple(sink.tables) or self.tables

    @property
    def tables(self) -> tuple[TableId, ...]:
        """Every table of the pipeline: the captured ones and those of views."""
        return (*self.captured, *(view.table for view in self.views))

    @property
    def captured(self) -> tuple[TableId, ...]:
        """The tables that are captured from the source."""
        return tuple(table.name for table in self.source.tables)

    @model_validator(mode="after")
    def _names_are_unique(self) -> "Settings":
        for what, names in (("sinks", [sink.name for sink in self.sinks]), ("views", [it.name for it in self.views])):
            doubled = sorted({name for name in names if names.count(name) > 1})
            if doubled:
                raise ValueError(f"two {what} are named {doubled[0]!r}; give each its own name")
        return self

    @model_validator(mode="after")
    def _views_have_a_log_of_their_own(self) -> "Settings":
        if self.views and self.log.kind == "debezium":
            raise ValueError("views: a log of kind debezium is written by a connector, and views write to the log")
        return self

    @model_validator(mode="after")
    def _views_of_sinks_exist(self) -> "Settings":
        known = {view.table for view in self.views}
        for sink in self.sinks:
            for table in sink.tables:
                if table.schema == VIEW_SCHEMA and table not in {*known, *self.captured}:
                    raise ValueError(
                        f"sink {sink.name} names {table}, which is no view of this pipeline{_near(table, known)}"
                    )
        return self

    @model_validator(mode="after")
    def _view_schema_is_free(self) -> "Settings":
        taken = [str(table) for table in self.captured if table.schema == VIEW_SCHEMA and self.views]
        if taken:
            raise ValueError(
                f"{taken[0]} is in schema {VIEW_SCHEMA}, which is reserved for views; it cannot be captured"
            )
        return self

    @model_validator(mode="after")
    def _shaped_tables_are_captured(self) -> "Settings":
        captured = {*map(str, self.captured), *(str(view.table) for view in self.views)}
        for sink in self.sinks:
            for table in sink.shape if captured else ():
                if str(table) not in captured:
                    near = get_close_matches(str(table), captured, 1)
                    hint = f"did you mean {near[0]}?" if near else f"tables: {', '.join(sorted(captured))}"
                    raise ValueError(f"sink {sink.name!r}: shape names {table}, which is not in source.tables; {hint}")
                if sink.target(table) in captured - {str(table)}:
                    raise ValueError(f"sink {sink.name!r}: the target of {table} is the name of another table")
        return self


def _near(table: TableId, known: Iterable[TableId]) -> str:
    close = get_close_matches(str(table), list(map(str, known)), n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def redacted(value: object) -> object:
    """Settings as plain data, every secret as stars.

    Not pydantic's own dump, which would write the value of a secret in a sink's settings.
    """
    if isinstance(value, Secret):
        return "***" if value else ""
    if isinstance(value, Section):
        return {name: redacted(item) for name, item in value}
    if isinstance(value, dict):
        return {str(key): redacted(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redacted(item) for item in value]
    return value if isinstance(value, (int, float, str, type(None))) else str(value)
