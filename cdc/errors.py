"""Every error that Millrace raises on purpose.

    MillraceError                 message, remedy; transient or not; exit code 1
    ├── ConfigError               exit 2: the pipeline file, an environment override or a flag is wrong
    ├── EnvironmentFault          exit 3: this machine lacks something (Java, a port, a writable folder)
    ├── TakenOver                 exit 4: another daemon is active now
    ├── SourceError               the Postgres side
    │   ├── SourceLost            transient: the connection went away
    │   ├── SlotBusy              transient: another process reads the slot
    │   ├── SlotLost              the slot is gone or invalidated: only a new snapshot helps
    │   ├── PositionMismatch      log and slot disagree: streaming on would skip changes silently
    │   ├── SourceRefused         privilege, setting or replica identity missing: doctor shows the SQL
    │   └── SchemaRefused         the schema policy forbids this change of a table
    ├── DecodeError               malformed bytes; has their offset, never the bytes
    ├── LogError                  the durable log
    │   ├── LogFull               transient: no disk space; reading stops until there is some
    │   ├── LogLost               transient: the log's server does not answer
    │   ├── LogCorrupt            a segment or record that cannot be read
    │   │   └── ChangesRemoved    retention removed changes that a reader has not read
    │   ├── ChangeRefused         a change that a reader's options do not allow
    │   └── LogFenced             another writer took over: stop at once
    ├── ViewError                 a view cannot be computed: it stops, the others continue
    │   └── ViewWaits             transient: a table that a view needs is not in the log yet
    └── SinkError                 a store
        ├── Busy                  transient: retry after `retry_after` seconds
        ├── Lost                  transient: reconnect and apply again
        ├── GaveUp                more transient failures in a row than the sink's retry policy allows
        ├── StoreRefused          the store refuses every table: credentials, certificate
        ├── TableRefused          the store cannot take one table: it waits, the sink's other tables continue
        └── Rejected              the store refuses these rows for ever: they become dead letters

Messages name objects, positions and counts. They never contain a row's values, a DSN or a secret.
"""

from collections.abc import Sequence
from dataclasses import dataclass


class MillraceError(Exception):
    """An error with a remedy: what happened, where, and what the user can do."""

    exit_code = 1
    transient = False

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".rstrip()


class ConfigError(MillraceError):
    """The configuration is wrong; raised before any connection is made."""

    exit_code = 2


class EnvironmentFault(MillraceError):
    """The machine lacks something that only its owner can provide."""

    exit_code = 3


class TakenOver(MillraceError):
    """This daemon lost its lease: another one is active, or may become so."""

    exit_code = 4


class SourceError(MillraceError):
    """The source database refused or failed."""


class SourceLost(SourceError):
    """The connection to the source was lost; reconnect and continue."""

    transient = True


class SlotBusy(SourceError):
    """Another process reads the slot: Postgres allows only one."""

    transient = True


class SlotLost(SourceError):
    """The slot no longer has the WAL that is needed."""


class PositionMismatch(SourceError):
    """The log's position and the slot's position contradict each other."""


class SourceRefused(SourceError):
    """The source lacks a privilege, a setting or a replica identity."""


class SchemaRefused(SourceError):
    """A table changed in a way that the schema policy forbids."""


class DecodeError(MillraceError):
    """Malformed bytes. `offset` is their place in the message that was decoded."""

    def __init__(self, message: str, offset: int, remedy: str = "") -> None:
        super().__init__(f"{message} (at byte {offset})", remedy)
        self.offset = offset


class LogError(MillraceError):
    """The durable log failed."""


class LogFull(LogError):
    """No disk space left for the log."""

    transient = True


class LogLost(LogError):
    """The log's server does not answer. Readers will not see a partial write."""

    transient = True


class LogCorrupt(LogError):
    """A part of the log cannot be read."""


class ChangesRemoved(LogCorrupt):
    """Retention removed changes that a reader has not read: reading on would skip them silently."""


class ChangeRefused(LogError):
    """A reader met a change that its options do not allow it to pass on."""


class LogFenced(LogError):
    """A newer writer owns the log."""


class ViewError(MillraceError):
    """A view cannot be computed any further."""


class ViewWaits(ViewError):
    """What a view needs is not there yet."""

    transient = True


class SinkError(MillraceError):
    """A store failed."""


class Busy(SinkError):
    """The store is overloaded, full or read-only for now."""

    transient = True

    def __init__(self, message: str, remedy: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, remedy)
        self.retry_after = retry_after


class Lost(SinkError):
    """The store cannot be reached, or its answer was lost; what was sent may or may not have been applied."""

    transient = True


class GaveUp(SinkError):
    """A store failed more often in a row than its retry policy allows; `why` is the last failure."""

    def __init__(self, message: str, why: MillraceError) -> None:
        super().__init__(message, why.remedy)
        self.why = why


class StoreRefused(SinkError):
    """The store refuses every table, so the whole sink stops."""


class TableRefused(SinkError):
    """A store cannot take a table for now; `why` is its error."""

    def __init__(self, table: str, why: MillraceError) -> None:
        super().__init__(why.message, why.remedy)
        self.table = table
        self.why = why


@dataclass(frozen=True, slots=True)
class RejectedItem:
    """One change that a store refuses for ever. `reason` is the store's, without values."""

    table: str
    key: str
    version: int
    reason: str


class Rejected(SinkError):
    """Some rows of the batch can never be applied; the others were applied."""

    def __init__(self, items: Sequence[RejectedItem]) -> None:
        super().__init__(f"{len(items)} change(s) refused by the store", "See: millrace dlq list")
        self.items = tuple(items)
