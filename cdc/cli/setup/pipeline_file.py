"""`init`, `validate` and `config show`: the pipeline file."""

from pathlib import Path
from typing import Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, OUT, ConfigOption, JsonOption, print_json
from cdc.config.settings import Settings, redacted
from cdc.errors import ConfigError, EnvironmentFault

TEMPLATE = """\
# A Millrace pipeline. Every setting with its default and meaning: docs/configuration.md.
# ${VAR} and ${VAR:-default} are taken from the environment; MILLRACE_SOURCE__HOST=db overrides source.host.

source:
  host: 127.0.0.1
  port: 5432
  database: shop
  user: millrace                       # a role with LOGIN and REPLICATION, and SELECT on the tables
  password: ${MILLRACE_PASSWORD:-}     # kept out of this file
  slot: millrace                       # the replication slot; one per pipeline
  publication: millrace                # created by `millrace run` if the role may; else see: millrace doctor
  tables:
    - public.users
    - name: public.orders
      # columns: [id, user_id, status] # capture only these; the key must be among them
      # mask: {note: hash}             # drop, hash or mask, before anything is written
      # where: "status <> 'draft'"     # row filter of the publication
      # snapshot: initial              # initial, never or incremental

log:
  kind: segments                       # files under the state folder; or kafka
  # uri: s3://bucket/logs/shop         # keep the segments in a bucket instead
  retention_hours: 168

sinks:
  - kind: delta
    path: ./lake
  - kind: opensearch
    url: http://127.0.0.1:9200
    # shape:                           # other rows and columns than the source's: docs/shaping.md
    #   public.orders: {where: "status <> 'draft'", drop: [note], compute: {total: "price * quantity"}}
  - kind: redis
    url: redis://127.0.0.1:6379/0

http:
  host: 127.0.0.1                      # any other address needs a token
  port: 8080

state: ./millrace-state                # the log, checkpoints and status
"""

config_app = typer.Typer(help="Show the pipeline file.", no_args_is_help=True)


def init(
    path: Annotated[Path, typer.Argument(help="The file to write.")] = DEFAULT_CONFIG,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a commented pipeline file.

    Example: millrace init && millrace validate
    """
    if path.exists() and not force:
        raise ConfigError(f"{path} exists already.", "Choose another name, or replace it with --force.")
    try:
        path.write_text(TEMPLATE, encoding="utf-8")
        path.chmod(0o600)  # users may write a password into it, despite the comment
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be written: {error.strerror}.", "Choose another folder.") from None
    OUT.print(f"Wrote {path}. Edit it, then: millrace validate --config {path}")


def validate(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Check a pipeline file without connecting to anything.

    Example: millrace validate --config millrace.yaml
    """
    from cdc.service.daemon.process import settings_from

    settings = settings_from(config)
    _check_runnable(settings, config)
    tables, sinks = len(settings.source.tables), [sink.name for sink in settings.sinks]
    views = [view.name for view in settings.views]
    if as_json:
        print_json({"valid": True, "tables": tables, "views": views, "sinks": sinks})
    else:
        derived = f"views: {', '.join(views)}, " if views else ""
        OUT.print(f"{config} is valid: {tables} table(s), {derived}sinks: {', '.join(sinks) or 'none'}.", markup=False)


def _check_runnable(settings: Settings, config: Path) -> None:
    """Raise what `run` would refuse at once although the file is valid."""
    from cdc.service.http.guard import guard
    from snapshots.tables.rows import masking_of

    if not settings.source.tables:
        raise ConfigError(f"{config}: source.tables is empty; nothing would be captured.", "Name one: - public.orders")
    masking_of(settings.source)  # raises where a hash has no key
    guard(settings.http)
    _check_shapes(settings)


def _check_shapes(settings: Settings) -> None:
    """Check shapes against the schemas of a log in the state folder, if there is one yet; others need `doctor`."""
    if not any(sink.shape for sink in settings.sinks):
        return
    import cdc.log
    from cdc.capture.source.doctor import Verdict
    from sinks.shape.check import examine

    here = (
        settings.log.kind == "segments" and not getattr(settings.log, "uri", "") and (settings.state / "log").exists()
    )
    schemas = cdc.log.open_reader(settings).schemas.newest() if here else ()
    for finding in examine(settings, schemas):
        if finding.verdict is Verdict.FAIL:
            raise ConfigError(finding.message, finding.remedy)


@config_app.command("show")
def show(config: ConfigOption = DEFAULT_CONFIG, as_json: JsonOption = False) -> None:
    """Show the effective settings, with secrets hidden.

    Includes defaults and overrides from the environment.

    Example: millrace config show --json
    """
    import yaml

    from cdc.service.daemon.process import settings_from

    facts = redacted(settings_from(config))
    if as_json:
        print_json(facts)
    else:
        OUT.out(yaml.safe_dump(facts, sort_keys=False, allow_unicode=True), end="")
