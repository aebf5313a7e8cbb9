"""Preflight checks of the source, before anything is created or read.

Each finding has the object that was checked, the verdict, and the command to run if it is not OK. Nothing is changed.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import psycopg

from cdc.capture.source import catalog, publication, replica_identity, slot
from cdc.capture.source.catalog import TableFacts, relation
from cdc.capture.source.connect import address, connect, explained, is_local
from cdc.capture.source.keys import FULL
from cdc.config.settings import SourceSettings
from cdc.errors import SourceError

Connection = psycopg.Connection[tuple[Any, ...]]

OLDEST_SERVER = 140_000
"""Version 13 sends no logical messages, which backfills need, and does not stream open transactions."""


class Verdict(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    check: str
    verdict: Verdict
    object: str
    message: str
    remedy: str = ""


def examine(source: SourceSettings) -> list[Finding]:
    """Check the source with the pipeline's own role. An unreachable source is a finding too."""
    found = list(_installation())
    try:
        with connect(source, "millrace doctor") as connection:
            found.append(_ok("connection", address(source), f"reached as {source.user}"))
            for check in _CHECKS:
                found += check(connection, source)
        found += _replication(source)
    except SourceError as error:
        found.append(_fail("connection", address(source), error.message, error.remedy))
    return found


def _ok(check: str, about: str, message: str) -> Finding:
    return Finding(check, Verdict.OK, about, message)


def _warn(check: str, about: str, message: str, remedy: str) -> Finding:
    return Finding(check, Verdict.WARN, about, message, remedy)


def _fail(check: str, about: str, message: str, remedy: str) -> Finding:
    return Finding(check, Verdict.FAIL, about, message, remedy)


def _row(connection: Connection, query: str, *values: object) -> tuple[Any, ...]:
    with explained("Asking the server for its settings"):
        found = connection.execute(query, values).fetchone()
    return found if found is not None else ()


def _installation() -> Iterator[Finding]:
    """Other packages may be named `sinks` or `snapshots` too."""
    home = Path(__file__).parents[3]
    for name in ("cdc", "sinks", "snapshots", "views"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).parents[1] if spec is not None and spec.origin else None
        if found == home:
            yield _ok("installation", name, "belongs to Millrace")
        else:
            message = f"Python imports the package {name} from {found}, not from {home}"
            yield _fail("installation", name, message, "Install Millrace into a separate environment.")


def _server(connection: Connection, source: SourceSettings) -> Iterator[Finding]:
    version = connection.info.server_version
    shown = f"{version // 10_000}.{version % 10_000}"
    if version < OLDEST_SERVER:
        yield _fail("version", "server", f"PostgreSQL {shown} is too old", "Use PostgreSQL 14 or newer.")
    else:
        yield _ok("version", "server", f"PostgreSQL {shown}")
    if version < publication.FILTERS_FROM:
        for table in source.tables:
            if table.columns or table.where:
                message = f"column lists and row filters need PostgreSQL 15, this is {shown}"
                yield _fail("version", str(table.name), message, "Use `mask: {column: drop}` instead, or upgrade.")
    if not connection.pgconn.ssl_in_use and not is_local(source.host):
        yield _warn("encryption", "connection", "the connection is not encrypted", "Set source.sslmode: verify-full.")


def _wal(connection: Connection, source: SourceSettings) -> Iterator[Finding]:
    level = _row(connection, "select current_setting('wal_level')")[0]
    if level == "logical":
        yield _ok("wal_level", "server", "logical")
    else:
        remedy = "Run: ALTER SYSTEM SET wal_level = 'logical', then restart the server."
        yield _fail("wal_level", "server", f"wal_level is {level}; logical replication needs logical", remedy)
    if _row(connection, "select pg_is_in_recovery()")[0]:
        message = "this is a standby: the publication, backfills and verify need a writable server"
        yield _fail("recovery", "server", message, "Point source.host at the primary.")
    kept = _row(connection, "select current_setting('max_slot_wal_keep_size')")[0]
    if kept == "-1":
        message = "max_slot_wal_keep_size is unlimited: while capture is down, WAL fills the server's disk"
        yield _warn("wal_keep", "server", message, "Set a limit below the free disk space, and an alert well below it.")
    else:
        yield _ok("wal_keep", "server", f"slots may retain {kept} of WAL")


