"""The merge by Spark's MERGE, for batches that touch more of a table than fits in memory.

It sets no transaction id: `txnAppId` and `txnVersion` are settings of a whole session, shared by every query in it, and
Delta would silently skip a batch with a known number. The rows' versions decide what is applied.
"""

from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from sinks.delta.rows.changes import PARTIAL, TypedChanges, keep_flag
from sinks.delta.schema.layout import DELETED, VERSION
from sinks.delta.write.merge import WRITER

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

_USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"


def merge_by_spark(session: "SparkSession", table: DeltaTable, changes: TypedChanges) -> None:
    """Merge in one commit. Reject orphans first. Raises CommitFailedError where another writer committed first."""
    from delta.exceptions import DeltaConcurrentModificationException
    from delta.tables import DeltaTable as SparkTable

    own = session.newSession()  # its settings must not affect the commits of other queries
    own.conf.set(_USER_METADATA, f"{WRITER}={changes.lsn}")
    rows = frame_of(own, changes.rows).alias("source")
    on = " AND ".join(f"target.{_quoted(name)} = source.{_quoted(name)}" for name in changes.layout.key)
    newer = f"source.{VERSION} > target.{VERSION}"
    if changes.partial:
        newer += f" AND (NOT source.{PARTIAL} OR NOT target.{DELETED})"
    merger = SparkTable.forPath(own, table.table_uri).alias("target").merge(rows, on)
    merger = merger.whenMatchedUpdate(newer, _updates(changes))
    merger = merger.whenNotMatchedInsert(f"NOT source.{PARTIAL}", _inserts(changes))
    try:
        merger.execute()
    except DeltaConcurrentModificationException as error:
        raise CommitFailedError("another writer of the table committed first") from error


def frame_of(session: "SparkSession", rows: pa.Table) -> "DataFrame":
    """Arrow rows as a DataFrame, in one chunk: from a table whose first chunk is empty, PySpark 4.2 silently makes an
    empty DataFrame, and many chunks are many small tasks."""
    return session.createDataFrame(rows.combine_chunks())


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _inserts(changes: TypedChanges) -> dict[str, "str | Column"]:
    return {_quoted(name): f"source.{_quoted(name)}" for name in changes.layout.arrow.names}


def _updates(changes: TypedChanges) -> dict[str, "str | Column"]:
    kept = {
        _quoted(
            name
        ): f"CASE WHEN source.{keep_flag(number)} THEN target.{_quoted(name)} ELSE source.{_quoted(name)} END"
        for number, name in enumerate(changes.kept)
    }
    return {**_inserts(changes), **kept}
