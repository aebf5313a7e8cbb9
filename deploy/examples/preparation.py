"""What an example needs before its pipeline starts: servers, a fresh database, variables for its pipeline file."""

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg import sql

from cdc.config.settings import Settings
from cdc.durable_files import replace_unsynced
from cdc.errors import ConfigError
from cdc.service.daemon.process import settings_from
from deploy.demo import pipeline
from deploy.examples.example import Example
from deploy.examples.stored_rows import clear
from deploy.local import ports
from deploy.local.servers import Servers

_REDIS_DATABASE = 15
"""Away from database 0, which the demo uses: that of the examples is emptied before each run."""


@contextmanager
def servers_of(example: Example, servers: Servers, keep: bool) -> Iterator[None]:
    """Start Postgres and the stores of the example; at the end stop those that did not run before, unless `keep`."""
    before = set(servers.status())
    try:
        servers.up(("postgres", *sorted(example.stores)))
        yield
    finally:
        started = set(servers.status()) - before
        if started and not keep:
            servers.down(sorted(started))


def prepare(example: Example, servers: Servers) -> Settings:
    """Begin anew: a fresh database with the example's tables, no state, empty stores. Sets the variables of the
    pipeline file for this process and those that it starts."""
    _drop_database(servers, example.name)
    folder = folder_of(servers, example)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700, parents=True)
    password = pipeline.create_database(servers, example.name)
    variables = _variables(servers, folder, password)
    replace_unsynced(variables_path(folder), _exports(variables).encode())
    os.environ.update(variables)
    settings = settings_from(example.config)
    with pipeline.connect(servers, example.name) as owner:
        owner.execute(example.tables.encode())
        pipeline.publish(owner, [table.name for table in settings.captured])
    for sink in settings.sinks:
        for table in settings.tables_of(sink):
            clear(sink, table)
    return settings


def folder_of(servers: Servers, example: Example) -> Path:
    """The folder of the example's state. It is emptied before each run."""
    return servers.home / "examples" / example.name


def variables_path(folder: Path) -> Path:
    """A file that a shell reads to have the variables of the pipeline file, for other commands."""
    return folder / "variables.sh"


def _drop_database(servers: Servers, name: str) -> None:
    with pipeline.connect(servers, "postgres") as admin:
        try:
            admin.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s", (name,)
            )
        except psycopg.errors.ObjectInUse:
            raise ConfigError(f"The example {name} runs already.", "Stop it first.") from None
        admin.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))


def _variables(servers: Servers, folder: Path, password: str) -> Mapping[str, str]:
    running = servers.status()
    facts = {
        "STATE": str(folder / "state"),
        "HTTP_PORT": str(ports.pick()),
        "POSTGRES_HOST": running["postgres"].host,
        "POSTGRES_PORT": str(running["postgres"].port),
        "POSTGRES_PASSWORD": password,
    }
    if "redis" in running:
        facts["REDIS_URL"] = f"redis://{running['redis'].host}:{running['redis'].port}/{_REDIS_DATABASE}"
    if "opensearch" in running:
        facts["OPENSEARCH_URL"] = running["opensearch"].address
    return facts


def _exports(variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