_CAPACITY = """
select current_setting('max_replication_slots')::int, (select count(*) from pg_catalog.pg_replication_slots),
       current_setting('max_wal_senders')::int, (select count(*) from pg_catalog.pg_stat_replication)
"""


def _capacity(connection: Connection, source: SourceSettings) -> Iterator[Finding]:
    slots, used_slots, senders, used_senders = _row(connection, _CAPACITY)
    existing = slot.find(connection, source.slot)
    if existing is None and used_slots >= slots:
        remedy = "Raise max_replication_slots (needs a restart), or drop an unused slot."
        yield _fail("slots", "server", f"all {slots} replication slots are in use (max_replication_slots)", remedy)
    else:
        yield _ok("slots", "server", f"{used_slots} of {slots} replication slots in use")
    if used_senders >= senders and not (existing and existing.active_pid):
        remedy = "Raise max_wal_senders (needs a restart), or stop another replication client."
        yield _fail("senders", "server", f"all {senders} walsenders are in use (max_wal_senders)", remedy)
    else:
        yield _ok("senders", "server", f"{used_senders} of {senders} walsenders in use")


_STANDBY_SLOTS = """
select current_setting('synchronized_standby_slots'),
       coalesce(string_agg(slot_name::text, ',' order by slot_name), '')
  from pg_replication_slots where slot_type = 'physical' and not temporary
"""
_ROLE = """
select rolsuper, rolreplication, rolbypassrls, has_database_privilege(current_database(), 'create')
  from pg_catalog.pg_roles where rolname = current_user
"""


def _role(connection: Connection, source: SourceSettings) -> Iterator[Finding]:
    superuser, replication, _, _ = _row(connection, _ROLE)
    quoted = psycopg.sql.Identifier(source.user).as_string(None)
    if superuser:
        remedy = "Use a role with LOGIN REPLICATION and SELECT on the tables; see deploy/postgres."
        yield _warn("role", source.user, "is a superuser, which capture does not need", remedy)
    elif replication or _grants_replication(connection):
        yield _ok("role", source.user, "may replicate")
    else:
        yield _fail("role", source.user, "lacks REPLICATION", f"Run: ALTER ROLE {quoted} REPLICATION")


def _grants_replication(connection: Connection) -> bool:
    """Managed services grant REPLICATION through a role."""
    query = (
        "select exists (select from pg_catalog.pg_roles r where r.rolname = 'rds_replication'"
        " and pg_has_role(current_user, r.oid, 'member'))"
    )
    return bool(_row(connection, query)[0])


def _tables(connection: Connection, source: SourceSettings) -> Iterator[Finding]:
    if not source.tables:
        yield _fail("tables", "pipeline", "no table is configured", "List tables under source.tables.")
    facts = catalog.tables(connection, (table.name for table in source.tables))
    bypass = any(_row(connection, _ROLE)[index] for index in (0, 2))
    settings = {table.name: table for table in source.tables}
    for missing in settings.keys() - {fact.table for fact in facts}:
        yield _fail("tables", str(missing), "does not exist", "Create it, or remove it from source.tables.")
    for table, above in catalog.ancestors(connection, settings).items():
        for root in [name for name in above if name in settings][-1:]:
            reason = replica_identity.partition_of(table, root, source)
            yield _fail("partitions", str(table), reason.message, reason.remedy)
    unfit = {fact.oid: (message, remedy) for fact, message, remedy in replica_identity.unfit_tables(facts, source)}
    for fact in facts:
        about = str(fact.table)
        if problem := unfit.get(fact.oid):
            yield _fail("identity", about, *problem)
        else:
            yield _identity(fact)
        yield from _access(fact, source, bypass)
        if fact.kind == "p":
            message = "ATTACH, DETACH, DROP and TRUNCATE of a single partition are not published"
            yield _warn("partitions", about, message, "Capture detects them; see source.partitions.")
        if fact.has_children:
            message = "other tables inherit from it: only its own rows are captured"
            yield _warn("inheritance", about, message, "List the tables that inherit from it under source.tables too.")


