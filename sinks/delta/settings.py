"""The settings of a Delta sink, and which of them cannot be combined."""

import re
from typing import Literal

from pydantic import Field, model_validator

from cdc.config.settings import SecretField, SinkSettings, TableField
from sinks.delta.schema.soft_deletes import DeleteCondition

TypeChange = Literal["stop", "new_column"]
Dropped = Literal["keep", "remove"]
SequenceBy = Literal["version", "commit_ts"]
_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")
Engine = Literal["auto", "native", "spark"]


class DeltaSettings(SinkSettings):
    """A folder or bucket of Delta tables."""

    kind: Literal["delta"] = "delta"
    path: str = Field(min_length=1)
    """Folder of the tables, or an object store's URI. Each table is in `schema.name` below it."""
    storage_options: dict[str, SecretField] = Field(default_factory=dict)
    """Options of the object store, by deltalake's names."""
    as_text: dict[TableField, tuple[str, ...]] = Field(default_factory=dict)
    """Columns to store as text, by table: for values that fit no typed column (infinity, BC, NaN in a decimal)."""
    stored_as_scd_type: Literal[1, 2] = 1
    """1: the current rows. 2: every version of a row, with `__START_AT` and `__END_AT`; the current one has no end."""
    sequence_by: SequenceBy = "version"
    """The value of `__START_AT` and `__END_AT`: the change's LSN, or the time of its commit."""
    keys: dict[TableField, tuple[str, ...]] = Field(default_factory=dict)
    """The expected key columns of tables; others are an error. The key is the primary key or the replica identity: a
    delete has no other columns."""
    apply_as_deletes: dict[TableField, str] = Field(default_factory=dict)
    """By table, when a row counts as deleted (soft deletes): `column`, `column IS [NOT] NULL`, `column = value`."""
    append_only: bool = False
    """Store a changelog, one row per change, instead of the current rows."""
    maintain_minutes: float = Field(60.0, ge=0)
    """How often a table that is written is sorted, purged and vacuumed, in the background; 0: never."""
    keep_tombstones_hours: float = Field(24.0 * 30, gt=0)
    """How long a deleted row stays as a tombstone, so that no replay brings it back."""
    keep_history_hours: float = Field(24.0, ge=1)
    """How far back time travel reaches; older files and commits are removed. Each batch leaves old files, so a week of
    batches every second leaves half a million."""
    deletion_vectors: bool = True
    """Write scattered changes of a large table with deletion vectors instead of copying files, on disks, in S3 and for
    current rows (type 1). Readers must support deletion vectors: most do; deltalake's `scan` does, its
    `to_pyarrow_table` does not."""
    engine: Engine = "auto"
    """Who writes current rows (type 1). `native`: deltalake and Millrace's deletion vectors. `spark`: Spark's MERGE for
    every batch, on local and shared file systems only. `auto`: native, and Spark's MERGE for a batch that touches more
    than 1 GB of files and cannot use deletion vectors; in an object store always native."""
    type_change: TypeChange = "stop"
    """When the type of a column changes beyond widening: stop the table, or continue in a new column `name__type`."""
    dropped_columns: Dropped = "keep"
    """A column that the source dropped: keep it, null in new rows, or remove it, by rewriting the table."""
    renamed_columns: dict[TableField, dict[str, str]] = Field(default_factory=dict)
    """By table, old names of columns to new ones. Without it a rename is a dropped column and a new one: Postgres does
    not say which it was, and a guess could store values under the wrong name."""

    @model_validator(mode="after")
    def _targets_are_folders(self) -> "DeltaSettings":
        for shape in self.shape.values():
            if shape.target and not _FOLDER.fullmatch(shape.target):
                raise ValueError(
                    f"shape: {shape.target!r} is no name of a folder below path, like sales or shop/orders"
                )
        return self

    @model_validator(mode="after")
    def _one_form(self) -> "DeltaSettings":
        if self.append_only and self.stored_as_scd_type == 2:
            raise ValueError("append_only and stored_as_scd_type: 2 exclude each other; use two sinks")
        if self.append_only and self.apply_as_deletes:
            raise ValueError("append_only stores changes unmodified: remove apply_as_deletes")
        if self.engine == "spark" and "://" in self.path:
            raise ValueError(
                "engine: spark cannot write to an object store: Spark and deltalake do not see each other's commits "
                "there, and Spark's driver for S3 (hadoop-aws) is not part of Millrace; use engine: native"
            )
        if self.engine == "spark" and (self.append_only or self.stored_as_scd_type == 2):
            raise ValueError("engine: spark writes current rows only: remove it, append_only or stored_as_scd_type: 2")
        for condition in self.apply_as_deletes.values():
            DeleteCondition.parse(condition)
        return self


SETTINGS = DeltaSettings
