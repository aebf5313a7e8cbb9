"""The replication slot: created once, checked at every connection, never silently replaced.

Postgres silently skips or fast-forwards when a position does not fit the slot. So the slot's identity is kept in the
log (mark `source`), and `check` compares it with the server at every start and reconnect.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import psycopg
from psycopg import pq

from cdc.capture.replication.connection import run_command
from cdc.capture.source.connect import BRIEF_SECONDS, connect, explain_result, explained
from cdc.config.settings import SourceSettings
from cdc.errors import LogCorrupt, PositionMismatch, SlotLost, SourceError, SourceLost, SourceRefused
from cdc.model import ZERO_LSN, Lsn, format_lsn, parse_lsn

Connection = psycopg.Connection[tuple[Any, ...]]

MARK = "source"
"""The log's mark with a SourceIdentity."""

RESYNC = "Take a new snapshot into a new slot with: millrace resync"
"""The remedy if missed changes can no longer be read."""

START_OVER = "Versions are LSNs: start with a new state folder and empty stores."
"""The remedy if the stores would ignore every row of the server."""

MOST_PADDING = 256 << 20
"""Bytes of WAL that a resync writes at most so that the server's position passes the log's end."""
_FAILOVER_SINCE = 170_000


@dataclass(frozen=True, slots=True)
class SlotCreated:
    """A new slot. Its snapshot can be imported only while the connection that created it stays open and idle."""

    slot: str
    consistent_point: Lsn
    snapshot_name: str
    restart_lsn: Lsn
    system_id: str
    timeline: int


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """The slot and server that the log was filled from."""

    slot: str
    system_id: str
    timeline: int
    consistent_point: Lsn
    restart_lsn: Lsn

    def mark(self) -> str:
        """The text of the log's mark."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of_mark(cls, text: str) -> Self:
        """Parse a mark. Raises LogCorrupt if it is invalid."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            raise LogCorrupt("The log's mark `source` is invalid.", RESYNC) from None

    @classmethod
    def of_created(cls, made: SlotCreated) -> Self:
        """The identity of a slot that was just created."""
        return cls(made.slot, made.system_id, made.timeline, made.consistent_point, made.restart_lsn)


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """The result of IDENTIFY_SYSTEM; `flushed` is the end of the WAL that is flushed to disk."""

    system_id: str
    timeline: int
    flushed: Lsn
    forks: Mapping[int, Lsn] = field(default_factory=dict)
    """Where the server left each earlier timeline: it does not have that timeline's WAL beyond this LSN."""


@dataclass(frozen=True, slots=True)
class SlotFacts:
    """A row of pg_replication_slots."""

    name: str
    plugin: str
    database: str
    active_pid: int
    restart_lsn: Lsn
    confirmed: Lsn
    wal_status: str
    retained_bytes: int
    failover: bool = False
    source_lsn: Lsn = ZERO_LSN
    """The end of the server's WAL when the slot was read."""
    safe_bytes: int | None = None
    """How much more WAL may be written before the slot is lost; None: max_slot_wal_keep_size is unlimited."""


_SLOT = """
select slot_name::text, coalesce(plugin, '')::text, coalesce(database, '')::text, coalesce(active_pid, 0),
       coalesce(restart_lsn, '0/0')::text, coalesce(confirmed_flush_lsn, '0/0')::text, coalesce(wal_status, 'lost'),
       coalesce(pg_wal_lsn_diff(wal.ends, restart_lsn), 0)::bigint,
       coalesce((to_jsonb(s) ->> 'failover')::boolean, false),
       coalesce(wal.ends, '0/0')::text, safe_wal_size
  from pg_catalog.pg_replication_slots s,
       (select case when pg_is_in_recovery() then pg_last_wal_receive_lsn() else pg_current_wal_lsn() end) wal (ends)
 where slot_name = %s
"""


def find(connection: Connection, name: str) -> SlotFacts | None:
    """The slot, or None."""
    with explained(f"Looking up slot {name}"):
        row = connection.execute(_SLOT, (name,)).fetchone()
    if row is None:
        return None
    name, plugin, database, pid, restart, confirmed, status, retained, failover, now, safe = row
    positions = parse_lsn(restart), parse_lsn(confirmed)
    return SlotFacts(name, plugin, database, pid, *positions, status, int(retained), failover, parse_lsn(now), safe)