def _identity(fact: TableFacts) -> Finding:
    if fact.identity == FULL and not fact.key:
        message = "has identity FULL and no primary key: the whole row is its key, and equal rows become one"
        return _warn("identity", str(fact.table), message, f"Run: {replica_identity.statement(fact, False)}")
    return _ok("identity", str(fact.table), f"identified by {', '.join(fact.key)}")


def _access(fact: TableFacts, source: SourceSettings, bypass: bool) -> Iterator[Finding]:
    name = relation(fact.table).as_string(None)
    role = psycopg.sql.Identifier(source.user).as_string(None)
    # A leaf is read through its root, with the root's privileges.
    if not fact.readable and fact.leaf_of is None:
        yield _fail(
            "select", str(fact.table), f"role {source.user} may not read it", f"Run: GRANT SELECT ON {name} TO {role}"
        )
    if fact.row_security and not bypass:
        message = f"row security hides rows from role {source.user}: a snapshot would miss them"
        yield _fail("row_security", str(fact.table), message, f"Run: ALTER ROLE {role} BYPASSRLS")


def _publication(connection: Connection, source: SourceSettings) -> Iterator[Finding]:
    found = publication.read(connection, source.publication)
    if found is None:
        yield _ok("publication", source.publication, "does not exist yet; `millrace run` creates it")
        if not _row(connection, _ROLE)[3]:
            role = psycopg.sql.Identifier(source.user).as_string(None)
            remedy = f"Create it as the tables' owner: {publication.statement(source).as_string(None)}"
            yield _fail("publication", source.publication, f"role {role} may not create it", remedy)
        return
    differences = publication.differences(found, source)
    for difference in differences:
        remedy = "Correct the publication or the pipeline file; a changed publication needs: millrace resync"
        yield _fail("publication", source.publication, difference, remedy)
    if found.all_tables:
        remedy = "Publish a list of tables: otherwise the server sends the changes of all tables to capture."
        yield _warn("publication", source.publication, "publishes all tables", remedy)
    if not differences:
        yield _ok("publication", source.publication, f"publishes {len(found.tables)} tables as configured")


def _slot(connection: Connection, source: SourceSettings) -> Iterator[Finding]:
    found = slot.find(connection, source.slot)
    if found is None:
        yield _ok("slot", source.slot, "does not exist yet; `millrace run` creates it")
        return
    if found.plugin != "pgoutput":
        yield _fail("slot", found.name, f"uses plugin {found.plugin or 'none'}", "Configure another source.slot.")
    elif found.database != source.database:
        yield _fail("slot", found.name, f"belongs to database {found.database}", "Configure another source.slot.")
    elif found.wal_status == "lost":
        yield _fail("slot", found.name, "was invalidated: the WAL it needs was removed", "Run: millrace resync")
    elif found.wal_status == "unreserved":
        remedy = "Run capture now so that it catches up, or raise max_slot_wal_keep_size."
        yield _warn("slot", found.name, "is about to be invalidated", remedy)
    else:
        yield _ok("slot", found.name, f"is {found.wal_status} and retains {found.retained_bytes:,} bytes of WAL")
        yield from _failover(connection, found)


def _failover(connection: Connection, found: slot.SlotFacts) -> Iterator[Finding]:
    """Without synchronized_standby_slots, capture may read changes that a standby does not have when it is promoted."""
    if not found.failover:
        return
    awaited, standbys = _row(connection, _STANDBY_SLOTS)
    if awaited or not standbys:
        yield _ok("failover", found.name, f"is a failover slot; the server waits for: {awaited or 'no standby'}")
        return
    remedy = f"Run: ALTER SYSTEM SET synchronized_standby_slots = '{standbys}'; SELECT pg_reload_conf()"
    message = f"is a failover slot, but a standby that is promoted may lack changes (standbys' slots: {standbys})"
    yield _warn("failover", found.name, message, remedy)


def _replication(source: SourceSettings) -> Iterator[Finding]:
    with connect(source, "millrace doctor", replication=True) as replication:
        server = slot.identify(replication)
    yield _ok("replication", address(source), f"system {server.system_id}, timeline {server.timeline}")


_CHECKS: tuple[Callable[[Connection, SourceSettings], Iterator[Finding]], ...] = (
    _server,
    _wal,
    _capacity,
    _role,
    _tables,
    _publication,
    _slot,
)
