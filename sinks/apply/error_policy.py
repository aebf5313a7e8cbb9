"""What an applier does about an error of its store: raise it, wait, give up, or reject the rows. Pure decisions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cdc import backoff
from cdc.config.settings import RetrySettings
from cdc.errors import Busy, GaveUp, MillraceError, RejectedItem, SinkError, StoreRefused, TableRefused
from cdc.model import TableId, TableSchema
from cdc.ports import Batch


@dataclass(frozen=True, slots=True)
class RetryDecision:
    """What follows a failed attempt; `seconds` is how long to wait before the next one."""

    action: Literal["raise", "give up", "wait"]
    seconds: float = 0.0


def decide(error: MillraceError, failures: int, attempts: int, policy: RetrySettings) -> RetryDecision:
    """Decide after `failures` failed attempts in a row, of at most `attempts` (0: without limit)."""
    if not error.transient:
        return RetryDecision("raise")
    if failures == attempts:
        return RetryDecision("give up")
    asked = error.retry_after if isinstance(error, Busy) else 0.0
    return RetryDecision("wait", max(asked, backoff.delay(failures, policy.first_seconds, policy.longest_seconds)))


def attempts_of(batch: Batch | None, policy: RetrySettings) -> int:
    """How often a batch, or work on the store without rows (None), is tried before the sink gives up; 0: no limit.

    A dead letter cannot hold a truncate or a removed range: skipping either would leave deleted rows in the store.
    """
    as_dead_letters = batch is not None and not (batch.truncated or batch.removed)
    return policy.attempts if policy.then == "stop" or as_dead_letters else 0


def rejected_after(error: GaveUp, batch: Batch) -> Sequence[RejectedItem]:
    """Every row of a batch that the sink gave up, as a rejected change."""
    rows = zip(*(batch.rows.column(name).to_pylist() for name in ("key", "version")), strict=True)
    table = str(batch.schema.table)
    return [RejectedItem(table, key, version, f"given up: {error.why.message}") for key, version in rows]


def table_error(table: TableId, error: SinkError) -> SinkError:
    """A store's answer to one table: TableRefused, unless the error is transient or concerns every table."""
    return error if error.transient or isinstance(error, StoreRefused) else TableRefused(str(table), error)


def check_key(schema: TableSchema) -> None:
    """Raise TableRefused for a table without a key.

    A log that was written by another program does not say which columns are the key; its tables pass.
    """
    if schema.key or not (schema.oid or schema.identity != "d"):
        return
    error = SinkError(
        f"table {schema.table} has no key, so no store could tell its rows apart or delete one.",
        f"Give it a primary key, or run: ALTER TABLE {schema.table} REPLICA IDENTITY FULL.",
    )
    raise TableRefused(str(schema.table), error)