def identify(replication: Connection) -> ServerIdentity:
    """The identity of the server of a replication connection."""
    row = _one_row(replication, "IDENTIFY_SYSTEM", "Identifying the server", _check_timeout)
    timeline = int(row["timeline"])
    return ServerIdentity(row["systemid"], timeline, parse_lsn(row["xlogpos"]), _forks(replication, timeline))


def _forks(replication: Connection, timeline: int) -> dict[int, Lsn]:
    if timeline == 1:
        return {}
    row = _one_row(replication, f"TIMELINE_HISTORY {timeline}", "Reading the server's timeline history", _check_timeout)
    lines = (line.split("\t") for line in row["content"].splitlines())
    return {int(line[0]): parse_lsn(line[1]) for line in lines if line[0].strip().isdigit()}


def _check_timeout(seconds: float) -> None:
    if seconds >= BRIEF_SECONDS:
        raise SourceLost(f"The source has not answered for {seconds:.0f} seconds.", "It is retried automatically.")


def check(stored: SourceIdentity, slot: SlotFacts | None, server: ServerIdentity, durable: Lsn) -> None:
    """Raise unless streaming from `durable`, the log's end, skips nothing.

    The slot may be behind the log, after a crash before the confirmation. It may be ahead only up to its consistent
    point: every later LSN was durable in the log before it was confirmed.
    """
    if error := _mismatch(stored, slot, server, durable):
        raise error


def _mismatch(
    stored: SourceIdentity, slot: SlotFacts | None, server: ServerIdentity, durable: Lsn
) -> SourceError | None:
    if server.system_id != stored.system_id:
        return PositionMismatch(
            f"The log was filled from system {stored.system_id}, but this server is system {server.system_id}.",
            f"Point source.host at the former server. If this one replaces it: {RESYNC}",
        )
    if server.flushed < durable:
        return PositionMismatch(
            f"The log reaches {format_lsn(durable)}, but the server's WAL ends at {format_lsn(server.flushed)}: "
            "the server was restored from a backup, or a failover lost WAL.",
            RESYNC if durable - server.flushed <= MOST_PADDING else START_OVER,
        )
    if slot is None:
        moved = f" (timeline {stored.timeline}, now {server.timeline})" if server.timeline != stored.timeline else ""
        return SlotLost(
            f"Slot {stored.slot} does not exist{moved}; changes after {format_lsn(durable)} may be lost.", RESYNC
        )
    return _unfit(stored, slot, server, durable)


def _unfit(stored: SourceIdentity, slot: SlotFacts, server: ServerIdentity, durable: Lsn) -> SourceError | None:
    if slot.wal_status == "lost":
        return SlotLost(
            f"Slot {slot.name} was invalidated: its WAL after {format_lsn(durable)} has been removed.",
            f"Raise max_slot_wal_keep_size. {RESYNC}",
        )
    if slot.plugin != "pgoutput":
        return SourceRefused(f"Slot {slot.name} uses plugin {slot.plugin or 'none'}, not pgoutput.", RESYNC)
    if slot.confirmed > max(durable, stored.consistent_point):
        return PositionMismatch(
            f"Slot {slot.name} is confirmed up to {format_lsn(slot.confirmed)}, beyond the log's end "
            f"{format_lsn(durable)}: it was recreated or moved by hand, and the changes in between are not in the log.",
            RESYNC,
        )
    return _forked(stored, slot, server, durable) if server.timeline != stored.timeline else None


def _forked(stored: SourceIdentity, slot: SlotFacts, server: ServerIdentity, durable: Lsn) -> SourceError | None:
    """A failover slot may be used on another timeline, unless the log has changes that this timeline lacks."""
    if not slot.failover:
        return PositionMismatch(
            f"The server is on timeline {server.timeline}, the log was filled from timeline {stored.timeline}: "
            "after a failover or a point-in-time recovery its WAL may differ.",
            RESYNC,
        )
    fork = server.forks.get(stored.timeline)
    if fork is None:
        return PositionMismatch(
            f"The server is on timeline {server.timeline}, which does not descend from timeline {stored.timeline}, "
            "from which the log was filled.",
            RESYNC,
        )
    if fork < durable:
        return PositionMismatch(
            f"The log reaches {format_lsn(durable)} on timeline {stored.timeline}, but the server left that timeline "
            f"at {format_lsn(fork)}: the promoted standby lacked WAL, and the stores have changes that the "
            "source has lost.",
            f"{RESYNC}. In future, name the standby's slot in synchronized_standby_slots.",
        )
    return None


