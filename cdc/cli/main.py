"""The command `millrace`. Exit codes: 0 success, 1 failure, 2 configuration or usage error, 3 environment fault."""

import os
import sys
import traceback
from importlib.metadata import entry_points
from importlib.metadata import version as distribution_version

import typer

from cdc.cli import completion
from cdc.cli.data import backfill, fresh, refill, replay, resync, verify, why
from cdc.cli.operate import control, dlq, log, run, tables
from cdc.cli.output import ERR, OUT, JsonOption, print_json
from cdc.cli.setup import doctor, pipeline_file
from cdc.cli.views import view
from cdc.errors import EnvironmentFault, MillraceError
from cdc.service.daemon import footprint

app = typer.Typer(
    name="millrace",
    help="Replicate Postgres into Delta Lake, OpenSearch and Redis, and verify the copies.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

for command in (
    pipeline_file.init,
    pipeline_file.validate,
    run.run,
    run.status,
    tables.tables,
    tables.lag,
    run.wait,
    control.pause,
    control.resume,
    control.skip,
    control.reload,
    doctor.doctor,
    verify.verify,
    why.why,
    fresh.fresh,
    backfill.backfill,
    refill.refill,
    replay.replay,
    resync.resync,
    completion.completion,
):
    app.command()(command)
for name, group in {"config": pipeline_file.config_app, "log": log.app, "dlq": dlq.app, "view": view.app}.items():
    app.add_typer(group, name=name)
for extension in entry_points(group="millrace.commands"):
    loaded = extension.load()
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=extension.name)
    else:
        app.command(extension.name)(loaded)


@app.command()
def version(as_json: JsonOption = False) -> None:
    """Show the versions of Millrace and its main dependencies.

    Example: millrace version --json
    """
    facts = {
        name: distribution_version(name) for name in ("millrace", "pyspark", "delta-spark", "deltalake", "psycopg")
    }
    if as_json:
        print_json(facts)
    else:
        OUT.print("\n".join(f"{name} {number}" for name, number in facts.items()))


def main() -> None:
    """Run the command line. Turns every error into a message and an exit code."""
    try:
        app(prog_name="millrace")
    except MillraceError as error:
        ERR.print(f"error: {error.message}", style="red", markup=False)
        if error.remedy:
            ERR.print(error.remedy, markup=False)
        sys.exit(error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        ERR.print(f"error: {where}{error.strerror or type(error).__name__}.", style="red", markup=False)
        ERR.print("Check that path and its permissions; MILLRACE_DEBUG=1 shows the traceback.", markup=False)
        _print_traceback()
        sys.exit(EnvironmentFault.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        _print_traceback()
        ERR.print(
            f"error: unexpected {type(error).__name__}; MILLRACE_DEBUG=1 shows the traceback", style="red", markup=False
        )
        sys.exit(1)


def program() -> None:
    """`main` without pandas, whose import takes a sixth of the start-up time."""
    footprint.block_import("pandas")
    main()


def _print_traceback() -> None:
    if os.environ.get("MILLRACE_DEBUG"):
        traceback.print_exc()


if __name__ == "__main__":
    program()