@contextmanager
def create(source: SourceSettings, timeout: float, waiting: Callable[[str], None]) -> Iterator[SlotCreated]:
    """Create the slot and keep its exported snapshot while the block runs.

    Postgres waits for every transaction that is writing; `waiting` is called with their pids, and after `timeout`
    seconds SourceRefused names them, and no slot is left behind. The slot stays after the block, also if that fails.
    """
    with (
        closing(connect(source, "millrace slot", replication=True)) as replication,
        connect(source) as ordinary,
    ):
        server = identify(replication)
        blockers = _Blockers(ordinary, replication.info.backend_pid, source.slot, timeout, waiting)
        failover = source.failover and _has_failover(ordinary)
        options = "(SNAPSHOT 'export', FAILOVER true)" if failover else "EXPORT_SNAPSHOT"
        command = f'CREATE_REPLICATION_SLOT "{source.slot}" LOGICAL pgoutput {options}'
        try:
            row = _one_row(replication, command, f"Creating slot {source.slot}", blockers.check)
        except BaseException:
            # Closing the connection is not enough: the server would create the slot once the others have committed.
            replication.cancel_safe(timeout=5)
            raise
        made = find(ordinary, source.slot)
        yield SlotCreated(
            source.slot,
            parse_lsn(row["consistent_point"]),
            row["snapshot_name"],
            made.restart_lsn if made else ZERO_LSN,
            server.system_id,
            server.timeline,
        )


def allow_failover(replication: Connection, ordinary: Connection, source: SourceSettings, facts: SlotFacts) -> None:
    """Make an existing slot a failover slot, if it is none and the settings and the server allow it."""
    if source.failover and not facts.failover and not facts.active_pid and _has_failover(ordinary):
        command = f'ALTER_REPLICATION_SLOT "{facts.name}" (FAILOVER true)'
        result = run_command(replication.pgconn, command, _check_timeout)
        if result.status != pq.ExecStatus.COMMAND_OK:
            raise explain_result(result, f"Making {facts.name} a failover slot")


def _has_failover(connection: Connection) -> bool:
    """Whether the server can have failover slots: not before version 17, and not while it is a standby itself."""
    if connection.info.server_version < _FAILOVER_SINCE:
        return False
    with explained("Asking whether the server is a standby"):
        return connection.execute("select pg_is_in_recovery()").fetchone() == (False,)


@dataclass(slots=True)
class _Blockers:
    """Reports the transactions that block a slot's creation."""

    connection: Connection
    creator: int
    slot: str
    timeout: float
    waiting: Callable[[str], None]

    def check(self, seconds: float) -> None:
        pids = self._pids()
        if seconds >= self.timeout:
            raise SourceRefused(
                f"Creating slot {self.slot} waited {seconds:.0f} s for open transactions ({pids or 'not known'}).",
                "End them, for instance with select pg_terminate_backend(pid), and start again.",
            )
        if pids:
            self.waiting(f"creating slot {self.slot}: waiting for open transactions ({pids})")

    def _pids(self) -> str:
        with explained("Looking up what blocks the slot's creation"):
            row = self.connection.execute("select pg_blocking_pids(%s)", (self.creator,)).fetchone()
        pids = sorted(set(row[0] if row else []))
        return ", ".join("a prepared transaction" if pid == 0 else f"pid {pid}" for pid in pids)


def evict(connection: Connection, facts: SlotFacts) -> None:
    """End the walsender that uses the slot: an earlier connection of ours that is dead, which the server would notice
    only after wal_sender_timeout."""
    with explained(f"Freeing slot {facts.name}"):
        connection.execute(
            "select pg_terminate_backend(active_pid) from pg_replication_slots"
            " where slot_name = %s and active_pid = %s",
            (facts.name, facts.active_pid),
        )


def drop(connection: Connection, name: str) -> None:
    """Drop the slot; no error if it does not exist."""
    with explained(f"Dropping slot {name}"):
        connection.execute(
            "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s", (name,)
        )


def _one_row(replication: Connection, command: str, doing: str, waiting: Callable[[float], None]) -> dict[str, str]:
    result = run_command(replication.pgconn, command, waiting)
    if result.status != pq.ExecStatus.TUPLES_OK:
        raise explain_result(result, doing)
    return {
        (result.fname(column) or b"").decode(): (result.get_value(0, column) or b"").decode()
        for column in range(result.nfields)
    }
